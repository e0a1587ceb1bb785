"""Describes how models write reasoning between the tags `<think>` and `</think>`."""

from nereid_parsers.declarations import Opener, Reasoning, Source, Wrapper
from nereid_parsers.formats.entry import ReasoningEntry


def _vllm(name: str) -> Source:
    """Return a `Source` that refers to the parser `name` of vLLM."""
    return Source(f"{name} parser of vLLM 0.33.0", "2026-11")


def _sglang(name: str) -> Source:
    """Return a `Source` that refers to the detector `name` of SGLang."""
    return Source(f"{name} detector of SGLang 0.5.23", "2026-11")


_PLAIN = Reasoning("<think>\n", "\n</think>\n\n")
_OPENED = Reasoning("<think>\n", "\n</think>\n\n", opener=Opener.PROMPT)

REASONING = {
    "dots": ReasoningEntry(_PLAIN, _sglang("dots")),
    "ernie45": ReasoningEntry(
        _OPENED, _vllm("ernie45"), Wrapper("<response>\n", "\n</response>\n")
    ),
    "holo2": ReasoningEntry(_OPENED, _vllm("holo2")),
    "hunyuan_a13b": ReasoningEntry(
        Reasoning("<think>\n", "\n</think>\n"),
        Source("chat template of tencent/Hunyuan-A13B-Instruct", "2025-07"),
        Wrapper("<answer>\n", "\n</answer>"),
    ),
    "interns1": ReasoningEntry(_PLAIN, _sglang("interns1")),
    "mimo": ReasoningEntry(_PLAIN, _sglang("mimo")),
    "minicpmv": ReasoningEntry(_PLAIN, _vllm("minicpmv")),
    "nanbeige": ReasoningEntry(_PLAIN, _sglang("nanbeige")),
    "nemotron_v3": ReasoningEntry(
        Reasoning("<think>\n", "\n</think>\n", opener=Opener.EITHER),
        Source("chat template of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "2025-12"),
    ),
    "olmo3": ReasoningEntry(
        Reasoning("<think>", "</think>", opener=Opener.PROMPT),
        Source("model card of allenai/Olmo-3-7B-Think; olmo3 parser of vLLM 0.33.0", "2025-11"),
    ),
}
