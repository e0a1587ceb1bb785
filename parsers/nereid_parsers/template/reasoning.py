"""How a template marks reasoning: comparisons R1 to R4."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import pairwise

from nereid_parsers.format import Opener, Reasoning, Wrapper
from nereid_parsers.template.difference import MARKER, Comparison, markers, mirrored, unmirrored
from nereid_parsers.template.frame import Frame, Opening
from nereid_parsers.template.probe import (
    CONTENT,
    FIRST,
    ONE,
    REASON,
    REASONING_FIELDS,
    Scene,
    Switches,
    Turn,
)

_PRINTED = re.compile(r"""['"](?:thinking|text|thoughts)\\?['"]\s*:""")
_THINKING = ("think", "thought", "reason", "inner")


@dataclass(slots=True)
class FoundReasoning:
    """What the comparisons say of reasoning.

    part        the format's part, None if there is no reasoning.
    wrapper     around the content, where the reasoning showed one.
    scene       in which reasoning was rendered.
    fields      names of the message fields (or "parts", "blocks") from which it is rendered.
    switches    what changes the generation prompt, and into what.
    """

    part: Reasoning | None = None
    wrapper: Wrapper | None = None
    scene: Scene | None = None
    fields: tuple[str, ...] = ()
    switches: dict[str, str] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)


def find_reasoning(frame: Frame) -> FoundReasoning:
    """Compare until reasoning's markers are known, or nothing shows any."""
    found = FoundReasoning()
    for compare in (
        compare_reasoning_presence,
        compare_thinking_switch,
        compare_instructions,
        compare_empty_block,
        compare_source,
    ):
        if found.part is None:
            compare(frame, found)
    note_switches(frame, found)
    if found.part is not None:
        compare_reasoning_scope(frame, found)
        found.part = replace(found.part, opener=_opener(frame, found.part))
    return found


def looks_like_thinking(marker: str) -> bool:
    """Whether a marker's name says that it is about reasoning."""
    return any(word in marker.lower() for word in _THINKING)


# ---- R1: a message with reasoning and one without -----------------------------------------------


def compare_reasoning_presence(frame: Frame, found: FoundReasoning) -> None:
    """R1: what appears around the reasoning once the message has one."""
    scene = _scene_with_reasoning(frame)
    if scene is None or scene.turn is None:
        return
    found.scene = scene
    found.fields = _fields(frame, scene)
    body = frame.raw_body(scene) or ""
    at = body.find(REASON)
    before, behind = body[:at], body[at + len(REASON) :]
    stop = CONTENT if scene.turn.content else FIRST
    between = behind[: behind.find(stop)] if stop in behind else frame.without_end(behind)
    opened = _opening_marker(frame, before)
    closed = _closing_marker(between, opened)
    left = frame.prober.text(replace(scene, turn=replace(scene.turn, reasoning=""))) or ""
    right = frame.prober.text(scene) or ""
    if not closed.strip():
        found.undecided.append(
            f"R1: nothing stands between reasoning and what follows it: {between!r}"
        )
        return
    opened = opened or next((m for m in _spelled(frame, unmirrored(closed.strip()))), "")
    if not opened:
        found.undecided.append(f"R1: {closed!r} closes reasoning, but nothing opens it")
        return
    found.part = Reasoning(opened, closed, also_open=_last_alone(opened, closed + frame.header))
    rest = between[len(closed) :].replace(frame.header.strip() or "\0", "")
    found.wrapper = _wrapper(rest, behind) if stop == CONTENT else None
    if frame.header.strip() and frame.header.strip() in between:
        frame.inner_headers = (frame.header.strip(),)
    words = f"reasoning stands between {opened!r} and {closed!r}"
    found.comparisons.append(
        Comparison("R1 reasoning presence", "the message has reasoning", left, right, words)
    )


def _scene_with_reasoning(frame: Frame) -> Scene | None:
    prober = frame.prober
    turns = (Turn(CONTENT, REASON), Turn("", REASON, ONE), Turn(CONTENT, REASON, ONE))
    states = [(opening.switches, opening.system) for opening in frame.openings]
    styles = ["", "parts"]
    if any("blocks" in literal for literal in prober.template.literals):
        styles.append("blocks")
    for turn in turns:
        for switches, system in _few(states) or [((), "")]:
            for prober.reasoning_as in styles:
                scene = Scene(turn, tools=bool(turn.calls), switches=switches, system=system)
                body = frame.raw_body(scene)
                if body is not None and REASON in body and _is_told(body, turn):
                    return scene
    prober.reasoning_as = ""
    return None


def _few(states: list[tuple[Switches, str]]) -> list[tuple[Switches, str]]:
    return states[:6]


def _is_told(body: str, turn: Turn) -> bool:
    """Whether what follows the reasoning comes out too, and no list was printed as it is."""
    if _PRINTED.search(body):
        return False
    rest = body[body.find(REASON) + len(REASON) :]
    return (not turn.content or CONTENT in rest) and (not turn.calls or FIRST in rest)


