"""Puts small conversations to a template: what it renders, how it wants its input, its switches.

Every part of a conversation is a word that no template contains, so that it is found again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from nereid_parsers.template.difference import common_end
from nereid_parsers.template.environment import CompiledTemplate, Refused

USER = "Quokka asks for something."
CONTENT = "Wombat gives the answer."
REASON = "Numbat thinks about it."
RESULT = "Bilby measured 42 degrees."
FIRST, SECOND = "zqFirstTool", "zqSecondTool"
KEY, OTHER_KEY = "zqKeyOne", "zqKeyTwo"
VALUE, OTHER_VALUE = "zqValueOne", "zqValueTwo"
SIGNS = f"{VALUE}\n<&> {OTHER_VALUE}"
EOS = "<|zq-end-of-sequence|>"
BOS = "<|zq-begin-of-sequence|>"
NUMBER_MARK = "\ue010"  # stands for a call's running number in what was rendered
ID_MARK = "\ue011"  # stands for a call's id

_SWITCH = re.compile(r"think|reason", re.IGNORECASE)
_NO_SWITCH = re.compile(r"content|prompt|history|start|end_token|begin|text|token|last|index|parts")
_UNDEFINED = re.compile(r"'(\w+)' is undefined")
Switches = tuple[tuple[str, Any], ...]


def _tool(name: str) -> dict[str, Any]:
    properties = {
        KEY: {"type": "string", "description": "first"},
        OTHER_KEY: {"type": "string", "description": "second"},
    }
    parameters = {"type": "object", "properties": properties, "required": [KEY]}
    return {
        "type": "function",
        "function": {"name": name, "description": "a tool", "parameters": parameters},
    }


TOOLS = [_tool(FIRST), _tool(SECOND)]


@dataclass(frozen=True, slots=True)
class ProbeCall:
    """A call to render: arguments as (key, value) pairs."""

    name: str = FIRST
    arguments: tuple[tuple[str, Any], ...] = ((KEY, VALUE),)


ONE = (ProbeCall(),)
TWO_ARGUMENTS = ((KEY, VALUE), (OTHER_KEY, OTHER_VALUE))


@dataclass(frozen=True, slots=True)
class Turn:
    """An assistant message."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ProbeCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Shape:
    """How a template wants a message with calls to be put.

    is_flat     calls without the `{"type": .., "function": ..}` around them.
    ids         "plain", or "numbered" (`functions.NAME:0`, for templates that print only the id).
    arguments   "object" or "text" (JSON).
    empty       content where there is none: "text" (""), "null" or "absent".
    """

    is_flat: bool = False
    ids: str = "plain"
    arguments: str = "object"
    empty: str = "text"


@dataclass(frozen=True, slots=True)
class Scene:
    """What is rendered.

    turn        the last assistant message; None: the conversation ends with the user's.
    prompt      with the generation prompt.
    tools       offering tools.
    after_tool  a call and its result stand before.
    answered    the user speaks once more after the turn.
    switches    template variables.
    system      a system message, "" for none.
    """

    turn: Turn | None = None
    prompt: bool = False
    tools: bool = False
    after_tool: bool = False
    answered: bool = False
    switches: Switches = ()
    system: str = ""


