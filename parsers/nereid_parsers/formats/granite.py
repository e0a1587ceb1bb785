"""Describes the output of IBM Granite: JSON tool calls, and reasoning between phrases or tags."""

from nereid_parsers.declarations import Opener, Reasoning, Source, Wrapper
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry
from nereid_parsers.tool_declarations import Call, JsonArray, JsonObject, ToolSection

_GRANITE20B = Source("model card of ibm-granite/granite-20b-functioncalling", "2024-07")
_GRANITE32 = Source("model card of ibm-granite/granite-3.2-8b-instruct", "2025-02")
_GRANITE33 = Source("chat template of ibm-granite/granite-3.3-2b-instruct", "2025-04")
_GRANITE4 = Source("chat template of ibm-granite/granite-4.0", "2025-10")

_THINK = ReasoningEntry(
    Reasoning("<think>\n", "\n</think>\n\n", opener=Opener.EITHER),
    _GRANITE33,
    content=Wrapper("<response>", "</response>"),
)

REASONING = {
    "granite": ReasoningEntry(
        Reasoning(
            "Here is my thought process:",
            "Here is my response:",
            also_open=("Here's my thought process:", "<think>\n"),
            also_close=("Here's my response:", "\n</think>\n\n"),
        ),
        _GRANITE32,
        content=Wrapper("<response>", "</response>"),
    ),
    "granite_thinking_parser": _THINK,
}

TOOLS = {
    "granite": ToolEntry(
        ToolSection(
            (
                Call(JsonArray(), open="<|tool_call|>"),
                Call(JsonArray(), open="<tool_call>"),
            )
        ),
        _GRANITE33,
        reasoning=_THINK,
    ),
    "granite_20b_fc": ToolEntry(
        ToolSection((Call(JsonObject(), open="<function_call> "),), separator="\n"), _GRANITE20B
    ),
    "granite4": ToolEntry(
        ToolSection(
            (Call(JsonObject(), open="<tool_call>\n", close="\n</tool_call>"),), separator="\n"
        ),
        _GRANITE4,
    ),
}