def _fields(frame: Frame, scene: Scene) -> tuple[str, ...]:
    prober = frame.prober
    style = prober.reasoning_as
    if style:
        return (style,)
    shown = []
    for prober.reasoning_as in REASONING_FIELDS:
        text = prober.text(scene)
        if text is not None and REASON in text:
            shown.append(prober.reasoning_as)
    prober.reasoning_as = style
    return tuple(shown)


def _opening_marker(frame: Frame, before: str) -> str:
    """What opens reasoning that `before` precedes; the prompt may have written it."""
    if before.strip():
        return _last_marker(before)
    for opening in frame.openings:
        if opened := _first_opened(opening.opened):
            return opened
    return ""


def _last_marker(before: str) -> str:
    """The markers, or words, at the end of a text that no blank parts, with the blanks around."""
    found = list(MARKER.finditer(before))
    if not found:
        return before.lstrip("\n")
    last = found[-1]
    words = before[last.end() :]
    at = last.end()  # words, not a marker, open it
    if not (words.strip() and words[0].isspace()):
        run = before[: last.end()].split()[-1]
        at = last.start() if len(run) < len(last.group()) else last.end() - len(run)
    lead = before[:at]
    return before[len(lead.rstrip()) :]


def _last_alone(opened: str, others: str) -> tuple[str, ...]:
    """The last of several markers that open reasoning, if it stands in no other marking."""
    seen = markers(opened)
    if len(seen) < 2 or not opened.rstrip().endswith(seen[-1]) or seen[-1] in others:
        return ()
    return (seen[-1],)


def _first_opened(opened: str) -> str:
    r"""The part of a prompt's end that opens reasoning: `<think>\n` of `<think>\n</think>`."""
    found = list(MARKER.finditer(opened))
    if not found:
        return opened if opened.strip() else ""
    first = found[0]
    if opened[: first.start()].strip():
        return opened[: first.start()]  # words open it
    behind = opened[first.end() :]
    return opened[: first.end()] + behind[: len(behind) - len(behind.lstrip())]


def _closing_marker(between: str, opened: str) -> str:
    """The first marker in what follows the reasoning, with the blanks around it.

    Where several markers and words make one (`<|open|>think<|sep|>`), it ends as the opening does.
    """
    seen = markers(opened)
    if len(seen) > 1:
        tail = opened.strip()[len(seen[0]) :]
        at = between.find(tail)
        if 0 <= at <= len(opened):
            return between[: at + len(tail)]
    found = MARKER.search(between)
    if found is None or between[: found.start()].strip():
        return between if found is None else between[: found.start()]
    rest = between[found.end() :]
    return between[: found.end()] + rest[: len(rest) - len(rest.lstrip())]


def _wrapper(rest: str, behind: str) -> Wrapper | None:
    """The marker around content that stands behind the reasoning's end."""
    if not rest.strip():
        return None
    following = markers(behind[behind.find(CONTENT) + len(CONTENT) :])
    close = following[0] if following and following[0] in mirrored(rest.strip()) else ""
    return Wrapper(rest.lstrip(), close)


# ---- R2: the switches ---------------------------------------------------------------------------


def compare_thinking_switch(frame: Frame, found: FoundReasoning) -> None:
    """R2: what the generation prompt opens, or opens and closes, as a switch is turned."""
    for opening in frame.openings:
        closed = _closed_in_prompt(frame, opening)
        if not closed:
            continue
        opened = _first_opened(opening.opened)
        blank = "\n" if opened.endswith("\n") else ""
        found.part = Reasoning(opened, f"{blank}{closed}{blank}{blank}")
        default = frame.openings[0]
        found.comparisons.append(
            Comparison(
                "R2 thinking switch", _spell(opening), default.text, opening.text,
                f"the prompt opens reasoning with {opened!r}; it closes with {closed!r}",
            )
        )  # fmt: skip
        return


def _closed_in_prompt(frame: Frame, opening: Opening) -> str:
    """What closes the reasoning that a prompt opens, "" if it opens none."""
    seen = markers(opening.opened)
    if not seen:
        return ""
    is_named = looks_like_thinking(seen[0])
    if len(seen) > 1 and (is_named or seen[1] in mirrored(seen[0])):
        return seen[1]
    if not is_named and opening.opened == frame.openings[0].opened:
        return ""  # no switch changes it, and its name does not say that it is reasoning's
    candidates = mirrored(seen[0])
    return next(iter(_spelled(frame, candidates)), candidates[0] if is_named and candidates else "")


def compare_instructions(frame: Frame, found: FoundReasoning) -> None:
    """R3: a switch adds instructions that name empty pairs of tags, `<think></think>`."""
    default = frame.openings[0].text if frame.openings else ""
    for opening in frame.openings[1:]:
        if opening.text == default or opening.system:
            continue
        one = Comparison("R3 instructions", _spell(opening), default, opening.text, "")
        added = one.parts()[2]
        pairs = _empty_pairs(added)
        if not pairs or not looks_like_thinking(pairs[0][0]):
            continue
        found.part = Reasoning(f"{pairs[0][0]}\n", f"\n{pairs[0][1]}\n\n")
        found.wrapper = Wrapper(*pairs[1]) if len(pairs) > 1 else None
        names = ", ".join(a + b for a, b in pairs)
        found.comparisons.append(replace(one, finding=f"the instructions name {names}"))
        return


