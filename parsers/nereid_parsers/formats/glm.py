"""GLM: thinking that the template may open or close; calls with tagged keys and values."""

from nereid_parsers.format import Call, Reasoning, Source, TaggedArguments, ToolSection
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry

_GLM46 = Source("chat template of zai-org/GLM-4.6", "2025-09")
_GLM47 = Source("chat template of zai-org/GLM-4.7-Flash", "2026-01")

REASONING = {
    "glm45": ReasoningEntry(Reasoning("\n<think>", "</think>\n"), _GLM46),
    "glm47": ReasoningEntry(Reasoning("<think>", "</think>"), _GLM47),
}

TOOLS = {
    "glm45": ToolEntry(
        ToolSection(
            (
                Call(
                    TaggedArguments("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
                    open="<tool_call>",
                    head="{name}\n",
                    close="</tool_call>",
                ),
            ),
            separator="\n",
        ),
        _GLM46,
    ),
    "glm47": ToolEntry(
        ToolSection(
            (
                Call(
                    TaggedArguments("<arg_key>{key}</arg_key><arg_value>", "</arg_value>"),
                    open="<tool_call>",
                    head="{name}",
                    close="</tool_call>",
                ),
            ),
        ),
        _GLM47,
    ),
}
