"""DeepSeek: thinking opened by the prompt; calls between begin and end tokens."""

from nereid_parsers.format import Call, JsonArguments, Opener, Reasoning, Source, ToolSection
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry

_R1 = Source("chat template of deepseek-ai/DeepSeek-R1", "2025-02")
_V31 = Source("chat template and model card of deepseek-ai/DeepSeek-V3.1", "2025-08")
_ENDS = ("<｜end▁of▁sentence｜>",)

REASONING = {
    "deepseek_r1": ReasoningEntry(
        Reasoning("<think>\n", "\n</think>\n\n", opener=Opener.PROMPT), _R1
    ),
    "deepseek_v3": ReasoningEntry(Reasoning("<think>", "</think>"), _V31),
}

_OPEN = "<｜tool▁calls▁begin｜>"
_CLOSE = "<｜tool▁calls▁end｜>"

TOOLS = {
    "deepseek_v3": ToolEntry(
        ToolSection(
            (
                Call(
                    JsonArguments(),
                    open="<｜tool▁call▁begin｜>",
                    head="function<｜tool▁sep｜>{name}\n```json\n",
                    close="\n```<｜tool▁call▁end｜>",
                ),
            ),
            separator="\n",
            open=_OPEN,
            close=_CLOSE,
        ),
        _R1,
        ends=_ENDS,
    ),
    "deepseek_v31": ToolEntry(
        ToolSection(
            (
                Call(
                    JsonArguments(),
                    open="<｜tool▁call▁begin｜>",
                    head="{name}<｜tool▁sep｜>",
                    close="<｜tool▁call▁end｜>",
                ),
            ),
            open=_OPEN,
            close=_CLOSE,
        ),
        _V31,
        ends=_ENDS,
    ),
}
