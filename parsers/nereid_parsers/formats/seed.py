"""ByteDance Seed: arguments are written as tagged values."""

from nereid_parsers.declarations import Reasoning, Source
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry
from nereid_parsers.tool_declarations import Call, TaggedArguments, ToolSection

_SEED = Source("chat template of ByteDance-Seed/Seed-OSS-36B-Instruct", "2025-08")

REASONING = {"seed_oss": ReasoningEntry(Reasoning("<seed:think>", "</seed:think>\n"), _SEED)}

TOOLS = {
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
