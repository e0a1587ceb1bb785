"""Describes how Meta Llama writes tool calls: as JSON, or in Python syntax after a marker."""

from nereid_parsers.declarations import Source
from nereid_parsers.formats.entry import ToolEntry
from nereid_parsers.tool_declarations import Call, JsonObject, Keys, PythonCalls, ToolSection

_LLAMA31 = Source(
    "prompt format of Llama 3.1 (llama.com/docs/model-cards-and-prompt-formats/llama3_1) and the "
    "chat template of meta-llama/Llama-3.1-8B-Instruct",
    "2024-09",
)
_LLAMA4 = Source("llama4_json parser of vLLM 0.33.0 (tool_chat_template_llama4_json)", "2026-11")

_KEYS = Keys("name", "parameters", also=("arguments",), extra=("type", "id"))
_SECTION = ToolSection(
    (
        Call(JsonObject(_KEYS)),
        Call(JsonObject(_KEYS), open="<|python_tag|>"),
        Call(PythonCalls("", "", separator=";", suffix=".call"), open="<|python_tag|>"),
    ),
    separator="; ",
)
_ENDS = ("<|eom_id|>", "<|eot_id|>")

TOOLS = {
    "llama3_json": ToolEntry(_SECTION, _LLAMA31, ends=_ENDS),
    "llama4_json": ToolEntry(_SECTION, _LLAMA4, ends=("<|eom|>", "<|eot|>")),
}
