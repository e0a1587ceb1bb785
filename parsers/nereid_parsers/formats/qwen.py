"""Describes the output of Qwen models, and of models that use Qwen3-Coder's tool call syntax.

The tool calls of the other Qwen models are declared in hermes.py.
"""

from nereid_parsers.declarations import Opener, Reasoning, Source
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry
from nereid_parsers.tool_declarations import Call, TaggedArguments, ToolSection

_QWEN3 = Source("chat template of Qwen/Qwen3-0.6B", "2025-04")
_THINKING = Source("chat template of Qwen/Qwen3-4B-Thinking-2507", "2025-07")
_CODER = Source("chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct", "2025-07")
_MIMO = Source("mimo parser of vLLM 0.33.0 and detector of SGLang 0.5.23", "2026-11")
_MINICPM5 = Source("minicpm5 parser of vLLM 0.33.0 and detector of SGLang 0.5.23", "2026-11")
_SEED = Source("chat template of ByteDance-Seed/Seed-OSS-36B-Instruct", "2025-08")
_NANBEIGE = Source("nanbeige detector of SGLang 0.5.23 (Qwen3-Coder's format)", "2026-11")

_CALL = ("<tool_call>",)

REASONING = {
    "qwen3": ReasoningEntry(
        Reasoning("<think>\n", "\n</think>\n\n", opener=Opener.EITHER, interrupted_by=_CALL),
        _QWEN3,
    ),
    "qwen3_thinking": ReasoningEntry(
        Reasoning("<think>\n", "\n</think>\n\n", opener=Opener.FORCED, interrupted_by=_CALL),
        _THINKING,
    ),
    "seed_oss": ReasoningEntry(Reasoning("<seed:think>", "</seed:think>\n"), _SEED),
}


def _coder_section(arguments: TaggedArguments) -> ToolSection:
    """Return the declaration of the tool calls of Qwen3-Coder.

    `arguments` declares the tags around each argument, such as `<parameter=city>`. Example of a
    tool call:

        <tool_call>
        <function=f>
        <parameter=city>Paris</parameter>
        </function>
        </tool_call>
    """
    head = "<function={name}>\n"
    close = "</function>\n</tool_call>"
    return ToolSection(
        (
            Call(arguments, open="<tool_call>\n", head=head, close=close),
            Call(arguments, head=head, close=close),  # Models sometimes omit the opening marker.
        ),
        separator="\n",
    )


CODER = _coder_section(TaggedArguments("<parameter={key}>\n", "\n</parameter>\n"))
_COMPACT = _coder_section(TaggedArguments("<parameter={key}>", "</parameter>\n"))

TOOLS = {
    "qwen3_coder": ToolEntry(CODER, _CODER),
    "nanbeige": ToolEntry(CODER, _NANBEIGE),
    "mimo": ToolEntry(_COMPACT, _MIMO),
    "minicpm5": ToolEntry(
        ToolSection(
            (
                Call(
                    TaggedArguments(
                        '<param name="{key}"><![CDATA[',
                        "]]></param>",
                        also=(TaggedArguments('<param name="{key}">', "</param>"),),
                    ),
                    head='<function name="{name}">',
                    close="</function>",
                ),
            ),
            separator="\n",
        ),
        _MINICPM5,
    ),
    "seed_oss": ToolEntry(
        ToolSection(
            (
                Call(
                    TaggedArguments("<parameter={key}>", "</parameter>\n"),
                    open="<seed:tool_call>\n",
                    head="<function={name}>\n",
                    close="</function>\n</seed:tool_call>",
                ),
            ),
            separator="\n",
        ),
        _SEED,
    ),
}
