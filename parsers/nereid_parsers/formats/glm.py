"""Describes the output of GLM and similar models. Tags enclose each argument's name and value."""

from dataclasses import replace

from nereid_parsers.declarations import Opener, Reasoning, Source
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry
from nereid_parsers.tool_declarations import Call, JsonObject, TaggedArguments, ToolSection

_GLM46 = Source("chat template of zai-org/GLM-4.6", "2025-09")
_GLM47 = Source("chat template of zai-org/GLM-4.7-Flash", "2026-01")
_LING3 = Source("ling3 parser of vLLM 0.33.0 and detector of SGLang 0.5.23", "2026-11")
_IQUEST = Source("iquest_q1 detector of SGLang 0.5.23", "2026-11")
_POOLSIDE = Source("poolside_v1 detector of SGLang 0.5.23 (Laguna)", "2026-11")
_SPARK = Source("spark25 detector of SGLang 0.5.23", "2026-11")
_HUNYUAN = Source("hunyuan detector of SGLang 0.5.23 and hy_v3 parser of vLLM 0.33.0", "2026-11")
_HY4 = Source("hy_v4 parser of vLLM 0.33.0", "2026-11")
_K2_HORIZON = Source("k2_horizon (K2-v3) detector of SGLang 0.5.23", "2026-11")

_INTERRUPTED = ("<tool_call>",)
_HUNYUAN_REASONING = Reasoning(
    "<think>",
    "</think>",
    opener=Opener.EITHER,
    also_open=("<think:opensource>",),
    also_close=("</think:opensource>",),
    interrupted_by=("<tool_calls>",),
)

REASONING = {
    "glm45": ReasoningEntry(
        Reasoning("\n<think>", "</think>\n", opener=Opener.EITHER, interrupted_by=_INTERRUPTED),
        _GLM46,
    ),
    "glm47": ReasoningEntry(
        Reasoning("<think>", "</think>", opener=Opener.EITHER, interrupted_by=_INTERRUPTED),
        _GLM47,
    ),
    "ling3": ReasoningEntry(Reasoning("<think>", "</think>", interrupted_by=_INTERRUPTED), _LING3),
    "iquest_q1": ReasoningEntry(Reasoning("<think>", "</think>"), _IQUEST),
    "poolside_v1": ReasoningEntry(Reasoning("<think>", "</think>"), _POOLSIDE),
    "hy_v3": ReasoningEntry(_HUNYUAN_REASONING, _HUNYUAN),
    "hy_v4": ReasoningEntry(replace(_HUNYUAN_REASONING, opener=Opener.PROMPT), _HY4),
    "k2_horizon": ReasoningEntry(
        Reasoning(
            "<ifm|think>",
            "</ifm|think>\n",
            opener=Opener.PROMPT,
            also_open=("<ifm|think_fast>", "<ifm|think_faster>"),
            also_close=("</ifm|think_fast>", "</ifm|think_faster>"),
        ),
        _K2_HORIZON,
    ),
}


def _glm_section(gap: str, tag: str = "tool_call") -> ToolSection:
    """Return a description of how GLM models write tool calls.

    The parser reads the tool calls according to this declaration. Each tool call is between its own
    tags, and there are no other tags around the list of all tool calls. Example of a tool call:
    `<tool_call>f<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>`.

    Args:
        gap: The white space after the function's name and after each closing tag.
        tag: The name of the tag around a tool call.
    """
    arguments = TaggedArguments(
        "<arg_key>{key}</arg_key>" + gap + "<arg_value>", "</arg_value>" + gap
    )
    call = Call(arguments, open=f"<{tag}>", head="{name}" + gap, close=f"</{tag}>")
    return ToolSection((call,), separator=gap)


_SECTION_WITH_LINE_BREAKS = _glm_section("\n")
_SECTION_ON_ONE_LINE = _glm_section("")


# Published checkpoints of Hy3 write this suffix after each tag name: `<tool_calls:opensource>`.
_SUFFIX = ":opensource"


