"""How a template writes tool calls: comparisons T1 to T7."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from nereid_parsers.errors import FormatError
from nereid_parsers.format import Reasoning, ToolSection, Wrapper
from nereid_parsers.template.bodies import READERS
from nereid_parsers.template.call_texts import CallTexts, FoundCalls
from nereid_parsers.template.content import without_reasoning
from nereid_parsers.template.difference import Comparison, markers
from nereid_parsers.template.frame import Frame
from nereid_parsers.template.probe import (
    CONTENT,
    EOS,
    FIRST,
    KEY,
    NUMBER_MARK,
    ONE,
    OTHER_KEY,
    OTHER_VALUE,
    SECOND,
    SIGNS,
    TWO_ARGUMENTS,
    VALUE,
    ProbeCall,
    Scene,
    Turn,
)

TWO = (*ONE, ProbeCall(SECOND, ((OTHER_KEY, OTHER_VALUE),)))


@dataclass(slots=True)
class FoundTools:
    """What the comparisons say of calls.

    part           the format's part, None where no call comes out.
    form           in words.
    is_parallel    several calls fit in one message.
    with_content   content and calls fit in one message.
    ends           more markers that end a turn.
    """

    part: ToolSection | None = None
    form: str = "none"
    is_parallel: bool = False
    with_content: bool = False
    ends: tuple[str, ...] = ()
    comparisons: list[Comparison] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)

    def forget_calls(self) -> None:
        """What was found was no description of the calls: they are content then."""
        self.part, self.form, self.ends = None, "none", ()
        self.is_parallel = self.with_content = False


def calls_scene(calls: tuple[ProbeCall, ...], content: str = "") -> Scene:
    """A scene whose last message makes these calls."""
    return Scene(Turn(content, calls=calls), tools=True)


def find_tools(frame: Frame, reasoning: Reasoning | None, wrapper: Wrapper | None) -> FoundTools:
    """Compare until it is known how calls are written."""
    found = FoundTools()
    one = compare_call_presence(frame, reasoning, wrapper, found)
    if not one:
        return found
    texts = CallTexts(
        one,
        _calls_text(frame, reasoning, wrapper, (ProbeCall(arguments=TWO_ARGUMENTS),)),
        _calls_text(frame, reasoning, wrapper, (ProbeCall(arguments=((KEY, 41),)),)),
        compare_two_calls(frame, reasoning, wrapper, found),
        _calls_text(frame, reasoning, wrapper, (ProbeCall(arguments=((KEY, SIGNS),)),)),
    )
    compare_names(frame, found)
    compare_arguments(frame, found)
    calls = compare_call_form(mark_counters(texts), found)
    if calls is not None:
        _conclude(calls, found)
    compare_content_before_call(frame, found)
    return found


def _calls_text(
    frame: Frame,
    reasoning: Reasoning | None,
    wrapper: Wrapper | None,
    calls: tuple[ProbeCall, ...],
) -> str:
    """What the template writes for these calls alone, "" if it refuses."""
    body = frame.body(calls_scene(calls))
    if body is None:
        return ""
    text = without_reasoning(body, reasoning)
    return text if wrapper is None else _without_wrapper(text, wrapper)


def _without_wrapper(text: str, wrapper: Wrapper) -> str:
    """Text without the marker, or the empty pair of markers, of content at its start."""
    opened, closed = wrapper.open.strip(), wrapper.close.strip()
    bare = text.lstrip()
    if not opened or not bare.startswith(opened):
        return text
    bare = bare[len(opened) :]
    if not closed:
        return bare
    bare = bare.lstrip()
    return bare[len(closed) :] if bare.startswith(closed) else text


def compare_call_presence(
    frame: Frame, reasoning: Reasoning | None, wrapper: Wrapper | None, found: FoundTools
) -> str:
    """T1: an answer, and a call in its place. What is written for the call."""
    left = frame.prober.text(Scene(Turn(CONTENT), tools=True)) or ""
    right = frame.prober.text(calls_scene(ONE)) or ""
    text = _calls_text(frame, reasoning, wrapper, ONE)
    is_shown = FIRST in text and KEY in text and VALUE in text
    finding = f"a call is written {text!r}" if is_shown else "no call comes out"
    found.comparisons.append(
        Comparison("T1 call presence", "a call instead of an answer", left, right, finding)
    )
    return text if is_shown else ""


def compare_two_calls(
    frame: Frame, reasoning: Reasoning | None, wrapper: Wrapper | None, found: FoundTools
) -> str:
    """T2: one call, and two. What is written for two, "" if they do not fit in one message."""
    left = frame.prober.text(calls_scene(ONE)) or ""
    right = frame.prober.text(calls_scene(TWO)) or ""
    text = _calls_text(frame, reasoning, wrapper, TWO)
    found.is_parallel = FIRST in text and SECOND in text and OTHER_VALUE in text
    why = frame.prober.refusals.get(calls_scene(TWO), "the second does not come out")
    finding = "calls stand in a row" if found.is_parallel else f"one call at a time: {why}"
    found.comparisons.append(Comparison("T2 two calls", "a second call", left, right, finding))
    return text if found.is_parallel else ""


def compare_names(frame: Frame, found: FoundTools) -> None:
    """T3: two functions; where the name stands, and what else goes with it."""
    left = frame.prober.text(calls_scene(ONE)) or ""
    right = frame.prober.text(calls_scene((replace(ONE[0], name=SECOND),))) or ""
    one = Comparison("T3 function name", "another function", left, right, "")
    finding = f"the name stands between {one.parts()[0][-24:]!r} and {one.parts()[3][:24]!r}"
    found.comparisons.append(replace(one, finding=finding))


def compare_arguments(frame: Frame, found: FoundTools) -> None:
    """T4 to T7b: none and one argument, one and two, another key, a number, text with signs."""
    changes = (
        ("T4 no argument", "an argument less", ()),
        ("T5 two arguments", "a second argument", TWO_ARGUMENTS),
        ("T6 key and value", "another key and value", ((OTHER_KEY, OTHER_VALUE),)),
        ("T7 type", "a number instead of text", ((KEY, 41),)),
        ("T7b signs", "text with a line break and signs", ((KEY, SIGNS),)),
    )
    left = frame.prober.text(calls_scene(ONE)) or ""
    for name, changed, arguments in changes:
        right = frame.prober.text(calls_scene((ProbeCall(arguments=arguments),))) or ""
        one = Comparison(name, changed, left, right, "")
        finding = f"{one.parts()[1]!r} becomes {one.parts()[2]!r}" if right else "not rendered"
        found.comparisons.append(replace(one, finding=finding))


def compare_call_form(texts: CallTexts, found: FoundTools) -> FoundCalls | None:
    """Which form the calls have: the first reader that can read all of them says."""
    for reader in READERS:
        try:
            calls = reader(texts)
        except FormatError as error:
            found.undecided.append(f"{reader.__name__}: {error}")
            continue
        if calls is not None:
            found.form = calls.form
            return calls
    found.undecided.append(f"calls are of no known form: {texts.one!r}")
    return None


def _conclude(calls: FoundCalls, found: FoundTools) -> None:
    """The tool section; markers of the turn's end that stand behind it are told apart."""
    opened, closed = calls.row.open, calls.row.close
    wanted = len(markers(opened)) or (1 if opened.strip() else 0)
    seen = markers(closed)
    found.ends = tuple(marker for marker in seen[wanted:] if marker != EOS)
    for marker in reversed(seen[wanted:]):
        closed = closed[: closed.rfind(marker)]
    if not opened.strip():
        opened = closed = ""
    try:
        found.part = ToolSection(
            calls.calls, open=opened, close=closed.rstrip() if closed.strip() else "",
            separator=calls.row.separator,
        )  # fmt: skip
    except FormatError as error:
        found.undecided.append(f"tool section: {error}")


