"""What stands around plain content: comparison C1."""

from __future__ import annotations

from nereid_parsers.format import Reasoning, Wrapper
from nereid_parsers.template.difference import MARKER, Comparison, markers, mirrored
from nereid_parsers.template.frame import Frame
from nereid_parsers.template.probe import CONTENT, EOS, Scene, Turn


def compare_content(
    frame: Frame, reasoning: Reasoning | None, hint: Wrapper | None
) -> tuple[Wrapper | None, list[Comparison]]:
    """C1: with a prompt alone and with an answer; sets `frame.ends`. The wrapper, if there is one.

    `hint` is the wrapper that reasoning showed.
    """
    scene = Scene(Turn(CONTENT))
    body = frame.raw_body(scene)
    if body is None or CONTENT not in body:
        return hint, []
    at = body.find(CONTENT)
    before = without_reasoning(body[:at], reasoning).lstrip()
    behind = body[at + len(CONTENT) :]
    wrapper = hint
    if before:
        close = _wrapper_close(behind, before.strip(), frame)
        wrapper = Wrapper(before, behind[: behind.find(close)] + close if close else "")
        behind = behind[len(wrapper.close) :]
    ends = [marker for marker in _leading_markers(behind)[:1] if marker != EOS]
    frame.ends = tuple(ends)
    finding = f"content stands between {wrapper.open!r} and {wrapper.close!r}" if wrapper else (
        "content is plain"
    )  # fmt: skip
    if ends:
        finding += f"; {ends[0]!r} ends the turn"
    prompt, text = frame.prober.text(Scene()) or "", frame.prober.text(scene) or ""
    return wrapper, [Comparison("C1 content", "an answer follows", prompt, text, finding)]


def without_reasoning(text: str, reasoning: Reasoning | None) -> str:
    """Text without reasoning's markers at its start."""
    if reasoning is None:
        return text
    marks = [mark.strip() for mark in (*reasoning.opens, *reasoning.closes)]
    blanks = reasoning.close[len(reasoning.close.rstrip()) :]
    while True:
        bare = text.lstrip()
        mark = next((mark for mark in marks if bare.startswith(mark)), None)
        if mark is None:
            return text
        text = bare[len(mark) :].removeprefix(blanks)


def _wrapper_close(behind: str, opened: str, frame: Frame) -> str:
    """What closes the content that `opened` opens, "" for nothing."""
    seen = markers(opened)
    if len(seen) > 1 and opened.startswith(seen[0]):  # `<|open|>response<|sep|>`
        tail = opened[len(seen[0]) :]
        found = behind.find(tail)
        if 0 <= found <= len(opened):
            return behind[: found + len(tail)].lstrip()
    first = _leading_markers(behind)[:1]
    return first[0] if first and _closes(first[0], opened, frame) else ""


def _closes(marker: str, opened: str, frame: Frame) -> bool:
    if marker == EOS:
        return False
    return marker in mirrored(opened) or marker not in frame.trail


def _leading_markers(text: str) -> list[str]:
    """The markers with which text starts, blanks between."""
    found: list[str] = []
    at = 0
    while True:
        at += len(text[at:]) - len(text[at:].lstrip())
        match = MARKER.match(text, at)
        if match is None:
            return found
        found.append(match.group())
        at = match.end()
