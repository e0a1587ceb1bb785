"""The generation prompt: how the model's turn begins, and what the prompt writes of it already."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from nereid_parsers.template.difference import (
    MARKER,
    Comparison,
    common_start,
    markers,
    mirrored,
    tokens,
)
from nereid_parsers.template.probe import (
    CONTENT,
    EOS,
    ONE,
    RESULT,
    USER,
    Prober,
    Scene,
    Switches,
    Turn,
    after,
    drop_common_end,
)

_USER_WORD = re.compile(r"\w*user\w*", re.IGNORECASE)
_WORDS = re.compile(r"(\w+)")
_MAX_USER_HEADER = 80  # characters


@dataclass(frozen=True, slots=True)
class Opening:
    r"""A generation prompt.

    switches, system   what it was rendered with.
    text               all of it.
    opened             what stands in it behind the turn's header: `"<think>\n"`, or "".
    """

    switches: Switches
    system: str
    text: str
    opened: str


@dataclass(slots=True)
class Frame:
    r"""What surrounds the model's own text.

    header     opens the model's turn: `"<|im_start|>assistant\n"`.
    openings   the generation prompts that the switches give, the default first.
    ends       the markers that end a turn.
    trail      what the template writes behind the last message whatever it is.
    inner_headers   headers that the model writes itself, between the parts of one message.
    """

    prober: Prober
    header: str = ""
    openings: list[Opening] = field(default_factory=list)
    ends: tuple[str, ...] = ()
    trail: str = ""
    inner_headers: tuple[str, ...] = ()

    def raw_body(self, scene: Scene) -> str | None:
        """What follows the turn's header in a rendered scene, to the end."""
        text = self.prober.text(scene)
        if text is None:
            return None
        rest = after(text, RESULT if scene.after_tool and RESULT in text else USER)
        for header in (self.header, self.header.strip()):
            if header and header in rest:
                return rest[rest.find(header) + len(header) :]
        return rest[len(common_start(rest, self.trail)) :]

    def body(self, scene: Scene) -> str | None:
        """What the model wrote in a rendered scene: without the turn's end."""
        raw = self.raw_body(scene)
        if raw is None:
            return None
        return self.without_end(drop_common_end(raw, self.trail))

    def opened(self, prompt: str) -> str:
        """What a prompt writes behind the header of the model's turn."""
        rest = after(prompt, USER)
        for header in (self.header, self.header.strip()):
            if header and header in rest:
                return after(rest, header)
        return ""

    def without_end(self, text: str) -> str:
        """Text without the markers that end a turn."""
        while True:
            bare = text.rstrip()
            end = next((end for end in (*self.ends, EOS) if bare.endswith(end)), "")
            if not end:
                return text
            text = bare[: len(bare) - len(end)]


def compare_generation_prompt(prober: Prober) -> tuple[Frame, list[Comparison]]:
    """G: with and without the generation prompt; what is new opens the model's turn."""
    frame = Frame(prober)
    bare = prober.text(Scene()) or ""
    prompt = prober.text(Scene(prompt=True)) or bare
    frame.trail = after(bare, USER)
    added = prompt[len(common_start(bare, prompt)) :]
    answers = [
        after(text, USER).replace(EOS, "")
        for scene in _ANSWERS
        if (text := prober.text(scene)) is not None and USER in text
    ]
    prompts = [
        (switches, system, prober.text(Scene(prompt=True, switches=switches, system=system)))
        for switches, system in prober.variants()
    ]
    if added.strip():
        others = [after(text, USER) for _, _, text in prompts if text is not None]
        found = [_shared(added, other) for other in (*answers, *others)]
        frame.header = min((start for start in found if start.strip()), key=len, default=added)
    else:
        whole = after(prompt, USER)
        found = [common_start(whole, answer) for answer in answers]
        frame.header = min(found, key=len, default="")
    frame.header = _as_users(_without_opened(frame.header, answers), bare)
    for switches, system, text in prompts:
        if text is not None:
            frame.openings.append(Opening(switches, system, text, frame.opened(text)))
    finding = f"the turn opens with {frame.header!r}"
    if frame.openings and frame.openings[0].opened:
        finding += f"; the prompt goes on with {frame.openings[0].opened!r}"
    return frame, [
        Comparison("G generation prompt", "add_generation_prompt on", bare, prompt, finding)
    ]


