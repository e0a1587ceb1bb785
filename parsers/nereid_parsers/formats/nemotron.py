"""NVIDIA Nemotron: reasoning between `<think>` tags."""

from nereid_parsers.declarations import Opener, Reasoning, Source
from nereid_parsers.formats.entry import ReasoningEntry

REASONING = {
    "nemotron_v3": ReasoningEntry(
        Reasoning("<think>\n", "\n</think>\n", opener=Opener.EITHER),
        Source("chat template of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "2025-12"),
    ),
}
