"""Describes the output of Cohere Command: reasoning, response and tool calls between markers."""

from nereid_parsers.declarations import Reasoning, Source, Wrapper
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry
from nereid_parsers.tool_declarations import Call, JsonArray, Keys, ToolSection

_R7B = Source("tool-use chat template of CohereForAI/c4ai-command-r7b-12-2024", "2024-12")
_COMMAND4 = Source("cohere_command4 parser of vLLM 0.33.0, detector of SGLang 0.5.23", "2026-11")

_THINKING = Reasoning(
    "<|START_THINKING|>", "<|END_THINKING|>", interrupted_by=("<|START_ACTION|>",)
)

REASONING = {
    "cohere_command3": ReasoningEntry(
        _THINKING, _R7B, content=Wrapper("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    "cohere_command4": ReasoningEntry(
        _THINKING, _COMMAND4, content=Wrapper("<|START_TEXT|>", "<|END_TEXT|>")
    ),
}

_ACTIONS = ToolSection(
    (
        Call(
            JsonArray(
                Keys(
                    "tool_name",
                    "parameters",
                    id="tool_call_id",
                    order=("id", "name", "arguments"),
                )
            )
        ),
    ),
    open="<|START_ACTION|>",
    close="<|END_ACTION|>",
)

TOOLS = {
    "cohere_command3": ToolEntry(_ACTIONS, _R7B),
    "cohere_command4": ToolEntry(_ACTIONS, _COMMAND4),
}
