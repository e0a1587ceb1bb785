# SPDX-License-Identifier: Apache-2.0
"""The settings of the engine: one frozen dataclass, which is validated when it is created."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from nereid_backend.errors import ConfigError
from nereid_backend.text_settings import from_texts

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "int8", "fp8")
WEIGHT_DTYPES = ("auto", "int8")

_BYTES_PER_UNIT = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings that an operator can choose for the engine.

    Attributes:
        model: the folder of a Hugging Face checkpoint with safetensors weights.
        dtype: the data type of the weights and of the KV cache. "auto" means the checkpoint's own
            type, except that a float16 checkpoint runs in float32 on a CPU, where float16 is slow.
        weight_dtype: the data type in which linear layers store their weights. "auto" means dtype.
            "int8" works only on CPUs and changes the output slightly.
        device: "auto", "cpu", "cuda" or "cuda:N". "auto" means the first GPU, or the CPU if there
            is no GPU.
        max_model_len: the largest number of tokens of a prompt and its output together. None means
            the most that the model and the memory of the KV cache allow.
        kv_cache_memory: the size of the KV cache, in bytes or as text such as "2GiB". None means a
            share of the free memory.
        kv_cache_dtype: the data type of the KV cache. "auto" means dtype. "int8" and "fp8" (e4m3)
            need about half the memory of bfloat16, or a quarter of float32, and change the output
            slightly. int8 is more accurate for most models. fp8 is more accurate for models with
            large outliers, and is slow on a CPU.
        block_size: the number of tokens in one block of the KV cache.
        max_num_seqs: the largest number of sequences that run at the same time.
        max_num_batched_tokens: the largest number of tokens that the model processes in one step.
            Longer prompts are processed in chunks. None means 512 on a CPU and 4096 on a GPU.
        max_num_waiting: the largest number of requests in the waiting queue. Further requests are
            refused.
        max_step_failures: the number of consecutive failed steps after which the engine process
            ends. The server then starts a new engine process.
        gpu_memory_utilization: the share of the GPU's memory for the weights, the KV cache and the
            activations of one step together.
        seed: the random seed for requests that have no seed.
        num_threads: the number of CPU threads of torch. None means all CPUs that this process may
            use, except one. The server's other processes need that CPU: torch's threads wait for
            each other, so one delayed thread delays a whole step.
        prepack: whether the weights of linear layers are rearranged at load. On a CPU, that makes
            matrix products up to several times as fast, but an output layer that shares its
            weights with the embedding then needs its memory twice. On every device, linear layers
            with the same input are computed as one product.
        compile_forward: whether the model's forward pass is compiled to a library, which avoids the
            cost of Python and of small operations. The first start takes at least half a minute
            longer. The library is cached on disk for later starts. If the model cannot be compiled,
            or the compiled model computes something else, the model runs uncompiled. This is made
            for CPUs and has never run on a GPU.
        cuda_graphs: whether decode steps on a GPU are captured once for each shape and then
            replayed, so that kernels are not launched one by one. A step that cannot be captured,
            or that computes something else when replayed, runs without a graph.
        enable_prefix_caching: whether requests reuse the KV cache of an earlier prompt that begins
            with the same tokens.
        sampling_kernel: whether one GPU kernel samples all tokens, without sorting and without
            waiting for the host. The tokens are the same except for rounding. The default is false,
            because the kernel's speed has not been measured. If the kernel's results differ from
            the reference at load, the reference is used.
        async_scheduling: whether a step starts before the tokens of the previous step are read, so
            that the GPU does not wait for the host. A CPU gains nothing.
        num_speculative_tokens: the largest number of draft tokens for each sequence and step. Draft
            tokens are copied from earlier text of the same request and kept if the model agrees. 0
            turns speculative decoding off.
        trust_remote_code: whether Python files of the checkpoint may be executed.
        grammar_threads: the largest number of grammars that are compiled at the same time.
        grammar_timeout: the time limit for compiling one grammar, in seconds, including waiting.
        max_grammar_bytes: the largest size of a grammar's or schema's text, in bytes.
        grammar_cache_bytes: the size of the cache of compiled grammars, in bytes.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    model: str
    dtype: str = "auto"
    weight_dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    kv_cache_memory: int | str | None = None
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    max_num_waiting: int = 4096
    max_step_failures: int = 3
    gpu_memory_utilization: float = 0.9
    seed: int = 0
    num_threads: int | None = None
    prepack: bool = True
    compile_forward: bool = False
    cuda_graphs: bool = True
    enable_prefix_caching: bool = True
    async_scheduling: bool = False
    sampling_kernel: bool = False
    num_speculative_tokens: int = 0
    trust_remote_code: bool = False
    grammar_threads: int = 2
    grammar_timeout: float = 10.0
    max_grammar_bytes: int = 256 * 1024
    grammar_cache_bytes: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        self._check_names()
        for name in ("block_size", "max_num_seqs", "max_num_waiting", "max_step_failures"):
            check_count(name, getattr(self, name), minimum=1)
        for name in ("max_model_len", "max_num_batched_tokens", "num_threads"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), minimum=2 if name == "max_model_len" else 1)
        for name in ("seed", "num_speculative_tokens"):
            check_count(name, getattr(self, name), minimum=0)
        for field in fields(self):
            if field.type is bool and not isinstance(getattr(self, field.name), bool):
                value = getattr(self, field.name)
                raise ConfigError(
                    f"{field.name}: the value must be true or false, but it is {value!r}."
                )
        self._check_grammar_limits()
        if self.kv_cache_memory is not None:
            # Convert text such as "2GiB" to bytes once, so that kv_cache_memory is always a number.
            object.__setattr__(self, "kv_cache_memory", parse_bytes(self.kv_cache_memory))
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(
                "gpu_memory_utilization: the value must be greater than 0 and at most 1, but it is "
                f"{share!r}."
            )
        budget = self.max_num_batched_tokens
        if budget is not None and budget < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens: the value must be at least max_num_seqs "
                f"({self.max_num_seqs}), because each running sequence needs one token in every "
                f"step, but it is {budget}. Raise max_num_batched_tokens or lower max_num_seqs."
            )

    @classmethod
    def from_settings(cls, settings: Mapping[str, str]) -> "EngineConfig":
        """Return a configuration built from text values, such as environment variables.

        Args:
            settings: text values by field name, in lower case and without the prefix NEREID_. An
                empty text means the field's default.

        Raises:
            ConfigError: a name is unknown or a value is wrong.
        """
        return from_texts(cls, settings)

    @property
    def kv_cache_bytes(self) -> int | None:
        """The size of the KV cache in bytes; None if it is determined at load."""
        value = self.kv_cache_memory
        assert value is None or isinstance(value, int)
        return value

    def _check_grammar_limits(self) -> None:
        for name in ("grammar_threads", "max_grammar_bytes"):
            check_count(name, getattr(self, name), minimum=1)
        check_count("grammar_cache_bytes", self.grammar_cache_bytes, minimum=0)
        limit = self.grammar_timeout
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
            raise ConfigError(
                f"grammar_timeout: the value must be more than 0 seconds, but it is {limit!r}."
            )

    def _check_names(self) -> None:
        check_checkpoint(self.model, self.dtype, self.device)
        check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        check_choice(
            "weight_dtype",
            self.weight_dtype,
            WEIGHT_DTYPES,
            hint=" A checkpoint whose weights are already quantised needs the value auto.",
        )


def parse_bytes(value: int | str) -> int:
    """Return a memory size in bytes.

    Examples: 4096 and "4096" return 4096, "512MiB" returns 536870912, "1.5GB" returns 1500000000.

    Raises:
        ConfigError: the value is not a positive size.
    """
    problem = ConfigError(
        'kv_cache_memory: the value must be a positive number of bytes or text such as "2GiB", but '
        f"it is {value!r}."
    )
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise problem
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(value).strip().lower())
    if match is None or match[2] not in _BYTES_PER_UNIT:
        raise problem
    size = int(float(match[1]) * _BYTES_PER_UNIT[match[2]])
    if size <= 0:
        raise problem
    return size


def check_checkpoint(model: object, dtype: object, device: object) -> None:
    """Validate the settings `model`, `dtype` and `device`.

    Raises:
        ConfigError: a value is wrong.
    """
    if not isinstance(model, str) or not model:
        raise ConfigError(
            f"model: the value must be the path of a checkpoint, but it is {model!r}."
        )
    check_choice("dtype", dtype, DTYPES)
    if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ConfigError(
            f"device: the value must be auto, cpu, cuda or cuda:N, but it is {device!r}."
        )


def check_choice(name: str, value: object, choices: Sequence[str], *, hint: str = "") -> None:
    """Raise a ConfigError if `value` is not one of `choices`.

    `hint` is a sentence that is added to the message, with a space before it.
    """
    if value not in choices:
        raise ConfigError(
            f"{name}: the value must be one of {', '.join(choices)}, but it is {value!r}.{hint}"
        )


def check_count(name: str, value: object, *, minimum: int) -> None:
    """Raise a ConfigError if `value` is not an integer of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(
            f"{name}: the value must be an integer of at least {minimum}, but it is {value!r}."
        )
