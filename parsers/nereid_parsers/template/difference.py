"""Two texts that should differ in one thing: where they agree, with markers kept whole."""

from __future__ import annotations

import re
from dataclasses import dataclass

# A token is never cut: `<|im_end|>`, `[TOOL_CALLS]`, a word, a fence, one blank, one other sign.
_TOKEN = re.compile(
    r"<[^<>\s][^<>\n]*>?|\[/?[A-Z][A-Z_ ]*\]|\[\|[^\[\]|\n]+\|\]|[\[\]]\w*~!?\w*[\[\]]"
    r"|◁[^◁▷\n]*▷|```|\w+|\s|.",
    re.DOTALL,
)
MARKER = re.compile(
    r"<[^<>\s][^<>\n]*>|\[/?[A-Z][A-Z_ ]{2,}\]|\[\|[^\[\]|\n]+\|\]|[\[\]]\w*~!?\w*[\[\]]"
    r"|◁[^◁▷\n]*▷"
)
_PAIRS = (
    ("START", "END"), ("BEGIN", "END"), ("begin", "end"), ("start", "end"),
    ("prefix", "suffix"), ("open", "close"), ("◁", "◁/"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """One comparison: two renderings that differ in one thing, and what was read off them.

    name      which comparison: "R1 reasoning presence".
    changed   what was changed from left to right.
    finding   what follows from the difference, in words.
    """

    name: str
    changed: str
    left: str
    right: str
    finding: str

    def parts(self) -> tuple[str, str, str, str]:
        """(common start, only left, only right, common end)."""
        start = common_start(self.left, self.right)
        left, right = self.left[len(start) :], self.right[len(start) :]
        end = common_end(left, right)
        return start, left[: len(left) - len(end)], right[: len(right) - len(end)], end


@dataclass(frozen=True, slots=True)
class Row:
    """Things in a row: `open` item `separator` item `close`, each item between its own marks."""

    open: str
    item_open: str
    item_close: str
    separator: str
    close: str


def tokens(text: str) -> list[str]:
    """The text in pieces that are never cut."""
    return _TOKEN.findall(text)


def common_start(one: str, other: str) -> str:
    """The longest common start that cuts no token."""
    size = 0
    for left, right in zip(tokens(one), tokens(other), strict=False):
        if left != right:
            break
        size += len(left)
    return one[:size]


def common_end(one: str, other: str) -> str:
    """The longest common end that cuts no token."""
    size = 0
    for left, right in zip(reversed(tokens(one)), reversed(tokens(other)), strict=False):
        if left != right:
            break
        size += len(left)
    return one[len(one) - size :]


def markers(text: str) -> list[str]:
    """The markers in a text, in order."""
    return MARKER.findall(text)


def row(before: str, between: str, after: str) -> Row:
    """Tell apart what surrounds two items in a row.

    `before` stands before the first item, `between` the two, `after` behind the second.
    """
    item_close = common_start(between, after)
    rest = between[len(item_close) :]
    item_open = common_end(rest, before)
    return Row(
        open=before[: len(before) - len(item_open)],
        item_open=item_open,
        item_close=item_close,
        separator=rest[: len(rest) - len(item_open)],
        close=after[len(item_close) :],
    )


def mirrored(marker: str) -> list[str]:
    """How the marker that closes what `marker` opens may be spelled."""
    found = []
    if marker.startswith("<") and not marker.startswith(("</", "<|", "<｜")):
        found.append("</" + marker[1:])
    if marker.startswith("<|") and marker.endswith(">") and not marker.endswith("|>"):
        found.append("<" + marker[2:-1] + "|>")
    if marker.startswith("["):
        found.append("[/" + marker[1:])
    if marker.startswith("[|"):
        found.append("[|/" + marker[2:])
    if marker.startswith(("<|", "<｜")):
        found += [marker[:2] + "/" + marker[2:], "</" + marker[1:]]
    found += [marker.replace(one, other) for one, other in _PAIRS if one in marker]
    return found


def unmirrored(marker: str) -> list[str]:
    """How the marker that `marker` closes may be spelled."""
    found = [marker.replace("/", "", 1)] if marker[:3].count("/") else []
    if marker.endswith("|>") and not marker.startswith("<|"):
        found.append("<|" + marker[1:-2] + ">")
    return found + [marker.replace(one, other) for other, one in _PAIRS if one in marker]
