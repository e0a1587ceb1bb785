"""The proof: what was rendered is parsed with the inferred format and must come back."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from nereid_parsers.events import Message
from nereid_parsers.format import Format, Reasoning
from nereid_parsers.stream.parser import parse
from nereid_parsers.template.frame import Frame
from nereid_parsers.template.probe import (
    CONTENT,
    ONE,
    RESULT,
    TOOLS,
    ProbeCall,
    Scene,
    Turn,
    drop_common_end,
    without_marks,
)
from nereid_parsers.template.reasoning import FoundReasoning
from nereid_parsers.template.tools import TWO, FoundTools


@dataclass(frozen=True, slots=True)
class Proof:
    """One rendering, parsed.

    name      what was rendered: "reasoning and content".
    prompt    before the text; text: what the model would have written.
    differs   the parts of the message that came back different.
    """

    name: str
    prompt: str
    text: str
    differs: tuple[str, ...]


def prove(fmt: Format, frame: Frame, reasoning: FoundReasoning, tools: FoundTools) -> list[Proof]:
    """Parse every kind of message that the template renders."""
    scenes: list[tuple[str, Scene]] = [("content", Scene(Turn(CONTENT)))]
    if reasoning.scene is not None:
        scenes.append(("reasoning", reasoning.scene))
    if tools.form != "none":
        scenes.append(("one call", Scene(Turn(calls=ONE), tools=True)))
    if tools.is_parallel:
        scenes.append(("two calls", Scene(Turn(calls=TWO), tools=True)))
    if tools.with_content:
        scenes.append(("content and a call", Scene(Turn(CONTENT, calls=ONE), tools=True)))
    if tools.form != "none":
        behind = Scene(Turn(CONTENT), tools=True, after_tool=True)
        scenes.append(("content behind a result", behind))
    found = []
    for name, scene in scenes:
        text, prompt = _output(frame, reasoning, scene)
        if text is not None and scene.turn is not None:
            message = parse(text, format=fmt, tools=TOOLS if scene.tools else [], prompt=prompt)
            found.append(Proof(name, prompt, text, tuple(_differences(scene.turn, message))))
    return found


def _output(frame: Frame, reasoning: FoundReasoning, scene: Scene) -> tuple[str | None, str]:
    """(what the model would write, the prompt before it)."""
    asking = replace(scene, turn=None, prompt=True)
    if scene.after_tool:
        return _continued(frame, reasoning.part, scene, asking)
    prompt, body = frame.prober.text(asking), frame.body(scene)
    if prompt is None or body is None:
        return None, ""
    body = without_marks(body)
    opened = frame.opened(prompt).strip()
    if opened and body.lstrip().startswith(opened):
        body = body.lstrip()[len(opened) :]
    part = reasoning.part
    if part is not None and opened.endswith(part.close.strip()):
        body = body.lstrip().removeprefix(part.close.strip())  # both write an empty block's end
    if part is None or part.close.strip() in opened or part.close.strip() in body:
        return body, prompt
    if opened.endswith(part.open.strip()):  # the prompt made it think, the message did not
        return f"{part.close}{body}", prompt
    return body, prompt


def _continued(
    frame: Frame, part: Reasoning | None, scene: Scene, asking: Scene
) -> tuple[str | None, str]:
    """The same where the prompt is the very beginning of what is rendered; else nothing."""
    prompt, whole = frame.prober.text(asking), frame.prober.text(scene)
    if prompt is None or whole is None or RESULT not in prompt or not whole.startswith(prompt):
        return None, ""
    text = frame.without_end(drop_common_end(whole[len(prompt) :], frame.trail))
    is_open = part is not None and prompt.rstrip().endswith(part.open.strip())
    if part is not None and is_open and part.close.strip() not in text:
        text = part.close + text  # the prompt made it think, the message did not
    return without_marks(text), without_marks(prompt)


def _differences(turn: Turn, got: Message) -> list[str]:
    found = []
    if (got.reasoning or "").strip() != turn.reasoning:
        found.append("reasoning")
    if (got.content or "").strip() != turn.content:
        found.append("content")
    if [call.name for call in got.tool_calls] != [call.name for call in turn.calls]:
        found.append("tool names")
    else:
        pairs = zip(turn.calls, got.tool_calls, strict=True)
        if not all(_same(call, one.arguments) for call, one in pairs):
            found.append("tool arguments")
    return found


def _same(call: ProbeCall, arguments: str) -> bool:
    try:
        return bool(json.loads(arguments) == dict(call.arguments))
    except ValueError:
        return False
