"""Infer the markup of tool calls without arguments, if their form differs from other tool calls.

Example: a template writes `<c>f<args><p=a>1</p></args></c>`, but only `<c>f</c>` if the call of `f`
has no arguments.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from nereid_parsers.format import Call, Format, Sections, ToolSection
from nereid_parsers.stream.parser import parse
from nereid_parsers.template.calls.call_heads import ArgumentsBody, calls_with_head
from nereid_parsers.template.calls.call_texts import CallFormat
from nereid_parsers.template.conversation import FIRST_TOOL
from nereid_parsers.template.markup.marker_lengths import check_marker_lengths
from nereid_parsers.template.markup.markers import MARKER


class _TextAfterName(NamedTuple):
    """The text after the name in a tool call without arguments, such as `</name></call>`.

    Attributes:
        header_rest: The rest of the header, such as `</name>`.
        call_close: The text that closes the tool call, such as `</call>`.
    """

    header_rest: str
    call_close: str


def add_call_without_arguments(
    section: ToolSection, call_format: CallFormat, rendered_call: str
) -> ToolSection:
    """Add a variant of the tool call for calls without arguments, if the section lacks one.

    Return `section` unchanged if the parser already reads the rendered tool call, or if no variant
    can be inferred.

    `call_format` is the inferred format from which `section` was built. `rendered_call` is the text
    of a tool call without arguments, or "" if the template fails to render this tool call.
    """
    if not rendered_call or _parser_reads(section, rendered_call):
        return section
    variants = _declare_call_without_arguments(call_format, rendered_call)
    with_variants = replace(section, calls=(*section.calls, *variants))
    return with_variants if _parser_reads(with_variants, rendered_call) else section


def _parser_reads(section: ToolSection, rendered_call: str) -> bool:
    """Return whether the parser reads exactly one tool call, without arguments, from the text.

    Raises:
        LimitError: A marker of `section` is too long.
    """
    fmt = Format("", Sections(tools=section))
    check_marker_lengths(fmt)
    message = parse(rendered_call, format=fmt)
    return [(call.name, call.arguments) for call in message.tool_calls] == [(FIRST_TOOL, "{}")]


def _declare_call_without_arguments(
    call_format: CallFormat, rendered_call: str
) -> tuple[Call, ...]:
    """Declare a tool call without arguments. Return () if its markup cannot be inferred.

    `rendered_call` is the text of this call, with the markers around all tool calls of a message.
    Example: in `<calls><call><name>f</name></call></calls>`, the header is `<name>{name}</name>`,
    and `</call>` closes the tool call.

    `call_format` describes the tool calls with arguments. The tool call without arguments must
    start with the same text, such as `<calls><call><name>`.
    """
    body = call_format.calls[0].body
    if not isinstance(body, ArgumentsBody):
        return ()  # The name is a part of the arguments, as in `{"name": "f"}`.
    markup = call_format.markup
    before_name, _, after_name = rendered_call.partition(FIRST_TOOL)
    usual_opening = markup.open + markup.item_open  # `<calls>` and `<call><name>`
    if before_name.strip() != usual_opening.strip():
        return ()
    after_name_in_call = after_name.removesuffix(markup.close)  # without `</calls>`
    header_rest, call_close = _split_at_last_marker(after_name_in_call)
    if not call_close.strip():
        return ()  # Without a closing text, the parser cannot find the end of the tool call.
    return calls_with_head(markup.item_open, after_name=header_rest, body=body, close=call_close)


def _split_at_last_marker(text: str) -> _TextAfterName:
    """Split `text`, which follows the function's name, before the last marker.

    The last marker closes the tool call.

    >>> _split_at_last_marker("</name></call>")
    _TextAfterName(header_rest='</name>', call_close='</call>')

    If there is no marker, the whole text closes the tool call.
    """
    marker_starts = [marker.start() for marker in MARKER.finditer(text)]
    last_marker_start = marker_starts[-1] if marker_starts else 0
    return _TextAfterName(text[:last_marker_start], text[last_marker_start:])
