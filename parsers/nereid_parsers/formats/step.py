"""Describes the output of StepFun models. Tags enclose the value of each argument."""

from dataclasses import replace

from nereid_parsers.declarations import Opener, Reasoning, Source
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry
from nereid_parsers.formats.qwen import CODER
from nereid_parsers.tool_declarations import Call, TaggedArguments, ToolSection

_STEP3 = Source("model card of stepfun-ai/step3; step3 detector of SGLang 0.5.23", "2025-07")
_STEP35 = Source("chat template of stepfun-ai/Step-3.5-Flash", "2026-02")
_STEP5 = Source("step5 parser of vLLM 0.33.0 (Qwen3-Coder's format)", "2026-11")

_THINK = Reasoning("<think>\n", "\n</think>\n", opener=Opener.PROMPT)

REASONING = {
    "step3": ReasoningEntry(_THINK, _STEP3),
    "step3p5": ReasoningEntry(_THINK, _STEP35),
    "step5": ReasoningEntry(_THINK, _STEP5),
}

_STEP3_CALL = Call(
    TaggedArguments('<steptml:parameter name="{key}">', "</steptml:parameter>"),
    open="<｜tool_call_begin｜>",
    head='function<｜tool_sep｜><steptml:invoke name="{name}">',
    close="</steptml:invoke><｜tool_call_end｜>",
)

TOOLS = {
    "step3": ToolEntry(
        ToolSection(
            (
                _STEP3_CALL,
                # Models sometimes omit the word "function" and the separator after this word.
                replace(_STEP3_CALL, head='<steptml:invoke name="{name}">'),
            ),
            open="<｜tool_calls_begin｜>",
            close="<｜tool_calls_end｜>",
        ),
        _STEP3,
    ),
    "step3p5": ToolEntry(CODER, _STEP35),
    "step5": ToolEntry(CODER, _STEP5),
}
