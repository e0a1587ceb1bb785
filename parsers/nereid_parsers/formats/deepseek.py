"""Describes the output of DeepSeek models. Special tokens or tags enclose the tool calls.

Since V3.2, the models write tags in DSML, DeepSeek's markup.
"""

from nereid_parsers.declarations import Opener, Reasoning, Source
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry
from nereid_parsers.tool_declarations import Call, JsonArguments, TaggedArguments, ToolSection

_R1 = Source("chat template of deepseek-ai/DeepSeek-R1", "2025-02")
_V31 = Source("chat template and model card of deepseek-ai/DeepSeek-V3.1", "2025-08")
_V32 = Source("encoding/ folder of deepseek-ai/DeepSeek-V3.2, as read by SGLang 0.5.23", "2025-12")
_V4 = Source("DeepSeek V4 detectors of SGLang 0.5.23 and vLLM 0.33.0", "2026-11")
_GIGACHAT35 = Source("gigachat35 detector of SGLang 0.5.23", "2026-11")
_ENDS = ("<｜end▁of▁sentence｜>",)

_THINK = Reasoning("<think>", "</think>")

REASONING = {
    "deepseek_r1": ReasoningEntry(
        Reasoning("<think>\n", "\n</think>\n\n", opener=Opener.PROMPT), _R1, ends=_ENDS
    ),
    "deepseek_v3": ReasoningEntry(_THINK, _V31, ends=_ENDS),
    "deepseek_v4": ReasoningEntry(_THINK, _V4, ends=_ENDS),
    "deepseek_v41": ReasoningEntry(_THINK, _V4, ends=_ENDS),
    "gigachat35": ReasoningEntry(
        Reasoning("<think>", "</think>", opener=Opener.PROMPT), _GIGACHAT35
    ),
}


def _between_tokens(head: str, close: str, separator: str) -> ToolSection:
    """Return a description of how DeepSeek V3 and V3.1 write tool calls between special tokens.

    Args:
        head: The pattern of the text between the opening token and the arguments of a tool call.
        close: The text after the arguments of a tool call.
        separator: The text between two tool calls.
    """
    return ToolSection(
        (Call(JsonArguments(), open="<｜tool▁call▁begin｜>", head=head, close=close),),
        open="<｜tool▁calls▁begin｜>",
        close="<｜tool▁calls▁end｜>",
        separator=separator,
    )


def _dsml(token: str, section: str, gap: str = "") -> ToolSection:
    """Return a description of how DeepSeek writes tool calls in its markup language DSML.

    Example with the token `｜DSML｜`, the section `tool_calls` and no gap:

        <｜DSML｜tool_calls>
        <｜DSML｜invoke name="f">
        <｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>
        </｜DSML｜invoke>
        </｜DSML｜tool_calls>

    The attribute `string` declares whether the value is a string. Instead of the parameters, the
    model may write a JSON object with all arguments.

    Args:
        token: The special token in each tag.
        section: The name of the tag around all tool calls.
        gap: The text between the token and the name of a tag. V4.1 writes a space.
    """
    opening = "<" + token + gap
    closing = "</" + token + gap
    open_invoke = opening + 'invoke name="{name}">\n'
    close_invoke = closing + "invoke>\n"
    tagged_arguments = TaggedArguments(
        opening + 'parameter name="{key}" string="{string}">', closing + "parameter>\n"
    )
    return ToolSection(
        (
            Call(tagged_arguments, head=open_invoke, close=close_invoke),
            Call(JsonArguments(), head=open_invoke, close=close_invoke),
        ),
        open=opening + section + ">\n",
        close=closing + section + ">",
    )


TOOLS = {
    "deepseek_v3": ToolEntry(
        _between_tokens(
            "function<｜tool▁sep｜>{name}\n```json\n", "\n```<｜tool▁call▁end｜>", separator="\n"
        ),
        _R1,
        ends=_ENDS,
    ),
    "deepseek_v31": ToolEntry(
        _between_tokens("{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>", separator=""),
        _V31,
        ends=_ENDS,
    ),
    "deepseek_v32": ToolEntry(_dsml("｜DSML｜", "function_calls"), _V32, ends=_ENDS),
    "deepseek_v4": ToolEntry(_dsml("｜DSML｜", "tool_calls"), _V4, ends=_ENDS),
    "deepseek_v41": ToolEntry(_dsml("｜DSML｜", "tool_calls", gap=" "), _V4, ends=_ENDS),
    "gigachat35": ToolEntry(
        _dsml("｜GCML｜", "tool_calls"), _GIGACHAT35, ends=("<|message_sep|>", "</s>")
    ),
}
