"""Describes models that write a marker, and then tool calls as a JSON array or JSON object.

The module also declares the reasoning of Apertus. No other model family has this form of reasoning.
"""

from dataclasses import replace

from nereid_parsers.declarations import Reasoning, Source
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry
from nereid_parsers.tool_declarations import (
    Call,
    JsonArray,
    JsonObject,
    Keys,
    NameIsKey,
    ToolSection,
)

_APERTUS = Source("chat template of swiss-ai/Apertus-8B-Instruct-2509", "2025-09")


_ARRAY_OF_CALLS = ToolSection((Call(JsonArray()),), open="<tool_calls>", close="</tool_calls>")

_PLUGIN = Call(
    JsonObject(Keys("name", "parameters", also=("arguments",))),
    open="<|action_start|><|plugin|>\n",
    close="<|action_end|>",
)
_PLUGIN_SPACED = replace(_PLUGIN, open="<|action_start|> <|plugin|>\n")

REASONING = {
    "apertus2509": ReasoningEntry(
        Reasoning("<|inner_prefix|>", "<|inner_suffix|>", interrupted_by=("<|tools_prefix|>",)),
        _APERTUS,
    ),
}

TOOLS = {
    # Each tool call has the form `{"name": {..arguments..}}`.
    "apertus": ToolEntry(
        ToolSection(
            (Call(JsonArray(NameIsKey())),), open="<|tools_prefix|>", close="<|tools_suffix|>"
        ),
        _APERTUS,
    ),
    "hunyuan_a13b": ToolEntry(
        _ARRAY_OF_CALLS,
        Source("chat template of tencent/Hunyuan-A13B-Instruct", "2025-07"),
    ),
    "jamba": ToolEntry(
        _ARRAY_OF_CALLS,
        Source("chat template of ai21labs/AI21-Jamba-1.5-Mini", "2024-08"),
    ),
    "phi4_mini_json": ToolEntry(
        ToolSection(
            (
                Call(JsonArray(), open="functools"),
                Call(JsonArray(), open="<|tool_call|>", close="<|/tool_call|>"),
            )
        ),
        Source("model card of microsoft/Phi-4-mini-instruct; parser of vLLM 0.33.0", "2025-03"),
    ),
    "xlam": ToolEntry(
        ToolSection(
            (
                Call(JsonArray()),
                Call(JsonArray(), open="```json\n", close="\n```"),
                Call(JsonArray(), open="[TOOL_CALLS]"),
                Call(JsonArray(), open="<tool_call>", close="</tool_call>"),
            )
        ),
        Source("model card of Salesforce/Llama-xLAM-2-8b-fc-r; parser of vLLM 0.33.0", "2025-04"),
    ),
    "internlm": ToolEntry(
        ToolSection((_PLUGIN, _PLUGIN_SPACED), separator="\n"),
        Source(
            "model card of internlm/internlm2_5-7b-chat; internlm parser of vLLM 0.33.0", "2024-07"
        ),
    ),
    "interns1": ToolEntry(
        ToolSection((_PLUGIN_SPACED, _PLUGIN), separator="\n"),
        Source("chat template of internlm/Intern-S1; detector of SGLang 0.5.23", "2025-07"),
    ),
    "gigachat3": ToolEntry(
        ToolSection(
            (
                Call(JsonObject(), open="<|function_call|>"),
                Call(JsonObject(), open="function call<|role_sep|>\n"),
            )
        ),
        Source("gigachat3 parser of vLLM 0.33.0 and detector of SGLang 0.5.23", "2026-11"),
        ends=("<|message_sep|>", "</s>"),
    ),
}
