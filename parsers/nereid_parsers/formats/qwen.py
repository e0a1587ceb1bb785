"""Alibaba Qwen. Its plain tool format is Hermes'."""

from nereid_parsers.format import Call, Reasoning, Source, TaggedArguments, ToolSection
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry

_QWEN3 = Source("chat template of Qwen/Qwen3-0.6B", "2025-04")
_CODER = Source("chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct", "2025-07")

REASONING = {"qwen3": ReasoningEntry(Reasoning("<think>\n", "\n</think>\n\n"), _QWEN3)}

_ARGUMENTS = TaggedArguments("<parameter={key}>\n", "\n</parameter>\n")

CODER = ToolSection(
    (
        Call(
            _ARGUMENTS,
            open="<tool_call>\n",
            head="<function={name}>\n",
            close="</function>\n</tool_call>",
        ),
        Call(_ARGUMENTS, head="<function={name}>\n", close="</function>\n</tool_call>"),
    ),
    separator="\n",
)

TOOLS = {"qwen3_coder": ToolEntry(CODER, _CODER)}
