# SPDX-License-Identifier: Apache-2.0
"""The settings of an embedding model or reranker: one frozen object, checked when it is made."""

from collections.abc import Mapping
from dataclasses import dataclass

from nereid_backend.config import check_checkpoint, check_choice, check_count
from nereid_backend.text_settings import from_texts

TASKS = ("auto", "embed", "rerank", "classify")
POOLERS = ("cls", "lasttoken", "mean", "weightedmean", "mean_sqrt_len_tokens", "max", "splade")


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """Everything an operator may choose about a model that embeds, scores or classifies.

    Attributes:
        model: folder of a Hugging Face or sentence-transformers checkpoint in safetensors.
        task: what it is for; "auto" is what the checkpoint's files say. "embed" makes a generative
            checkpoint an embedder, "rerank" a yes/no judge.
        pooling: how token vectors become one; None is what the checkpoint's files say.
        dtype: of the weights; "auto" is the checkpoint's own (float32 for float16 on a CPU).
        device: "auto" is the first GPU if there is one, else "cpu"; or "cuda", "cuda:1".
        max_batch_tokens: about so many tokens go through the model in one step; a longer text goes
            alone. None is 1024 on a CPU and 16384 on a GPU.
        max_model_len: longest input in tokens; None is what the checkpoint's files say.
        max_num_waiting: at most so many inputs wait; more are refused.
        num_threads: CPU threads for torch; None is all CPUs this process may use but one.

    Raises:
        ConfigError: a value is of the wrong type or out of range; the message says what would do.
    """

    model: str
    task: str = "auto"
    pooling: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_batch_tokens: int | None = None
    max_model_len: int | None = None
    max_num_waiting: int = 100_000
    num_threads: int | None = None

    def __post_init__(self) -> None:
        check_checkpoint(self.model, self.dtype, self.device)
        check_choice("task", self.task, TASKS)
        if self.pooling is not None:
            check_choice("pooling", self.pooling, POOLERS)
        check_count("max_num_waiting", self.max_num_waiting, minimum=1)
        for name in ("max_batch_tokens", "max_model_len", "num_threads"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), minimum=1)

    @classmethod
    def from_settings(cls, settings: Mapping[str, str]) -> "PoolingConfig":
        """Build a config from text, as environment variables and config.pbtxt parameters bring it.

        Args:
            settings: lower-case field names (no NEREID_ prefix) to text. Empty text is the default.

        Raises:
            ConfigError: an unknown name (the nearest known one is suggested) or a wrong value.
        """
        return from_texts(cls, settings)