_ANSWERS = (
    Scene(Turn(CONTENT)),
    Scene(Turn(CONTENT), answered=True),
    Scene(Turn(calls=ONE), tools=True),
)


def _shared(added: str, answer: str) -> str:
    """The longest start of what the generation prompt adds that an answer has too."""
    pieces = tokens(added)
    for count in range(len(pieces), 0, -1):
        start = "".join(pieces[:count])
        if start.strip() and start in answer:
            return start
    return ""


def _as_users(header: str, bare: str) -> str:
    """The header as far as it is built like the user's: what follows, the prompt opens.

    `<|im_start|>user` and a line break before the user's words make `<|im_start|>assistant` and a
    line break the model's header, even if every prompt and every answer goes on with `<think>`.
    """
    before = bare[: bare.rfind(USER)][-_MAX_USER_HEADER:]
    words = list(_USER_WORD.finditer(before))
    if not words:
        return header
    opened = [one.start() for one in MARKER.finditer(before) if one.start() <= words[-1].start()]
    if not opened:
        return header
    spelled = "".join(
        r"\w+" if _USER_WORD.fullmatch(piece) else re.escape(piece)
        for piece in _WORDS.split(before[opened[-1] :])
    )
    found = list(re.finditer(spelled, header))
    return header[: found[-1].end()] if found else header


def _without_opened(header: str, answers: list[str]) -> str:
    """The header without a marker that is closed again in what follows: an empty block."""
    seen = markers(header)
    if len(seen) > 1 and seen[-1] in mirrored(seen[-2]):
        start = header.rfind(seen[-2])
        if "".join(header[start:].split()) == "".join((seen[-2] + seen[-1]).split()):
            return header[:start]  # an empty block
    if not seen or not header.rstrip().endswith(seen[-1]):
        return header
    closers = tuple(mirrored(seen[-1]))
    for answer in answers:
        if CONTENT in answer and header.strip() in answer:
            rest = answer[answer.find(header.strip()) + len(header.strip()) :]
            if closers and rest.lstrip().startswith(closers):
                return header[: header.rfind(seen[-1])]
    return header


def headers_behind_results(frame: Frame) -> tuple[str, ...]:
    """The header, if behind a tool's result answers have it, but the prompt does not write it."""
    header = frame.header.strip()
    prompt = frame.prober.text(Scene(prompt=True, tools=True, after_tool=True))
    if not markers(header) or prompt is None or RESULT not in prompt:
        return ()
    if header in after(prompt, RESULT):
        return ()
    turns = (Turn(CONTENT), Turn(calls=ONE))
    texts = [frame.prober.text(Scene(turn, tools=True, after_tool=True)) for turn in turns]
    shown = (text is not None and header in after(text, RESULT) for text in texts)
    return (header,) if any(shown) else ()


def turn_markers(frame: Frame, thinking: tuple[str, ...] = ()) -> tuple[str, ...]:
    """What opens the model's turn in any prompt; () where one kind of prompt shows nothing.

    Behind a tool's result some templates write no header; what they write there counts too, but
    for the markers of reasoning (`thinking`): those are the answer's.
    """
    header = frame.header.strip()
    while end := next((end for end in frame.ends if header.startswith(end)), ""):
        header = header[len(end) :].lstrip()
    if not markers(header):
        return ()
    text = frame.prober.text(Scene(prompt=True, tools=True, after_tool=True))
    if text is None or RESULT not in text:
        return (header,)
    rest = after(text, RESULT)
    if header in rest:
        return (header,)
    while mark := next((mark for mark in thinking if rest.rstrip().endswith(mark)), ""):
        rest = rest.rstrip().removesuffix(mark)
    found = markers(rest)
    return (header, found[-1]) if found and rest.rstrip().endswith(found[-1]) else ()