def _hunyuan_call(tag_after_name: str, suffix: str) -> Call:
    """Return a description of how a Hunyuan model writes one tool call.

    Example of a tool call with the tag `<tool_sep>` after the name, and no suffix:

        <tool_call>f<tool_sep>
        <arg_key>city</arg_key>
        <arg_value>Paris</arg_value>
        </tool_call>

    Args:
        tag_after_name: The tag after the function's name, or "" if no tag follows.
        suffix: The text at the end of each tag name, for example `:opensource`, or "".
    """

    def with_suffix(tags: str) -> str:
        """Insert the suffix into each tag: `<arg_key>` gives `<arg_key:opensource>`."""
        return tags.replace(">", suffix + ">")

    arguments = TaggedArguments(
        with_suffix("<arg_key>{key}</arg_key>\n<arg_value>"), with_suffix("</arg_value>\n")
    )
    return Call(
        arguments,
        open=with_suffix("<tool_call>"),
        head=with_suffix("{name}" + tag_after_name + "\n"),
        close=with_suffix("</tool_call>\n"),
    )


def _hunyuan_section(tag_after_name: str) -> ToolSection:
    """Return a description of how a Hunyuan model writes all tool calls of a message.

    Example with the tag `<tool_sep>` after the name of the function:

        <tool_calls>
        <tool_call>f<tool_sep>
        <arg_key>city</arg_key>
        <arg_value>Paris</arg_value>
        </tool_call>
        </tool_calls>

    A model may also write the suffix `:opensource` in all tags, as in `<tool_calls:opensource>`.

    Args:
        tag_after_name: The tag after the function's name, or "" if no tag follows.
    """
    return ToolSection(
        tuple(_hunyuan_call(tag_after_name, suffix) for suffix in ("", _SUFFIX)),
        open="<tool_calls>\n",
        close="</tool_calls>",
        also_open=(f"<tool_calls{_SUFFIX}>\n",),
        also_close=(f"</tool_calls{_SUFFIX}>",),
    )


TOOLS = {
    "glm45": ToolEntry(_SECTION_WITH_LINE_BREAKS, _GLM46),
    "glm47": ToolEntry(_SECTION_ON_ONE_LINE, _GLM47),
    "ling3": ToolEntry(_SECTION_WITH_LINE_BREAKS, _LING3, ends=("<|role_end|>",)),
    "poolside_v1": ToolEntry(_SECTION_WITH_LINE_BREAKS, _POOLSIDE),
    "spark25": ToolEntry(
        ToolSection(
            (
                Call(
                    TaggedArguments("<arg_key>{key}</arg_key><arg_value>", "</arg_value>\n"),
                    open="<tool_call>",
                    head="{name}\n",
                    close="</tool_call>",
                ),
            ),
            separator="\n",
        ),
        _SPARK,
    ),
    "iquest_q1": ToolEntry(_glm_section("", "iquest_tool_call"), _IQUEST),
    "hy_v3": ToolEntry(_hunyuan_section("<tool_sep>"), _HUNYUAN),
    "hy_v4": ToolEntry(_hunyuan_section(""), _HY4),
    "k2_horizon": ToolEntry(
        ToolSection(
            (
                Call(
                    TaggedArguments(
                        "<ifm|arg_key>{key}</ifm|arg_key>\n<ifm|arg_value>",
                        "</ifm|arg_value>\n",
                        also=(
                            TaggedArguments(
                                "<ifm|arg_key>{key}</ifm|arg_key>\n<ifm|arg_type>{type}"
                                "</ifm|arg_type>\n<ifm|arg_value>",
                                "</ifm|arg_value>\n",
                            ),
                        ),
                    ),
                    open="<ifm|tool_call>",
                    head="{name}\n",
                    close="</ifm|tool_call>\n",
                ),
                Call(JsonObject(), open="<ifm|tool_call>", close="</ifm|tool_call>\n"),
            ),
            open="<ifm|tool_calls>\n",
            close="</ifm|tool_calls>",
        ),
        _K2_HORIZON,
    ),
}
