"""Find the markers in a text. A marker is a piece of markup, such as `<tool_call>` or `[END]`."""

from __future__ import annotations

import re

# Brackets that rarely occur in other text. Some templates write markers such as `◁think▷`.
OPEN_BRACKETS = "◁«《【〔〖｟⟦⟨⟪"
_CLOSE_BRACKETS = "▷»》】〕〗｠⟧⟩⟫"
IN_BRACKETS = f"[{OPEN_BRACKETS}][^{OPEN_BRACKETS}{_CLOSE_BRACKETS}\n]*[{_CLOSE_BRACKETS}]"
# Matches a marker, such as `<think>` or `[TOOL_CALLS]`. The expression does not
# match an unclosed `<tag` or a short `[A]`, because these texts are not markers.
MARKER = re.compile(
    r"<[^<>\s][^<>\n]*>|\[\[/?[^\W\d]\w*\]\]|\[/\w+\]|\[/?[A-Z][A-Z_ ]{2,}\]"
    r"|\[\|[^\[\]|\n]+\|\]|[\[\]]\w*~!?\w*[\[\]]|" + IN_BRACKETS
)


def markers(text: str) -> list[str]:
    """Return the markers in `text`, in order.

    A marker is a piece of markup such as `<think>`, `<|im_end|>` or `[END]`.

    >>> markers("<think>one two</think>[END]")
    ['<think>', '</think>', '[END]']
    """
    return MARKER.findall(text)


def leading_markers(text: str) -> list[str]:
    r"""Return the markers, such as `<think>`, that precede the first word of `text`.

    A marker is a piece of markup such as `<think>`. White space may precede each marker.

    >>> leading_markers("<|eom|>\n<|start|>user<|message|>")
    ['<|eom|>', '<|start|>']
    """
    leading: list[str] = []
    rest = text.lstrip()
    match = MARKER.match(rest)
    while match is not None:
        leading.append(match.group())
        rest = rest[match.end() :].lstrip()
        match = MARKER.match(rest)
    return leading


def first_two(found_markers: list[str]) -> tuple[str, str]:
    """Return the first and the second marker of a list. A missing marker is "" in the result.

    >>> first_two(["<think>"]), first_two(["<think>", "</think>", "<answer>"])
    (('<think>', ''), ('<think>', '</think>'))
    """
    first = found_markers[0] if found_markers else ""
    second = found_markers[1] if len(found_markers) > 1 else ""
    return first, second


def leading_marker(text: str) -> str:
    r"""Return the marker at the start of `text`, or "" if `text` does not start with a marker.

    A marker is a piece of markup such as `<think>`. White space before the marker is ignored.

    >>> leading_marker("\n<think>Hello"), leading_marker("Hello<think>")
    ('<think>', '')
    """
    return next(iter(leading_markers(text)), "")


def trailing_marker(text: str) -> str:
    r"""Return the marker at the end of `text`, or "" if `text` does not end with a marker.

    A marker is a piece of markup such as `<think>`. White space after the marker is ignored.

    >>> trailing_marker("Hello<|start|><think>\n"), trailing_marker("<think>Hello")
    ('<think>', '')
    """
    all_markers = markers(text)
    if not all_markers:
        return ""
    last = all_markers[-1]
    return last if text.rstrip().endswith(last) else ""


def compound_closing(text: str, opening: str) -> str:
    """Return the closing text of a block, if several markers open the block.

    A block is a part of a message, such as the reasoning. In the example, the opening text is
    `<|open|>think<|sep|>`. The closing text differs from the opening text only in the first marker,
    so it also ends with `think<|sep|>`:

    >>> compound_closing("<|close|>think<|sep|>Hello", opening="<|open|>think<|sep|>")
    '<|close|>think<|sep|>'

    If only one marker opens the block, or if `text` does not start with a closing text, return "".

    >>> compound_closing("</think>Hello", opening="<think>")
    ''
    """
    first_marker = MARKER.match(opening)
    if first_marker is None:
        return ""
    common_end = opening[first_marker.end() :]  # `think<|sep|>`
    has_several_markers = bool(markers(common_end))
    if not has_several_markers:
        return ""
    closing = re.match(rf"\s*(?:{MARKER.pattern}){re.escape(common_end)}", text)
    return "" if closing is None else closing.group()
