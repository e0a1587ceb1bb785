# SPDX-License-Identifier: Apache-2.0
"""The settings of an embedding model or reranker: one frozen object, checked when it is made."""

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields

from nereid_backend.config import DTYPES, read_setting, unknown_setting
from nereid_backend.errors import ConfigError

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
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model: must be the path of a checkpoint, got {self.model!r}")
        if self.task not in TASKS:
            raise ConfigError(f"task: must be one of {', '.join(TASKS)}, got {self.task!r}")
        if self.pooling is not None and self.pooling not in POOLERS:
            raise ConfigError(f"pooling: must be one of {', '.join(POOLERS)}, got {self.pooling!r}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype: must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if not isinstance(self.device, str) or not re.fullmatch(
            r"auto|cpu|cuda(:\d+)?", self.device
        ):
            raise ConfigError(f"device: must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        for name in ("max_batch_tokens", "max_model_len", "max_num_waiting", "num_threads"):
            value = getattr(self, name)
            if value is None and name != "max_num_waiting":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}: must be an integer of at least 1, got {value!r}")

    @classmethod
    def from_settings(cls, settings: Mapping[str, str]) -> "PoolingConfig":
        """Build a config from text, as environment variables and config.pbtxt parameters bring it.

        Args:
            settings: lower-case field names (no NEREID_ prefix) to text. Empty text is the default.

        Raises:
            ConfigError: an unknown name (the nearest known one is suggested) or a wrong value.
        """
        known = {field.name: field for field in fields(cls)}
        for name in settings:
            if name not in known:
                raise ConfigError(unknown_setting(name, list(known)))
        values = {
            name: read_setting(name, str(known[name].type), text.strip())
            for name, text in settings.items()
            if text.strip()
        }
        missing = [n for n, f in known.items() if f.default is MISSING and n not in values]
        if missing:
            raise ConfigError(f"{missing[0]}: must be set; it has no default")
        return cls(**values)
