"""Describes the output of Moonshot Kimi models. Special tokens or tags enclose tool calls."""

from nereid_parsers.declarations import Reasoning, Source, Wrapper
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry
from nereid_parsers.tool_declarations import Call, JsonArguments, TaggedArguments, ToolSection

_K15 = Source("kimi detector of SGLang 0.5.23 (Kimi thinking models)", "2026-11")
_THINKING = Source("chat template of moonshotai/Kimi-K2-Thinking", "2025-11")
_GUIDE = Source("docs/tool_call_guidance.md and template of moonshotai/Kimi-K2-Instruct", "2025-07")
_K3 = Source("kimi_k3 parser of vLLM 0.33.0 and detector of SGLang 0.5.23", "2026-11")

_K3_ENDS = ("<|close|>message<|sep|>",)

REASONING = {
    "kimi": ReasoningEntry(Reasoning("◁think▷", "◁/think▷"), _K15),
    "kimi_k2": ReasoningEntry(
        Reasoning("<think>", "</think>", interrupted_by=("<|tool_calls_section_begin|>",)),
        _THINKING,
    ),
    "kimi_k3": ReasoningEntry(
        Reasoning("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        _K3,
        Wrapper("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        ends=_K3_ENDS,
    ),
}


def _call_with_id(call_id: str) -> Call:
    """Return a description of a tool call whose id contains the function's name: `functions.f:0`.

    The parser reads the tool call according to this declaration. Example of a tool call:
    `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>`.

    Args:
        call_id: The pattern of the id, for example `functions.{name}:{number}`.
    """
    return Call(
        JsonArguments(),
        open="<|tool_call_begin|>",
        head=call_id + "<|tool_call_argument_begin|>",
        close="<|tool_call_end|>",
        id=call_id,
    )


TOOLS = {
    "kimi_k2": ToolEntry(
        ToolSection(
            tuple(
                _call_with_id(call_id)
                for call_id in ("functions.{name}:{number}", "{name}:{number}", "{name}")
            ),
            open="<|tool_calls_section_begin|>",
            close="<|tool_calls_section_end|>",
        ),
        _GUIDE,
    ),
    "kimi_k3": ToolEntry(
        ToolSection(
            (
                Call(
                    TaggedArguments(
                        '<|open|>argument key="{key}" type="{type}"<|sep|>',
                        "<|close|>argument<|sep|>",
                    ),
                    head='<|open|>call tool="{name}" index="{number}"<|sep|>',
                    close="<|close|>call<|sep|>",
                ),
            ),
            open="<|open|>tools<|sep|>",
            close="<|close|>tools<|sep|>",
        ),
        _K3,
        ends=_K3_ENDS,
    ),
}