def _empty_pairs(text: str) -> list[tuple[str, str]]:
    seen = list(MARKER.finditer(text))
    return [
        (one.group(), other.group())
        for one, other in pairwise(seen)
        if not text[one.end() : other.start()].strip() and other.group() in mirrored(one.group())
    ]


def compare_empty_block(frame: Frame, found: FoundReasoning) -> None:
    """R4: a message without reasoning comes out with an empty block all the same."""
    body = frame.raw_body(Scene(Turn(CONTENT))) or ""
    pairs = _empty_pairs(body[: body.find(CONTENT)] if CONTENT in body else "")
    if not pairs:
        return
    found.part = Reasoning(*pairs[0])
    text = frame.prober.text(Scene(Turn(CONTENT))) or ""
    found.comparisons.append(
        Comparison("R4 empty block", "nothing", text, text, f"an empty {''.join(pairs[0])}")
    )


def compare_source(frame: Frame, found: FoundReasoning) -> None:
    """R5: the template cuts messages at a marker whose name says reasoning, or names a pair."""
    for literal in frame.prober.template.literals:
        pair = _named_pair(literal)
        if pair is None:
            continue
        found.part = Reasoning(f"{pair[0]}\n", f"\n{pair[1]}\n\n")
        others = [one for one in _empty_pairs(literal) if one != pair]
        found.wrapper = Wrapper(*others[0]) if others else None
        found.comparisons.append(
            Comparison("R5 source", "nothing", "", "", f"the template names {pair[1]!r}")
        )
        return


def _named_pair(literal: str) -> tuple[str, str] | None:
    """Markers of reasoning that a literal spells: both, or the closing one alone."""
    seen = markers(literal)
    for closed in dict.fromkeys(marker for marker in seen if looks_like_thinking(marker)):
        opened = [marker for marker in unmirrored(closed) if marker != closed]
        spelled = next((marker for marker in opened if marker in seen), "")
        if spelled:
            return spelled, closed
        if opened and literal.strip() == closed:
            return opened[0], closed
    return None


# ---- scope and opener ---------------------------------------------------------------------------


def compare_reasoning_scope(frame: Frame, found: FoundReasoning) -> None:
    """R6: reasoning straight before a call; some templates then leave its closing marker out."""
    if found.scene is None or found.part is None:
        return
    scene = replace(found.scene, turn=Turn("", REASON, ONE), tools=True)
    body = frame.raw_body(scene)
    if body is None or REASON not in body or FIRST not in body:
        return
    between = body[body.find(REASON) + len(REASON) : body.rfind(FIRST)]
    if found.part.close.strip() in between:
        return
    seen = markers(between)
    if not seen:
        found.undecided.append("R6: nothing stands between reasoning and a call")
        return
    found.part = replace(found.part, interrupted_by=(seen[0],))
    found.comparisons.append(
        Comparison(
            "R6 reasoning before a call", "the message has reasoning",
            frame.prober.text(replace(scene, turn=Turn("", "", ONE))) or "",
            frame.prober.text(scene) or "", f"{seen[0]!r} ends reasoning that nothing closes",
        )
    )  # fmt: skip


def note_reasoning(frame: Frame, found: FoundReasoning) -> None:
    """Find a scene whose reasoning is rendered, without asking what marks it."""
    found.scene = _scene_with_reasoning(frame)
    if found.scene is not None:
        found.fields = _fields(frame, found.scene)
    note_switches(frame, found)


def note_switches(frame: Frame, found: FoundReasoning) -> None:
    """Write down which switch does what to the generation prompt."""
    if not frame.openings:
        return
    default = frame.openings[0].opened
    effects: dict[str, list[set[object]]] = {}  # by what is opened: the switches that do it
    for opening in sorted(frame.openings[1:], key=lambda one: len(one.switches)):
        switches: set[object] = {*opening.switches, opening.system}
        known = effects.setdefault(opening.opened, [])
        if opening.opened != default and not any(one <= switches for one in known):
            known.append(switches)
            found.switches[_spell(opening)] = opening.opened


def _opener(frame: Frame, part: Reasoning) -> Opener:
    default = frame.openings[0].opened if frame.openings else ""
    is_open = part.open.strip() in default and part.close.strip() not in default
    return Opener.PROMPT if is_open else Opener.MODEL


def _spelled(frame: Frame, candidates: list[str]) -> list[str]:
    """Those of the candidates that the template or its generation prompts spell."""
    texts = [*frame.prober.template.literals, *(opening.opened for opening in frame.openings)]
    return [marker for marker in candidates if any(marker in text for text in texts)]


def _spell(opening: Opening) -> str:
    words = [f"{name}={value!r}" for name, value in opening.switches]
    return ", ".join([*words, *([f"system {opening.system!r}"] if opening.system else [])])
