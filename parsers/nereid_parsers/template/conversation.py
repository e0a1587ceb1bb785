"""The probe conversations that the analysis renders.

No template contains the texts of these conversations (`CONTENT_TEXT`, `FIRST_TOOL`, ...). So the
analysis can find the texts in a rendering.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

USER_TEXT = "Quokka asks for something."
CONTENT_TEXT = "Wombat gives the answer."
REASONING_TEXT = "Numbat thinks about it."
RESULT_TEXT = "Bilby measured 42 degrees."
FIRST_TOOL = "zqFirstTool"
SECOND_TOOL = "zqSecondTool"
FIRST_KEY = "zqKeyOne"
SECOND_KEY = "zqKeyTwo"
FIRST_VALUE = "zqValueOne"
SECOND_VALUE = "zqValueTwo"
NUMBER_VALUE = 41
# A string with a line break and characters that have a meaning in markup. Some templates quote it.
SPECIAL_VALUE = f"{FIRST_VALUE}\n<&> {SECOND_VALUE}"
EOS_TOKEN = "<|zq-end-of-sequence|>"
BOS_TOKEN = "<|zq-begin-of-sequence|>"


def _tool(name: str) -> dict[str, Any]:
    """Return an OpenAI tool definition with the two probe arguments."""
    properties = {
        FIRST_KEY: {"type": "string", "description": "first"},
        SECOND_KEY: {"type": "string", "description": "second"},
    }
    parameters = {"type": "object", "properties": properties, "required": [FIRST_KEY]}
    return {
        "type": "function",
        "function": {"name": name, "description": "a tool", "parameters": parameters},
    }


TOOLS = [_tool(FIRST_TOOL), _tool(SECOND_TOOL)]


@dataclass(frozen=True, slots=True)
class ProbeCall:
    """A tool call of a probe conversation. `arguments` are pairs of key and value."""

    name: str = FIRST_TOOL
    arguments: tuple[tuple[str, Any], ...] = ((FIRST_KEY, FIRST_VALUE),)


TWO_ARGUMENTS = ((FIRST_KEY, FIRST_VALUE), (SECOND_KEY, SECOND_VALUE))
ONE_CALL = (ProbeCall(),)
TWO_CALLS = (*ONE_CALL, ProbeCall(SECOND_TOOL, ((SECOND_KEY, SECOND_VALUE),)))


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """The assistant message of a probe conversation."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ProbeCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Switches:
    """Template variables and a system message that may turn thinking on or off.

    Attributes:
        variables: Pairs of name and value, such as (("enable_thinking", False),).
        system: The text of a system message, such as "/no_think"; "" for no system message.
    """

    variables: tuple[tuple[str, Any], ...] = ()
    system: str = ""

    def describe(self) -> str:
        """Return the switches as text for the report.

        >>> Switches((("enable_thinking", False),), "/no_think").describe()
        "enable_thinking=False, system '/no_think'"
        """
        words = [f"{name}={value!r}" for name, value in self.variables]
        if self.system:
            words.append(f"system {self.system!r}")
        return ", ".join(words)


NO_SWITCHES = Switches()


@dataclass(frozen=True, slots=True)
class Conversation:
    """A short conversation that the analysis renders, with the options for rendering it.

    The messages are: the system message of `switches`, the user's question, a tool call with its
    result (if `after_tool_result`), the assistant's `answer`, and the user's reply (if
    `user_replies`).

    Attributes:
        answer: The last assistant message. If None, the model is about to write it.
        generation_prompt: Whether to render with the generation prompt.
        tools: Whether to offer tools.
        after_tool_result: Whether a tool call and its result precede the answer.
        user_replies: Whether the user writes once more after the answer.
        switches: The switches to render with.
    """

    answer: AssistantMessage | None = None
    generation_prompt: bool = False
    tools: bool = False
    after_tool_result: bool = False
    user_replies: bool = False
    switches: Switches = NO_SWITCHES


def conversation_with_calls(*calls: ProbeCall, content: str = "") -> Conversation:
    """Return a conversation whose answer makes these tool calls."""
    return Conversation(AssistantMessage(content, calls=calls), tools=True)
