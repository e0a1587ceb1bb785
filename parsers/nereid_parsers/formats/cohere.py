"""Cohere Command: marked thinking, response and action blocks."""

from nereid_parsers.format import (
    Call,
    JsonArray,
    Keys,
    Reasoning,
    Source,
    ToolSection,
    Wrapper,
)
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry

_R7B = Source("tool-use chat template of CohereForAI/c4ai-command-r7b-12-2024", "2024-12")

REASONING = {
    "cohere_command3": ReasoningEntry(
        Reasoning("<|START_THINKING|>", "<|END_THINKING|>"),
        _R7B,
        content=Wrapper("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
}

TOOLS = {
    "cohere_command3": ToolEntry(
        ToolSection(
            (
                Call(
                    JsonArray(
                        Keys(
                            "tool_name", "parameters", id="tool_call_id",
                            order=("id", "name", "arguments"),
                        )
                    )
                ),
            ),
            open="<|START_ACTION|>",
            close="<|END_ACTION|>",
        ),
        _R7B,
    ),
}  # fmt: skip
