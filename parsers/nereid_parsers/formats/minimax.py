"""Describes the output of MiniMax and dots models, which write tool calls in `<invoke>` tags."""

from nereid_parsers.declarations import Opener, Reasoning, Shown, Source
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry
from nereid_parsers.tool_declarations import (
    Call,
    JsonObject,
    NestedTags,
    TaggedArguments,
    ToolSection,
)

_M2 = Source("chat template and tool calling guide of MiniMaxAI/MiniMax-M2", "2025-10")
_M3 = Source("minimax_m3 parser of vLLM 0.33.0 and detector of SGLang 0.5.23", "2026-11")
_DOTS = Source("dots parser of vLLM 0.33.0 and detector of SGLang 0.5.23", "2026-11")

REASONING = {
    "minimax_m2": ReasoningEntry(
        Reasoning("<think>\n", "\n</think>\n\n", opener=Opener.PROMPT), _M2
    ),
    "minimax_m2_append_think": ReasoningEntry(
        Reasoning("<think>\n", "\n</think>\n\n", opener=Opener.PROMPT, shown=Shown.INLINE), _M2
    ),
    "minimax_m3": ReasoningEntry(Reasoning("<mm:think>", "</mm:think>", opener=Opener.EITHER), _M3),
}

_INVOKE = Call(
    TaggedArguments('<parameter name="{key}">', "</parameter>\n"),
    head='<invoke name="{name}">\n',
    close="</invoke>\n",
)

_MARK = "]<]minimax[>["

TOOLS = {
    "minimax_m3": ToolEntry(
        ToolSection(
            (
                Call(
                    NestedTags(_MARK),
                    head=_MARK + '<invoke name="{name}">\n',
                    close=f"{_MARK}</invoke>\n",
                ),
            ),
            open=f"{_MARK}<tool_call>\n",
            close=f"{_MARK}</tool_call>",
        ),
        _M3,
    ),
    "minimax_m2": ToolEntry(
        ToolSection((_INVOKE,), open="<minimax:tool_call>\n", close="</minimax:tool_call>"), _M2
    ),
    "dots": ToolEntry(
        ToolSection(
            (_INVOKE, Call(JsonObject())),
            open="<dots_function_call>\n",
            close="</dots_function_call>",
        ),
        _DOTS,
    ),
}
