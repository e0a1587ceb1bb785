"""The forms that calls may have, and in which order they are tried."""

from __future__ import annotations

from nereid_parsers.template.calls_json import read_json, read_json_arguments
from nereid_parsers.template.calls_literal import read_bare_keys, read_python
from nereid_parsers.template.calls_tagged import read_nested, read_tagged

READERS = (
    read_json, read_json_arguments, read_python, read_bare_keys, read_nested, read_tagged,
)  # fmt: skip
