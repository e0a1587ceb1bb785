"""MiniMax."""

from nereid_parsers.format import Call, Opener, Reasoning, Source, TaggedArguments, ToolSection
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry

_M2 = Source("chat template and tool calling guide of MiniMaxAI/MiniMax-M2", "2025-10")

REASONING = {
    "minimax_m2": ReasoningEntry(
        Reasoning("<think>\n", "\n</think>\n\n", opener=Opener.PROMPT), _M2
    ),
}

TOOLS = {
    "minimax_m2": ToolEntry(
        ToolSection(
            (
                Call(
                    TaggedArguments('<parameter name="{key}">', "</parameter>\n"),
                    head='<invoke name="{name}">\n',
                    close="</invoke>\n",
                ),
            ),
            open="<minimax:tool_call>\n",
            close="</minimax:tool_call>",
        ),
        _M2,
    ),
}
