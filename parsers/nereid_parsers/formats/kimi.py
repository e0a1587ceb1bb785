"""Moonshot Kimi."""

from nereid_parsers.format import Call, JsonArguments, Reasoning, Source, ToolSection
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry

_THINKING = Source("chat template of moonshotai/Kimi-K2-Thinking", "2025-11")
_GUIDE = Source("docs/tool_call_guidance.md and template of moonshotai/Kimi-K2-Instruct", "2025-07")

REASONING = {
    "kimi_k2": ReasoningEntry(
        Reasoning("<think>", "</think>", interrupted_by=("<|tool_calls_section_begin|>",)),
        _THINKING,
    ),
}


def _call(head: str) -> Call:
    return Call(
        JsonArguments(),
        open="<|tool_call_begin|>",
        head=head + "<|tool_call_argument_begin|>",
        close="<|tool_call_end|>",
        id=head,
    )


TOOLS = {
    "kimi_k2": ToolEntry(
        ToolSection(
            (_call("functions.{name}:{number}"), _call("{name}:{number}"), _call("{name}")),
            open="<|tool_calls_section_begin|>",
            close="<|tool_calls_section_end|>",
        ),
        _GUIDE,
    ),
}
