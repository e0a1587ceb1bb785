"""What stands around plain content: comparison C1."""

from __future__ import annotations

import re

from nereid_parsers.format import Reasoning, Wrapper
from nereid_parsers.template.difference import MARKER, Comparison, markers, mirrored
from nereid_parsers.template.frame import Frame
from nereid_parsers.template.probe import CONTENT, EOS, ONE, Scene, Turn

_SPELLED = re.compile(rf"(?:{MARKER.pattern})(?:\w+(?:{MARKER.pattern}))+")  # `<|out|>turn<|of|>`


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
    ends = _turn_ends(behind, frame)
    frame.ends = tuple(ends)
    finding = f"content stands between {wrapper.open!r} and {wrapper.close!r}" if wrapper else (
        "content is plain"
    )  # fmt: skip
    if ends:
        finding += f"; {ends[0]!r} ends the turn"
    prompt, text = frame.prober.text(Scene()) or "", frame.prober.text(scene) or ""
    return wrapper, [Comparison("C1 content", "an answer follows", prompt, text, finding)]


def compare_content_with_call(
    frame: Frame, reasoning: Reasoning | None
) -> tuple[Wrapper | None, list[Comparison]]:
    """C2: a call, and a call after content; some templates mark content only beside calls.

    Where there is no content, the same markers stand with nothing between.
    """
    scene, alone = (Scene(Turn(text, calls=ONE), tools=True) for text in (CONTENT, ""))
    body, without = frame.raw_body(scene), frame.raw_body(alone)
    if body is None or without is None or CONTENT not in body:
        return None, []
    before, _, behind = without_reasoning(body, reasoning).partition(CONTENT)
    rest = without_reasoning(without, reasoning)
    opened, closed = before.strip(), "".join(_leading_markers(behind)[:1])
    if not opened or not closed or MARKER.fullmatch(opened) is None:
        return None, []
    if not re.match(rf"\s*{re.escape(opened)}\s*{re.escape(closed)}", rest):
        return None, []
    left, right = frame.prober.text(alone) or "", frame.prober.text(scene) or ""
    finding = f"beside calls, content stands between {opened!r} and {closed!r}"
    one = Comparison("C2 content with a call", "content", left, right, finding)
    return Wrapper(opened, closed), [one]


def _turn_ends(behind: str, frame: Frame) -> list[str]:
    """What ends the turn; markers and a word make one end where users' turns end so too."""
    ends = [marker for marker in _leading_markers(behind)[:1] if marker != EOS]
    bare, trail = behind.lstrip(), frame.trail.lstrip()
    if not ends:
        return ends
    usual = _leading_markers(trail)[:1]
    is_next = usual != [] and ends != usual == _leading_markers(bare)[1:2]
    if is_next and usual[0] not in frame.header:
        return [*ends, *usual]
    spelled = _SPELLED.match(bare)
    if spelled is None or not trail.startswith(spelled.group()):
        return ends
    words = spelled.group()[len(ends[0]) :]
    if frame.header.strip() and frame.header.strip() in words:  # of the turn that comes next
        return ends
    last = MARKER.match(bare, spelled.end())
    is_shared = last is not None and trail.startswith(spelled.group() + last.group())
    ends = [spelled.group()]
    if last is not None and is_shared and last.group() not in (EOS, *markers(frame.header)):
        ends.append(last.group())
    return ends


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
