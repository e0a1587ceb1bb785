# SPDX-License-Identifier: Apache-2.0
"""The settings of the engine."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from nereid_backend.errors import ConfigError
from nereid_backend.settings_validation import (
    SIZE_IN_BYTES,
    AutoSwitch,
    CheckpointPath,
    Device,
    Dtype,
    GpuShare,
    LoraAdapters,
    NumProcesses,
    NumThreads,
    check_names,
    from_texts,
    setting_names,
    settings_class,
)

# The default of num_speculative_tokens.
_DEFAULT_DRAFT_TOKENS = 4


@settings_class
class EngineConfig:
    """The settings that an operator can choose for the engine.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    model: CheckpointPath
    """The folder of a Hugging Face checkpoint with safetensors weights, or a GGUF file. A relative
    path in `config.pbtxt` is relative to the model repository."""

    tensor_parallel_size: NumProcesses = 1
    """The number of GPUs (on a CPU, of processes) that compute the model together. Each one has a
    part of the weights and of the KV cache."""

    data_parallel_size: NumProcesses = 1
    """The number of engine processes. Each process has a complete model, its own KV cache and its
    own `tensor_parallel_size` GPUs. On a CPU, the processes share the CPUs."""

    dtype: Dtype = "auto"
    """The data type of the weights and of the KV cache: `auto`, `float32`, `bfloat16` or
    `float16`. `auto` means the data type of the checkpoint, but float32 on a CPU that is slow in
    this data type."""

    weight_dtype: Literal["auto", "int8", "int4", "fp8"] = "auto"
    """The data type in which linear layers store their weights: `auto` (`dtype`), `int8` or `int4`
    (only on CPUs), or `fp8` (only on GPUs, not measured). All but `auto` change the output. With
    `int4`, the output layer stores integers of 6 bits. With `int8` and `int4`, the embedding of a
    text model shares the weight of the output layer or stores integers of 8 bits."""

    device: Device = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`. `auto` means the first GPU, or the CPU if there is no
    GPU."""

    max_model_len: Annotated[int, Field(ge=2)] | None = None
    """The largest number of tokens in the prompt and the output together. By default, the model
    and the memory of the KV cache determine the limit."""

    kv_cache_memory: Annotated[int | str, SIZE_IN_BYTES, Field(gt=0)] | None = None
    """The size of the KV cache, for example `2GiB`. By default, it is a share of the free memory:
    on a CPU a quarter, but at most 4 GiB."""

    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """The data type of the KV cache: `auto`, `int8` or `fp8` (e4m3). `auto` means `dtype`. `int8`
    and `fp8` need about half the memory of bfloat16 and change the output slightly. `fp8` suits
    models with large outliers, and is slow on a CPU."""

    block_size: PositiveInt = 16
    """The number of tokens in one block of the KV cache."""

    max_num_seqs: Annotated[int, Field(gt=0, le=2**14)] = 256
    """The largest number of sequences that run at the same time, at most 16384."""

    max_num_batched_tokens: PositiveInt | None = None
    """The largest number of tokens that the model processes in one step. By default, the limit is
    512 on a CPU and 4096 on a GPU."""

    max_num_waiting: PositiveInt = 4096
    """The largest number of requests in the waiting queue. Further requests are refused."""

    max_step_failures: PositiveInt = 3
    """The number of consecutive failed steps after which the engine process ends. The server then
    starts a new engine process."""

    gpu_memory_utilization: GpuShare = 0.9
    """The share of the GPU's memory for the weights, the KV cache and the activations of one step
    together. The shares of all models on a GPU must not exceed 1."""

    seed: NonNegativeInt = 0
    """The random seed for requests without the field `seed`."""

    num_threads: NumThreads | None = None
    """The number of CPU threads for tensor operations. By default, the engine leaves one CPU to
    the server's other processes."""

    prepack: bool = True
    """Whether the weights of linear layers are rearranged at load, which makes matrix products
    several times as fast on a CPU. If the output layer shares its weight with the embedding, a
    model for images then needs the memory of this weight twice."""

    compile_forward: AutoSwitch = "auto"
    """Whether the forward pass is compiled, once for each model and machine: `true` (before the
    server starts; not tested on GPUs), `false`, or `auto` (in the background, on CPUs, for models
    above 64 MiB)."""

    measure_attention: bool = False
    """Whether attention libraries are measured at load and used where they are faster. Not tested
    on GPUs."""

    cuda_graphs: bool = True
    """Whether CUDA graphs replay decode steps on a GPU. Not tested on GPUs."""

    lora_adapters: LoraAdapters = Field(default_factory=dict)
    """LoRA adapters in PEFT's layout: `name=/path,other=/path`."""

    lora_memory: Annotated[int, SIZE_IN_BYTES] = 512 * 1024 * 1024
    """The memory for LoRA adapters. Adapters that do not fit stay on disk until a request needs
    them. On a GPU, the KV cache leaves this memory free if `lora_adapters` is set."""

    enable_prefix_caching: bool = True
    """Whether a request reuses the KV cache of an earlier request that begins with the same
    tokens."""

    prefix_cache_disk: str | None = None
    """A folder that stores the prefix cache, which then survives a restart. Only the owner can read
    the files."""

    prefix_cache_disk_bytes: Annotated[int | str, SIZE_IN_BYTES, Field(gt=0)] = 10 * 2**30
    """The largest size of all files in `prefix_cache_disk`."""

    async_scheduling: bool = False
    """Whether a step starts before the tokens of the previous step are read, so that a GPU does
    not wait for the host. Not tested on GPUs."""

    sampling_kernel: bool = False
    """Whether one GPU kernel samples all tokens of a step. Its speed has not been measured."""

    speculative_method: Literal["ngram", "draft", "mtp"] | None = None
    """The source of draft tokens: `ngram` (earlier text of the same request), `draft` (the model
    `draft_model`) or `mtp` (MTP layers of the checkpoint). The default is `draft` if `draft_model`
    is set. Otherwise, the default is `ngram` on a CPU without `async_scheduling`. On a GPU, the
    engine then uses no speculative decoding."""

    draft_model: CheckpointPath | None = None
    """The folder of a smaller checkpoint with the same vocabulary. It generates draft tokens, which
    the model verifies."""

    num_speculative_tokens: NonNegativeInt | None = None
    """The largest number of draft tokens for each sequence and step. The default is 4. `0` turns
    speculative decoding off."""

    trust_remote_code: bool = False
    """Whether Python files of the checkpoint may be executed."""

    grammar_threads: NumThreads = 2
    """The largest number of grammars that are compiled at the same time."""

    grammar_timeout: PositiveFloat = 10.0
    """The longest time for compiling one grammar, in seconds. The time in the queue counts."""

    max_grammar_bytes: Annotated[int, SIZE_IN_BYTES, Field(gt=0)] = 256 * 1024
    """The largest size of the text of a grammar, schema or regular expression."""

    grammar_cache_bytes: Annotated[int, SIZE_IN_BYTES] = 64 * 1024 * 1024
    """The size of the cache of compiled grammars."""

    def __post_init__(self) -> None:
        """Raise a ConfigError if settings contradict each other."""
        budget = self.max_num_batched_tokens
        if budget is not None and budget < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens: the value must be at least max_num_seqs "
                f"({self.max_num_seqs}), but it is {budget}. Each running sequence needs one token "
                "in every step. Raise max_num_batched_tokens or lower max_num_seqs."
            )
        if self.data_parallel_size > 1 and self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(
                "device: the value must be auto, cpu or cuda if data_parallel_size is "
                f"{self.data_parallel_size}, but it is {self.device}. To select GPUs, set the "
                "environment variable CUDA_VISIBLE_DEVICES."
            )
        self._check_speculation()

    @classmethod
    def from_settings(cls, settings: Mapping[str, str]) -> Self:
        """Create a configuration from text values, such as environment variables.

        Args:
            settings: text values by field name, in lower case and without the prefix NEREID_. An
                empty text means the field's default.

        Raises:
            ConfigError: a name is unknown or a value is wrong.
        """
        check_names(settings, setting_names(cls))
        return from_texts(cls, settings)

    def _check_speculation(self) -> None:
        """Raise a ConfigError if the settings of speculative decoding contradict each other.

        `speculative_method` selects the source of draft tokens. "draft" needs the setting
        draft_model, and "ngram" and "mtp" use no draft model. If the method is not set, it is
        "draft" if draft_model is set. "mtp" does not support tensor parallelism.
        """
        method = self.speculative_method
        if method == "draft" and self.draft_model is None:
            raise ConfigError(
                "speculative_method: the value draft requires the setting draft_model, which is "
                "not set."
            )
        if method == "mtp" and self.tensor_parallel_size > 1:
            raise ConfigError(
                "speculative_method: the value mtp requires tensor_parallel_size=1, but it is "
                f"{self.tensor_parallel_size}. Use ngram, or use draft with draft_model."
            )
        if method in ("ngram", "mtp") and self.draft_model is not None:
            raise ConfigError(
                f"speculative_method: the value {method} uses no draft model, but draft_model is "
                f"{self.draft_model!r}. Remove draft_model or set speculative_method=draft."
            )

    @property
    def max_draft_tokens(self) -> int:
        """The largest number of draft tokens for each sequence and step; 0 if drafting is off."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        return _DEFAULT_DRAFT_TOKENS

    @property
    def requests_drafts(self) -> bool:
        """Whether the operator has explicitly turned on speculative decoding."""
        settings = (self.speculative_method, self.draft_model, self.num_speculative_tokens)
        return self.max_draft_tokens > 0 and any(setting is not None for setting in settings)

    @property
    def prefix_cache_disk_size(self) -> int:
        """The setting prefix_cache_disk_bytes as a number."""
        size = self.prefix_cache_disk_bytes
        assert not isinstance(size, str), "the constructor converts text to a number"
        return size

    @property
    def kv_cache_bytes(self) -> int | None:
        """The size of the KV cache in bytes; None if the engine determines it while loading."""
        size = self.kv_cache_memory
        assert not isinstance(size, str), "the constructor converts text to a number"
        return size
