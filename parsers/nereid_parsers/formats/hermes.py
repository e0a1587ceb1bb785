"""Describes how Hermes, Qwen 2.5 and Qwen 3 write tool calls: as JSON in `<tool_call>` tags."""

from nereid_parsers.declarations import Source
from nereid_parsers.formats.entry import ToolEntry
from nereid_parsers.tool_declarations import Call, JsonObject, ToolSection


def _tagged(tag: str) -> ToolSection:
    """Return a description of how a model writes JSON tool calls between `<tag>` and `</tag>`."""
    return ToolSection(
        (Call(JsonObject(), open=f"<{tag}>\n", close=f"\n</{tag}>"),), separator="\n"
    )


HERMES = _tagged("tool_call")

TOOLS = {
    "hermes": ToolEntry(
        HERMES,
        Source(
            "tool-use chat template of NousResearch/Hermes-2-Pro-Llama-3-8B; chat template of "
            "Qwen/Qwen2.5-7B-Instruct",
            "2024-09",
        ),
    ),
    "longcat": ToolEntry(
        _tagged("longcat_tool_call"), Source("longcat parser of vLLM 0.33.0", "2026-11")
    ),
    "ernie45": ToolEntry(HERMES, Source("ernie45 parser of vLLM 0.33.0", "2026-11")),
    "trinity": ToolEntry(
        HERMES, Source("trinity detector of SGLang 0.5.23 (Qwen 2.5's format)", "2026-11")
    ),
}
