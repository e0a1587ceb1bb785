"""Describes the output of models that write tool calls in Python syntax."""

from nereid_parsers.declarations import Source
from nereid_parsers.formats.entry import ToolEntry
from nereid_parsers.tool_declarations import Call, JsonArray, PythonCalls, ToolSection

_LLAMA4 = Source("chat template of meta-llama/Llama-4-Scout-17B-16E-Instruct", "2025-04")

_LLAMA4_CALLS = ToolSection(
    (
        Call(PythonCalls()),
        Call(PythonCalls(), open="<|python_start|>", close="<|python_end|>"),
    )
)

TOOLS = {
    "pythonic": ToolEntry(_LLAMA4_CALLS, _LLAMA4),
    "llama4_pythonic": ToolEntry(_LLAMA4_CALLS, _LLAMA4),
    "lfm2": ToolEntry(
        ToolSection(
            (Call(PythonCalls()), Call(JsonArray())),
            open="<|tool_call_start|>",
            close="<|tool_call_end|>",
        ),
        Source("model card of LiquidAI/LFM2-8B-A1B; lfm2 parser of vLLM 0.33.0", "2025-10"),
    ),
    "olmo3": ToolEntry(
        ToolSection(
            (Call(PythonCalls("", "", separator="\n")),),
            open="<function_calls>\n",
            close="\n</function_calls>",
            separator="\n",
        ),
        Source("model card of allenai/Olmo-3-7B-Instruct; olmo3 parser of vLLM 0.33.0", "2025-11"),
    ),
}
