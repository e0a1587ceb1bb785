# SPDX-License-Identifier: Apache-2.0
"""The settings of an embedding model or reranker, validated when they are created."""

from collections.abc import Mapping
from dataclasses import dataclass

from nereid_backend.config import check_checkpoint, check_choice, check_count
from nereid_backend.text_settings import from_texts

TASKS = ("auto", "embed", "rerank", "classify")
POOLERS = ("cls", "lasttoken", "mean", "weightedmean", "mean_sqrt_len_tokens", "max", "splade")


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """The settings of a model that embeds, reranks or classifies.

    Attributes:
        model: the folder of a Hugging Face or sentence-transformers checkpoint with safetensors
            weights.
        task: "embed", "rerank", "classify" or "auto". "auto" means the task in the checkpoint's
            files. A generative checkpoint has no task in its files. It can embed (the vector of the
            last token) or rerank (it answers yes or no).
        pooling: the method that turns token vectors into one vector. None means the method in the
            checkpoint's files.
        dtype: the data type of the weights. "auto" means the checkpoint's own type, except that a
            float16 checkpoint runs in float32 on a CPU.
        device: "auto", "cpu", "cuda" or "cuda:N". "auto" means the first GPU, or the CPU if there
            is no GPU.
        max_batch_tokens: the largest number of tokens in one step. A longer input is computed
            alone. None means 1024 on a CPU and 16384 on a GPU.
        max_model_len: the length limit of inputs in tokens. None means the limit in the
            checkpoint's files.
        max_num_waiting: the largest number of waiting inputs. Further inputs are refused.
        num_threads: the number of CPU threads of torch. None means all CPUs that this process may
            use, except one.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
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
        """Return a configuration built from text values, such as environment variables.

        Args:
            settings: text values by field name, in lower case and without a prefix. An empty text
                means the field's default.

        Raises:
            ConfigError: a name is unknown or a value is wrong.
        """
        return from_texts(cls, settings)
