"""Describes the output of Mistral models. They write `[TOOL_CALLS]` before tool calls."""

from nereid_parsers.declarations import Reasoning, Source
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry
from nereid_parsers.tool_declarations import Call, JsonArguments, JsonArray, Keys, ToolSection

_TEMPLATES = Source(
    "chat templates of mistralai/Mistral-Nemo-Instruct-2407 (array), "
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506 ([CALL_ID]) and "
    "mistralai/Ministral-3-14B-Reasoning-2512 ([ARGS])",
    "2025-12",
)

REASONING = {"mistral": ReasoningEntry(Reasoning("[THINK]", "[/THINK]"), _TEMPLATES)}

TOOLS = {
    "mistral": ToolEntry(
        ToolSection(
            (
                Call(JsonArguments(), open="[TOOL_CALLS]", head="{name}[ARGS]"),
                Call(JsonArguments(), open="[TOOL_CALLS]", head="{name}[CALL_ID]{id}[ARGS]"),
                Call(JsonArguments(), open="[TOOL_CALLS]", head="{name}"),
                Call(JsonArray(Keys(id="id")), open="[TOOL_CALLS]"),
            ),
        ),
        _TEMPLATES,
    ),
}
