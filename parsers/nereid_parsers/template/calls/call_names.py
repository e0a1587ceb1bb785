"""Masks the name of the function in the text after a tool call, such as `</f>`."""

from __future__ import annotations

from nereid_parsers.template.calls.call_texts import CallTexts
from nereid_parsers.template.conversation import FIRST_TOOL, FIRST_VALUE, SECOND_TOOL


def mask_repeated_names(texts: CallTexts) -> CallTexts:
    """Replace each name after the arguments: `<f>{..}</f>` becomes `<f>{..}</{name}>`.

    The parser replaces `{name}` in a declared closing marker with the name of the function. If the
    arguments precede the name, as in `{"arguments": {..}, "name": "f"}`, return `texts` unchanged.

    >>> texts = CallTexts("<zqFirstTool>zqValueOne</zqFirstTool>", "", "", two_calls="")
    >>> mask_repeated_names(texts).one_call
    '<zqFirstTool>zqValueOne</{name}>'
    """
    before_value, _, _ = texts.one_call.rpartition(FIRST_VALUE)
    num_in_header = before_value.count(FIRST_TOOL)  # Two in `<call name="f"><f>..</f>`.
    if num_in_header == 0:
        return texts
    return CallTexts._make(_mask_names_after(text, num_in_header) for text in texts)


def _mask_names_after(text: str, num_in_header: int) -> str:
    """Replace the names of functions in `text` with `{name}`, except in the headers of tool calls.

    Each name occurs `num_in_header` times in the header, and the header precedes all other
    occurrences.

    >>> _mask_names_after("<zqFirstTool>zqValueOne</zqFirstTool>", num_in_header=1)
    '<zqFirstTool>zqValueOne</{name}>'
    """
    for name in (FIRST_TOOL, SECOND_TOOL):
        pieces = text.split(name)
        header = name.join(pieces[: num_in_header + 1])
        text = "{name}".join([header, *pieces[num_in_header + 1 :]])
    return text
