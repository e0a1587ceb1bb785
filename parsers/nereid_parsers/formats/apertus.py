"""Apertus: reasoning between two markers, and tool calls in an array of `{"name": arguments}`."""

from nereid_parsers.declarations import Reasoning, Source
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry
from nereid_parsers.tool_declarations import Call, JsonArray, NameIsKey, ToolSection

_TEMPLATE = Source("chat template of swiss-ai/Apertus-8B-Instruct-2509", "2025-09")

REASONING = {
    "apertus2509": ReasoningEntry(
        Reasoning("<|inner_prefix|>", "<|inner_suffix|>", interrupted_by=("<|tools_prefix|>",)),
        _TEMPLATE,
    ),
}

TOOLS = {
    "apertus": ToolEntry(
        ToolSection(
            (Call(JsonArray(NameIsKey())),), open="<|tools_prefix|>", close="<|tools_suffix|>"
        ),
        _TEMPLATE,
    ),
}