@dataclass(slots=True)
class Prober:
    """Renders scenes, each once.

    reasoning_as   how reasoning is put: a field's name, "parts", "blocks" or "" (all fields).
    parts          content is put as a list of parts, because the template ignores plain text.
    needs_tools    tools are always offered, because the template fails without.
    """

    template: CompiledTemplate
    bos: str
    eos: str
    kwargs: Mapping[str, Any]
    shape: Shape = field(default_factory=Shape)
    reasoning_as: str = ""
    parts: bool = False
    needs_tools: bool = False
    has_call_shape: bool = False
    refusals: dict[Scene, str] = field(default_factory=dict)
    filled: dict[str, str] = field(default_factory=dict)
    renderings: int = 0
    _cache: dict[Any, str | None] = field(default_factory=dict)

    def text(self, scene: Scene) -> str | None:
        """What the template makes of a scene; None if it refuses."""
        key = (scene, self.shape, self.reasoning_as, self.parts, self.needs_tools)
        if key not in self._cache:
            self._cache[key] = self._render(scene)
        return self._cache[key]

    def _render(self, scene: Scene) -> str | None:
        variables = {
            "messages": self._messages(scene),
            "tools": _copy(TOOLS) if scene.tools or self.needs_tools else None,
            "documents": None,
            "add_generation_prompt": scene.prompt,
            "bos_token": self.bos,
            "eos_token": self.eos,
            **self.filled,
            **self.kwargs,
            **dict(scene.switches),
        }
        self.renderings += 1
        try:
            return _with_marks(self.template.render(variables), self.shape)
        except Refused as refusal:
            missing = _UNDEFINED.search(str(refusal))
            if missing and missing.group(1) in self.template.names - set(self.filled):
                self.filled[missing.group(1)] = ""  # a variable that only the model's own code sets
                return self._render(scene)
            self.refusals[scene] = str(refusal)
            return None

    def _messages(self, scene: Scene) -> list[dict[str, Any]]:
        messages = [self._message("system", scene.system)] if scene.system else []
        messages.append(self._message("user", USER))
        if scene.after_tool:
            messages.append(self._assistant(Turn(calls=ONE), 0))
            identity = _identity(self.shape, FIRST, 0)
            result = {"role": "tool", "tool_call_id": identity, "name": FIRST, "content": RESULT}
            messages.append(result)
        if scene.turn is not None:
            messages.append(self._assistant(scene.turn, int(scene.after_tool)))
        if scene.answered:
            messages.append(self._message("user", "Go on."))
        return messages

    def _message(self, role: str, text: str) -> dict[str, Any]:
        if self.parts:
            return {"role": role, "content": [{"type": "text", "text": text}]}
        return {"role": role, "content": text}

    def _assistant(self, turn: Turn, first: int) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant"}
        if turn.content:
            message = self._message("assistant", turn.content)
        elif self.shape.empty != "absent":
            message["content"] = "" if self.shape.empty == "text" else None
        if turn.reasoning:
            if self.reasoning_as == "blocks":
                return _as_blocks(turn)
            self._add_reasoning(message, turn)
        for number, call in enumerate(turn.calls, first):
            message.setdefault("tool_calls", []).append(_put_call(call, self.shape, number))
        return message

    def _add_reasoning(self, message: dict[str, Any], turn: Turn) -> None:
        if self.reasoning_as == "parts":
            said = [{"type": "text", "text": turn.content}] if turn.content else []
            message["content"] = [{"type": "thinking", "thinking": turn.reasoning}, *said]
            return
        names = [self.reasoning_as] if self.reasoning_as else list(REASONING_FIELDS)
        message.update(dict.fromkeys(names, turn.reasoning))

    # ---- how the template wants its input --------------------------------------------------------

    def find_content_form(self) -> bool:
        """Whether plain content comes out; offers tools, or puts parts, if only that helps."""
        scene = Scene(Turn(CONTENT))
        for self.parts, self.needs_tools in product((False, True), (False, True)):
            text = self.text(scene)
            if text is not None and CONTENT in text and USER in text:
                return True
        self.parts = self.needs_tools = False
        return False

    def find_call_shape(self) -> bool:
        """Find a shape in which calls come out whole; False if there is none."""
        scene = Scene(Turn(calls=(ProbeCall(arguments=TWO_ARGUMENTS),)), tools=True)
        for shape in _shapes():
            self.shape = shape
            text = self.text(scene)
            if text is not None and shows_call(self._new_text(text)):
                self.has_call_shape = True
                return True
        self.shape = Shape()
        return False

    def _new_text(self, text: str) -> str:
        """What a message added to the conversation: its tools are listed elsewhere."""
        bare = self.text(Scene(tools=True)) or ""
        return drop_common_end(after(text, USER), after(bare, USER))

    def variants(self) -> list[tuple[Switches, str]]:
        """(template variables, system message) in which the thinking switches take their values."""
        found: list[tuple[Switches, str]] = [((), "")]
        names = sorted(name for name in self.template.names if is_switch(name))[:4]
        names = [name for name in names if name not in self.kwargs]
        for value in (True, False):
            if len(names) > 1:
                found.append((tuple((name, value) for name in names), ""))
        for name in names:
            found += [(((name, value),), "") for value in self._values(name)]
        for word in ("/think", "/no_think"):
            if any(word in literal for literal in self.template.literals):
                found.append(((), word))
        return found[:20]

    def _values(self, name: str) -> list[Any]:
        compared = [v for v in self.template.compared.get(name, ()) if isinstance(v, str | int)]
        values: list[Any] = [True, False]
        if compared:
            values = [*compared, *values]
        if "effort" in name or "mode" in name:
            values = [*compared, "high", "low", "none", "enabled", "disabled"]
        return list({repr(value): value for value in values}.values())[:6]


REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


def is_switch(name: str) -> bool:
    """Whether a template variable's name is one of a thinking switch."""
    return bool(_SWITCH.search(name)) and not _NO_SWITCH.search(name)


def _shapes() -> Iterator[Shape]:
    for is_flat, ids, arguments, empty in product(
        (False, True), ("plain", "numbered"), ("object", "text"), ("text", "null", "absent")
    ):
        yield Shape(is_flat, ids, arguments, empty)


def _identity(shape: Shape, name: str, number: int) -> str:
    if shape.ids == "numbered":
        return f"functions.{name}:{number}"
    return f"zq7id000{number}"


def _with_marks(text: str, shape: Shape) -> str:
    """The text with ids replaced by marks, so that they are the same for each call."""
    text = re.sub(rf"({FIRST}|{SECOND})([:#.-])\d\b", rf"\1\2{NUMBER_MARK}", text)
    return text if shape.ids == "numbered" else re.sub(r"zq7id000\d", ID_MARK, text)


def without_marks(text: str) -> str:
    """Text with ids in the place of the marks that stand for them."""
    return text.replace(NUMBER_MARK, "0").replace(ID_MARK, "zq7id0000")


def _put_call(call: ProbeCall, shape: Shape, number: int) -> dict[str, Any]:
    arguments: Any = dict(call.arguments)
    if shape.arguments == "text":
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    if shape.is_flat:
        return function
    return {"id": _identity(shape, call.name, number), "type": "function", "function": function}


def _as_blocks(turn: Turn) -> dict[str, Any]:
    calls = [
        {"name": call.name, "arguments": json.dumps(dict(call.arguments))} for call in turn.calls
    ]
    blocks: list[dict[str, Any]] = [{"type": "thoughts", "text": turn.reasoning}]
    if calls:
        blocks.append({"type": "tool_calls", "calls": calls})
    if turn.content:
        blocks.append({"type": "response", "text": turn.content})
    return {"role": "assistant", "content": {"blocks": blocks}}


def shows_call(text: str) -> bool:
    """Whether a rendering shows the probe's call, neither as Python's repr nor as escaped JSON."""
    at = text.find(FIRST)
    shown = (KEY, VALUE, OTHER_KEY, OTHER_VALUE)
    if at < 0 or not all(word in text[at:] for word in shown):
        return False
    return f"'{KEY}'" not in text and f'\\"{KEY}' not in text and "None" not in text[:at]


def _copy(value: Any) -> Any:  # noqa: ANN401  # JSON
    return json.loads(json.dumps(value))


def after(text: str, word: str) -> str:
    """What follows the last occurrence of `word`."""
    return text[text.rfind(word) + len(word) :] if word in text else text


def drop_common_end(text: str, other: str) -> str:
    """`text` without the end that it shares with `other`."""
    return text[: len(text) - len(common_end(text, other))]
