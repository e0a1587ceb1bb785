"""Hermes: one JSON object per `<tool_call>` element. Qwen 2.5 and 3 write the same."""

from nereid_parsers.format import Call, JsonObject, Source, ToolSection
from nereid_parsers.formats.entry import ToolEntry

HERMES = ToolSection(
    (Call(JsonObject(), open="<tool_call>\n", close="\n</tool_call>"),), separator="\n"
)

TOOLS = {
    "hermes": ToolEntry(
        HERMES,
        Source(
            "tool-use chat template of NousResearch/Hermes-2-Pro-Llama-3-8B; chat template of "
            "Qwen/Qwen2.5-7B-Instruct",
            "2024-09",
        ),
    ),
}
