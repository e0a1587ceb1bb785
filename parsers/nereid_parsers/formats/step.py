"""StepFun."""

from nereid_parsers.format import Opener, Reasoning, Source
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry
from nereid_parsers.formats.qwen import CODER

_STEP35 = Source("chat template of stepfun-ai/Step-3.5-Flash", "2026-02")

REASONING = {
    "step3p5": ReasoningEntry(
        Reasoning("<think>\n", "\n</think>\n", opener=Opener.PROMPT), _STEP35
    ),
}

TOOLS = {"step3p5": ToolEntry(CODER, _STEP35)}
