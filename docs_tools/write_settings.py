"""Write everything that is derived from the declarations of the settings.

    make settings                                 # write the files
    python docs_tools/write_settings.py --check   # fail if a file is not up to date

The settings are declared in EngineConfig, ServingSettings, PoolingConfig, PoolingServing and the
frontend's Settings. The derived files are:

- docs/reference/settings.md: the flags, the default and the meaning in each row of a table. The
  page itself determines the sections and the order of the rows.
- client/nereid_client/cli/engine_settings.json: the descriptions that `nereid serve --help` shows.
- backend/nereid_backend/serving/frontend_variables.txt: the frontend's variables, which the backend
  must not reject as unknown.

The last two files exist because the client and the backend must not import each other.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from nereid_backend.config import EngineConfig
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.serving.serving_settings import PoolingServing, ServingSettings
from nereid_client.cli.flag_commands import build_parser
from nereid_client.settings import SCHEMA, VARIABLES
from pydantic import TypeAdapter

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "settings.md"
ENGINE_SETTINGS = ROOT / "client" / "nereid_client" / "cli" / "engine_settings.json"
FRONTEND_VARIABLES = ROOT / "backend" / "nereid_backend" / "serving" / "frontend_variables.txt"
_ROW = re.compile(r"^\| `(NEREID_\w+)`.*$", re.MULTILINE)


def main() -> int:
    """Write or check the files, and return the exit code."""
    declared = declarations()
    texts = {
        ENGINE_SETTINGS: engine_settings(),
        FRONTEND_VARIABLES: "".join(
            variable.removeprefix("NEREID_") + "\n" for variable in VARIABLES.values()
        ),
        PAGE: fill_page(PAGE.read_text(encoding="utf-8"), declared),
    }
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv:
        for path in stale:
            sys.stdout.write(f"{path.relative_to(ROOT)} is not up to date. Run `make settings`.\n")
        return 1 if stale else 0
    for path in stale:
        path.write_text(texts[path], encoding="utf-8")
        sys.stdout.write(f"wrote {path.relative_to(ROOT)}\n")
    return 0


def declarations() -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each setting, by its environment variable.

    The variables of the pooling models begin with NEREID_X_, where X is EMBEDDING or RERANK.
    """
    found: dict[str, dict[str, Any]] = {}
    for kind, prefix in (
        (ServingSettings, ""),
        (EngineConfig, ""),
        (PoolingServing, "X_"),
        (PoolingConfig, "X_"),
    ):
        schema = TypeAdapter(kind).json_schema()["properties"]
        found |= {f"NEREID_{prefix}{name}".upper(): one for name, one in schema.items()}
    return found | {VARIABLES[name]: one for name, one in SCHEMA.items()}


def engine_settings() -> str:
    """Return the descriptions of the language model's settings as JSON, by variable."""
    found = {}
    for kind in (ServingSettings, EngineConfig):
        for name, one in TypeAdapter(kind).json_schema()["properties"].items():
            found[f"NEREID_{name.upper()}"] = " ".join(one["description"].split())
    return json.dumps(found, indent=2) + "\n"


def fill_page(text: str, declared: dict[str, dict[str, Any]]) -> str:
    """Return the page with the flags, the default and the meaning in each row filled in.

    Example: the row "| `NEREID_SEED` | |" becomes
    "| `NEREID_SEED` | `0` | The random seed for requests without the field `seed`. |".

    Raises:
        SystemExit: the page lacks a setting, or has a row for something else.
    """
    rows = _ROW.findall(text)
    wrong = set(rows) ^ set(declared)
    if wrong or len(rows) != len(declared):
        twice = {name for name in rows if rows.count(name) > 1}
        raise SystemExit(
            f"{PAGE.relative_to(ROOT)} must have one row for each setting. Wrong are: "
            f"{', '.join(sorted(wrong | twice))}."
        )
    flags = serve_flags()

    def fill(match: re.Match[str]) -> str:
        variable = match[1]
        names = "<br>".join(f"`{name}`" for name in [variable, *flags.get(variable, [])])
        meaning = " ".join(declared[variable]["description"].split())
        return f"| {names} | {default_of(variable, declared[variable])} | {meaning} |"

    return _ROW.sub(fill, text)


def serve_flags() -> dict[str, list[str]]:
    """Return the flags of `nereid serve` for each variable that a help text names in brackets."""
    commands: Any = next(a.choices for a in build_parser()._actions if a.dest == "command")
    found: dict[str, list[str]] = {}
    for action in commands["serve"]._actions:
        for variable in re.findall(r"\[(NEREID_\w+)\]$", action.help or ""):
            variable = re.sub("_(EMBEDDING|RERANK)_", "_X_", variable)
            found.setdefault(variable, []).extend(action.option_strings)
    return found


def default_of(variable: str, setting: dict[str, Any]) -> str:
    """Return the default of a setting as Markdown. Sizes are shown with a unit: `64MiB`."""
    if "default" not in setting:
        return "set in `config.pbtxt`"
    default = setting["default"]
    if default in (None, ""):
        return "not set"
    if variable.endswith("_BYTES"):
        return f"`{default / 2**20:g}MiB`" if default >= 2**20 else f"`{default / 2**10:g}KiB`"
    return (
        f"`{default:g}`"
        if isinstance(default, float)
        else f"`{json.dumps(default).strip(chr(34))}`"
    )


if __name__ == "__main__":
    sys.exit(main())
