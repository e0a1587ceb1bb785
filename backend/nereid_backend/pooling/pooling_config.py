# SPDX-License-Identifier: Apache-2.0
"""The settings of an embedding model or reranker."""

from typing import Literal, get_args

from pydantic import PositiveInt

from nereid_backend.settings_validation import (
    CheckpointPath,
    Device,
    Dtype,
    GpuShare,
    NumThreads,
    settings_class,
)

_Pooler = Literal[
    "cls", "lasttoken", "mean", "weightedmean", "mean_sqrt_len_tokens", "max", "splade"
]
POOLERS: tuple[str, ...] = get_args(_Pooler)


@settings_class
class PoolingConfig:
    """The settings of a model that embeds, reranks or classifies.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    model: CheckpointPath
    """The folder of a Hugging Face or sentence-transformers checkpoint with safetensors weights.
    `none` disables the model."""

    task: Literal["auto", "embed", "rerank", "classify"] = "auto"
    """`auto`, `embed`, `rerank` or `classify`. `auto` means the task in the checkpoint's files,
    which a generative checkpoint does not have."""

    pooling: _Pooler | None = None
    """How the token vectors of a text become one vector: `cls`, `lasttoken`, `mean`,
    `weightedmean`, `mean_sqrt_len_tokens`, `max` or `splade`. By default, the checkpoint's files
    determine the method."""

    dtype: Dtype = "auto"
    """The data type of the weights: `auto`, `float32`, `bfloat16` or `float16`. `auto` means the
    data type of the checkpoint, but float32 for a float16 checkpoint on a CPU."""

    weight_dtype: Literal["auto", "int8", "int4"] = "auto"
    """The data type in which linear layers store their weights: `auto` (`dtype`), or `int8` or
    `int4` (only on CPUs), which change the output."""

    device: Device = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`. `auto` means the first GPU, or the CPU if there is no
    GPU."""

    gpu_memory_utilization: GpuShare = 0.05
    """The largest share of the GPU's memory that the model may use."""

    max_batch_tokens: PositiveInt | None = None
    """The largest number of tokens in one step. By default, the limit is 1024 on a CPU and 16384
    on a GPU. A longer input is computed alone."""

    max_model_len: PositiveInt | None = None
    """The largest number of tokens in one input. By default, the checkpoint's files
    determine the limit."""

    max_num_waiting: PositiveInt | None = None
    """The largest number of waiting inputs. Further inputs are refused. By default, as many inputs
    of the largest size as 1 GiB can hold, but at least 2048 and at most 16384."""

    num_threads: NumThreads | None = None
    """The number of CPU threads for tensor operations. By default, the model uses
    all CPUs but one."""
