"""Where output starts: what the end of the prompt says, as text."""

from __future__ import annotations

from dataclasses import dataclass

from nereid_parsers.format import Format, Messages, Opener, Sections, Stage

TAIL_TOKENS = 256  # of the prompt; more than any generation prompt, prefilled answers aside


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a parser begins.

    stage       the stage; None inside a message's header.
    prefill     the prompt's own part of the answer, to be read silently first; "" for none.
    is_known    whether there was a prompt to tell.
    """

    stage: Stage | None
    prefill: str = ""
    is_known: bool = True


def beginning_of(fmt: Format, prompt: str | None) -> Beginning:
    """Where output that follows `prompt` begins; an empty prompt counts as none."""
    if isinstance(fmt.layout, Messages):
        return _in_messages(fmt, fmt.layout, prompt)
    return _in_sections(fmt, fmt.layout, prompt)


def _after_turn(fmt: Format, prompt: str) -> str | None:
    """What follows the last opening of a model's turn; None if the format names no such opening."""
    ends = [
        found + len(turn.strip())
        for turn in fmt.turn
        if turn.strip() and (found := prompt.rfind(turn.strip())) >= 0
    ]
    return prompt[max(ends) :] if ends else None


def _in_sections(fmt: Format, layout: Sections, prompt: str | None) -> Beginning:
    part = layout.reasoning
    if not prompt:
        is_open = part is not None and part.opener is not Opener.MODEL
        return Beginning(Stage.REASONING if is_open else Stage.CONTENT, is_known=False)
    prefill = _after_turn(fmt, prompt)
    if prefill is None:
        prefill = _last_marker(layout, prompt)
    if prefill.strip():
        return Beginning(Stage.CONTENT, prefill)
    is_forced = part is not None and part.opener is Opener.FORCED
    return Beginning(Stage.REASONING if is_forced else Stage.CONTENT)


def _last_marker(layout: Sections, prompt: str) -> str:
    """The marker that ends the prompt, "" if none does.

    Only the very end counts: markers are also named in system prompts and by users.
    """
    markers: list[str] = []
    if layout.reasoning is not None:
        markers += [*layout.reasoning.opens, *layout.reasoning.closes]
    if layout.content is not None:
        markers.append(layout.content.open)
    if layout.tools is not None:
        markers += [*layout.tools.opens, *(call.trigger for call in layout.tools.calls)]
    tail = prompt.rstrip()
    found = [marker.strip() for marker in markers if marker.strip()]
    return max((m for m in found if tail.endswith(m)), key=len, default="")


def _in_messages(fmt: Format, layout: Messages, prompt: str | None) -> Beginning:
    if not prompt:
        return Beginning(None, is_known=False)
    start = layout.start.strip()
    found = prompt.rfind(start)
    if found < 0:
        return Beginning(None)
    prefill = prompt[found:]
    if layout.ends:
        is_over = any(end in prefill for end in layout.ends)
        return Beginning(None) if is_over else Beginning(Stage.CONTENT, prefill)
    if prompt.rstrip().endswith(start):
        return Beginning(Stage.CONTENT, start)
    after = _after_turn(fmt, prompt)
    return Beginning(Stage.CONTENT, after) if after and after.strip() else Beginning(None)
