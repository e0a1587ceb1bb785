"""Describes the output of Google Gemma models, which write the keys of arguments without quotes."""

from nereid_parsers.declarations import Opener, Reasoning, Source
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry
from nereid_parsers.tool_declarations import BareKeyArguments, Call, ToolSection

_GEMMA4 = Source("gemma4 parser of vLLM 0.33.0 and detector of SGLang 0.5.23", "2026-11")
_OPEN = "<|tool_call>"

REASONING = {
    "gemma4": ReasoningEntry(
        Reasoning(
            "<|channel>thought\n",
            "<channel|>",
            opener=Opener.EITHER,
            also_open=("<|channel>",),
            interrupted_by=(_OPEN,),
        ),
        _GEMMA4,
    ),
}

TOOLS = {
    "functiongemma": ToolEntry(
        ToolSection(
            (
                Call(
                    BareKeyArguments("<escape>"),
                    open="<start_function_call>",
                    head="call:{name}",
                    close="<end_function_call>",
                ),
            )
        ),
        Source("model card of google/functiongemma-270m-it", "2025-12"),
    ),
    "gemma4": ToolEntry(
        ToolSection(
            (
                Call(
                    BareKeyArguments('<|"|>'), open=_OPEN, head="call:{name}", close="<tool_call|>"
                ),
                # Models sometimes omit the word "call".
                Call(BareKeyArguments('<|"|>'), open=_OPEN, head=":{name}", close="<tool_call|>"),
            )
        ),
        _GEMMA4,
    ),
}
