# SPDX-License-Identifier: Apache-2.0
"""Tells which settings are wrong before anything is loaded, in a tenth of a second.

    python -m nereid_backend.serving.check_settings MODEL_REPOSITORY

Reads the NEREID_* variables and the parameters of each model's config.pbtxt as the models do, and
prints one line for each that is wrong. Exit code 2 when there is one, else 0. What only the
checkpoint or the machine can tell (does it fit, is there a GPU) is found when they load.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nereid_parsers import NereidParsersError, get_format

from nereid_backend.errors import ConfigError
from nereid_backend.serving import pooling_tensor_names as pooling_names
from nereid_backend.serving.pooling.pooling_settings import read_pooling_settings
from nereid_backend.serving.serving_settings import ServingSettings, read_settings

WRONG = 2
_NO_FORMAT = "none"
_PARAMETER = re.compile(
    r'parameters\s*:?\s*\{\s*key\s*:\s*"([^"]*)"\s*,?\s*'
    r'value\s*:?\s*\{\s*string_value\s*:\s*"((?:[^"\\]|\\.)*)"'
)


def problems(repository: Path, environ: Mapping[str, str] = os.environ) -> list[str]:
    """What is wrong with the settings of a repository's models; each is said once."""

    def read_language_model(arguments: Mapping[str, str]) -> None:
        settings, _ = read_settings(arguments, environ)
        _check_formats(settings)

    def read_pooling_model(kind: str) -> Callable[[Mapping[str, str]], object]:
        return lambda arguments: read_pooling_settings(kind, arguments, environ)

    readers = {
        **dict.fromkeys(("tokenizer", "executor", "postprocessor"), read_language_model),
        **{
            kind: read_pooling_model(kind)
            for kind in (pooling_names.EMBEDDING, pooling_names.RERANK)
        },
    }
    found: list[str] = []
    for model, read in readers.items():
        path = repository / model / "config.pbtxt"
        if path.is_file():
            try:
                read(_arguments(path))
            except ConfigError as error:
                found.append(str(error))
    return list(dict.fromkeys(found))


def _arguments(path: Path) -> dict[str, str]:
    """What the server would tell a model of its file, as far as settings are concerned."""
    text = re.sub(r"^\s*#.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    parameters = {key: {"string_value": value} for key, value in _PARAMETER.findall(text)}
    return {
        "model_config": json.dumps({"parameters": parameters}),
        "model_repository": str(path.parent.absolute()),
    }


def _check_formats(settings: ServingSettings) -> None:
    for part, name in (
        ("reasoning_parser", settings.reasoning_parser),
        ("tool_parser", settings.tool_parser),
    ):
        if name not in ("", _NO_FORMAT):
            try:
                get_format(**{part.removesuffix("_parser").replace("tool", "tools"): name})
            except NereidParsersError as error:
                raise ConfigError(f"{part}: {error}") from error


def main(argv: Sequence[str] = sys.argv) -> int:
    """Print what is wrong."""
    found = problems(Path(argv[1]))
    for line in found:
        print(line)  # noqa: T201 - what this program is for
    return WRONG if found else 0


if __name__ == "__main__":
    sys.exit(main())
