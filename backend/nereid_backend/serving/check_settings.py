# SPDX-License-Identifier: Apache-2.0
"""Validates the settings of all models within a tenth of a second, before anything is loaded.

    python -m nereid_backend.serving.check_settings MODEL_REPOSITORY

The program reads the NEREID_* variables and the parameters of each config.pbtxt as the models do,
and prints one line for each wrong setting. Its exit code is 2 if a setting is wrong, else 0. The
program does not detect problems that depend on the checkpoint or the machine, such as too little
memory or a missing GPU. The models report those when they load.
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

EXIT_WRONG_SETTINGS = 2
_NO_FORMAT = "none"
# Matches one parameter of config.pbtxt, such as
# parameters { key: "max_num_seqs" value: { string_value: "8" } }
_PARAMETER = re.compile(
    r'parameters\s*:?\s*\{\s*key\s*:\s*"([^"]*)"\s*,?\s*'
    r'value\s*:?\s*\{\s*string_value\s*:\s*"((?:[^"\\]|\\.)*)"'
)


def find_problems(repository: Path, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return one message for each wrong setting of a repository's models, without repetitions."""

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
    problems: list[str] = []
    for model, read in readers.items():
        path = repository / model / "config.pbtxt"
        if path.is_file():
            try:
                read(_arguments(path))
            except ConfigError as error:
                problems.append(str(error))
    return list(dict.fromkeys(problems))


def _arguments(path: Path) -> dict[str, str]:
    """Return the arguments that Triton server passes to `initialize` for this config.pbtxt.

    Only the arguments from which settings are read are returned.
    """
    text = re.sub(r"^\s*#.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    parameters = {key: {"string_value": value} for key, value in _PARAMETER.findall(text)}
    return {
        "model_config": json.dumps({"parameters": parameters}),
        "model_repository": str(path.parent.absolute()),
    }


def _check_formats(settings: ServingSettings) -> None:
    """Raise a ConfigError if a parser setting is not the name of a chat format."""
    for setting, argument, name in (
        ("reasoning_parser", "reasoning", settings.reasoning_parser),
        ("tool_parser", "tools", settings.tool_parser),
    ):
        if name not in ("", _NO_FORMAT):
            try:
                get_format(**{argument: name})
            except NereidParsersError as error:
                raise ConfigError(f"{setting}: {error}") from error


def main(argv: Sequence[str] = sys.argv) -> int:
    """Print one line for each wrong setting, and return the exit code."""
    problems = find_problems(Path(argv[1]))
    for line in problems:
        print(line)  # noqa: T201 - the program's output
    return EXIT_WRONG_SETTINGS if problems else 0


if __name__ == "__main__":
    sys.exit(main())