def mark_counters(texts: CallTexts) -> CallTexts:
    """Replace numbers that count the calls, before or behind a name: `0 NAME`, `NAME index=0`."""
    before, behind = _counter_distances(texts.two)
    marked = []
    for text in (texts.one, texts.arguments, texts.number, texts.two, texts.signs):
        for name in (SECOND, FIRST):
            at = text.find(name)
            if at < 0:
                continue
            places = [at - before] * bool(before) + [at + len(name) + behind - 1] * bool(behind)
            for place in places:
                if text[place : place + 1].isdigit():
                    text = text[:place] + NUMBER_MARK + text[place + 1 :]
        marked.append(text)
    return CallTexts(*marked)


def _counter_distances(two: str) -> tuple[int, int]:
    """How far before and behind the name a digit stands that counts the calls; 0: nowhere."""
    if FIRST not in two or SECOND not in two:
        return 0, 0
    first, second = two.find(FIRST), two.find(SECOND)
    before = _counter_distance(two[:first][::-1], two[:second][::-1])
    return before, _counter_distance(two[first + len(FIRST) :], two[second + len(SECOND) :])


def _counter_distance(one: str, other: str) -> int:
    """At which character the texts first differ, if by a digit that is one more in the other."""
    for distance, (left, right) in enumerate(zip(one, other, strict=False), 1):
        if left != right:
            is_count = left.isdigit() and right.isdigit() and int(right) == int(left) + 1
            return distance if is_count else 0
    return 0


def compare_content_before_call(frame: Frame, found: FoundTools) -> None:
    """T8: a call, and a call after content; what ends the content."""
    scene = calls_scene(ONE, CONTENT)
    body = frame.raw_body(scene)
    if body is None or CONTENT not in body or FIRST not in body[body.find(CONTENT) :]:
        return
    found.with_content = True
    between = body[body.find(CONTENT) + len(CONTENT) : body.rfind(FIRST)]
    left, right = frame.prober.text(calls_scene(ONE)) or "", frame.prober.text(scene) or ""
    finding = "content comes first"
    if frame.header.strip() and frame.header.strip() in between:
        finding = "content and calls are turns of their own"
        ended = markers(between[: between.find(frame.header.strip())])[:1]
        frame.inner_headers = (frame.header.strip(), *ended)
    found.comparisons.append(
        Comparison("T8 content before a call", "content", left, right, finding)
    )
