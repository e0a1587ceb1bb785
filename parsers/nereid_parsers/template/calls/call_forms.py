"""The forms of tool calls that the analysis can infer: one reader for each form."""

from __future__ import annotations

from nereid_parsers.template.calls.calls_json import read_json, read_json_arguments
from nereid_parsers.template.calls.calls_literal import read_bare_keys, read_python
from nereid_parsers.template.calls.calls_tagged import read_nested, read_tagged

# The readers, in the order in which they are tried. A reader takes the renderings of tool calls
# (`CallTexts`) and returns their format, or None if the tool calls have another form.
READERS = (
    read_json,
    read_json_arguments,
    read_python,
    read_bare_keys,
    read_nested,
    read_tagged,
)
