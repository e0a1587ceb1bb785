"""Infer the markup of a tool call without arguments, if it lacks the markup of arguments.

Example: a template writes `<c>f<args><p=a>1</p></args></c>`, but only `<c>f</c>` if the call of `f`
has no arguments.
"""

from __future__ import annotations

from dataclasses import replace

from nereid_parsers.format import Call, Format, Sections, ToolSection
from nereid_parsers.stream.parser import parse
from nereid_parsers.template.calls.call_heads import ArgumentsBody, calls_with_head
from nereid_parsers.template.calls.call_texts import CallFormat
from nereid_parsers.template.conversation import FIRST_TOOL
from nereid_parsers.template.difference import MARKER
from nereid_parsers.template.marker_lengths import check_marker_lengths


def add_call_without_arguments(
    section: ToolSection, call_format: CallFormat, no_arguments: str
) -> ToolSection:
    """Add a variant of the tool call for calls without arguments, if the section lacks one.

    Return `section` unchanged if the parser already reads the rendered tool call, or if no variant
    can be inferred.

    `call_format` is the inferred format from which `section` was built. `no_arguments` is the
    rendered text of a tool call without arguments. It is "" if the template fails to render this
    tool call.
    """
    if not no_arguments or _is_read(section, no_arguments):
        return section
    with_variants = replace(
        section, calls=(*section.calls, *_infer_variants(call_format, no_arguments))
    )
    return with_variants if _is_read(with_variants, no_arguments) else section


def _is_read(section: ToolSection, no_arguments: str) -> bool:
    """Return whether the parser reads exactly one tool call, without arguments, from the text.

    Raises:
        LimitError: A marker of `section` is too long.
    """
    fmt = Format("", Sections(tools=section))
    check_marker_lengths(fmt)
    message = parse(no_arguments, format=fmt)
    return [(call.name, call.arguments) for call in message.tool_calls] == [(FIRST_TOOL, "{}")]


def _infer_variants(call_format: CallFormat, no_arguments: str) -> tuple[Call, ...]:
    """Return the declarations of a tool call without arguments, or () if they are not known.

    The text after the name of the function, such as `</name></call>`, is divided at its last
    marker: `</name>` belongs to the header, and `</call>` closes the tool call.
    """
    body, markup = call_format.calls[0].body, call_format.markup
    if not isinstance(body, ArgumentsBody):
        return ()
    before, _, after = no_arguments.partition(FIRST_TOOL)
    has_other_opening = before.strip() != (markup.open + markup.item_open).strip()
    if has_other_opening:
        return ()
    after_name = after.removesuffix(markup.close)
    marker_starts = [marker.start() for marker in MARKER.finditer(after_name)]
    end_of_header = marker_starts[-1] if marker_starts else 0
    item_close = after_name[end_of_header:]
    if not item_close.strip():
        return ()
    return calls_with_head(replace(markup, item_close=item_close), after_name[:end_of_header], body)
