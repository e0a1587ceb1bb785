"""Infer how a template writes tool calls: one reader for each form of tool calls.

A reader takes the renderings of tool calls (`CallTexts`) and returns their format (`CallFormat`),
or None if the tool calls have another form.
"""

from nereid_parsers.template.calls.calls_json import read_json, read_json_arguments
from nereid_parsers.template.calls.calls_nested import read_nested
from nereid_parsers.template.calls.calls_python import read_python
from nereid_parsers.template.calls.calls_tagged import read_tagged
from nereid_parsers.template.calls.calls_unquoted_keys import read_unquoted_keys

# The readers, in the order in which they are tried.
READERS = (
    read_json,
    read_json_arguments,
    read_python,
    read_unquoted_keys,
    read_nested,
    read_tagged,
)
