# SPDX-License-Identifier: Apache-2.0
"""The engine's settings: one frozen object, checked when it is made."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from nereid_backend.errors import ConfigError
from nereid_backend.text_settings import from_texts

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "int8", "fp8")
WEIGHT_DTYPES = ("auto", "int8")

_UNITS = {
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
    """Everything an operator may choose about an engine.

    Attributes:
        model: folder of a Hugging Face checkpoint with safetensors weights.
        dtype: of weights and KV cache; "auto" is the checkpoint's own (float32 for a float16
            checkpoint on a CPU, where float16 is slow).
        weight_dtype: "auto" is dtype; "int8" keeps linear layers' weights as 8-bit integers, on
            CPUs, which changes answers a little.
        device: "auto" is the first GPU if there is one, else "cpu"; or "cuda", "cuda:1".
        max_model_len: longest prompt and answer together, in tokens; None is the most that the
            model and the KV cache's memory allow.
        kv_cache_memory: bytes, or text such as "2GiB"; None is a share of the free memory.
        kv_cache_dtype: "auto" is dtype; "int8" and "fp8" (e4m3) take about half of bfloat16's
            memory or a quarter of float32's, and change answers a little. int8 is the nearer one
            for most models; fp8 keeps what is small beside outliers, and is slow on a CPU.
        block_size: tokens in one block of the KV cache.
        max_num_seqs: at most so many requests run at once.
        max_num_batched_tokens: at most so many tokens go through the model in one step; longer
            prompts are cut into chunks. None is 512 on a CPU and 4096 on a GPU.
        max_num_waiting: at most so many requests wait; more are refused.
        max_step_failures: after so many failed steps in a row the engine gives up; the server
            starts another.
        gpu_memory_utilization: share of the GPU's memory for weights and KV cache together.
        seed: of the requests that bring none.
        num_threads: CPU threads for torch; None is all CPUs this process may use but one, which the
            server's own processes need: threads that wait for each other stall when one is late.
        prepack: on a CPU, lay out linear layers' weights for its matrix products at load, which is
            up to several times as fast; an output layer tied to the embedding then takes its memory
            twice. On any device, compute layers that have one input as one product.
        compile_forward: compile the model's forward pass into a library of its own, which saves
            what Python and small operations cost; half a minute and more at the first start, kept
            on disk for the next. A model whose code cannot be compiled, or computes something else
            then, runs as it is. Made for CPUs; on GPUs it has never run.
        cuda_graphs: on a GPU, steps in which every request adds one token are captured, once for
            each shape, and replayed from then on, which saves launching their kernels one by one.
            What cannot be captured, or computes something else then, is launched as before.
        enable_prefix_caching: a prompt's beginning is not computed again while the KV cache has it.
        sampling_kernel: on a GPU, tokens are chosen by one kernel that neither sorts nor makes
            anything wait; the same tokens but where rounding decides. Off, because how fast it is
            has not been measured. Where it differs from the plain way at load, that one is taken.
        async_scheduling: begin the next step before what this one brought has been read, so that a
            GPU does not wait for the host in between. A CPU gains nothing.
        num_speculative_tokens: at most so many next tokens of an answer are guessed from its own
            text each step, and kept where the model agrees; 0 is off.
        trust_remote_code: whether Python files that come with a checkpoint may be run.
        grammar_threads: grammars that are compiled at once.
        grammar_timeout: seconds for one grammar to be compiled, waiting included.
        max_grammar_bytes: longest text of a grammar or schema, in bytes.
        grammar_cache_bytes: of compiled grammars that are kept for the next request.

    Raises:
        ConfigError: a value is of the wrong type or out of range; the message says what would do.
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
                raise ConfigError(f"{field.name}: must be true or false, got {value!r}")
        self._check_grammar_limits()
        if self.kv_cache_memory is not None:
            # Text is turned into bytes here, once, so that every reader finds a number.
            object.__setattr__(self, "kv_cache_memory", parse_bytes(self.kv_cache_memory))
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(
                f"gpu_memory_utilization: must be above 0 and at most 1, got {share!r}"
            )
        budget = self.max_num_batched_tokens
        if budget is not None and budget < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens: must be at least max_num_seqs ({self.max_num_seqs}), so "
                f"that every running request gets its token each step, got {budget}; raise it or "
                "lower max_num_seqs"
            )

    @classmethod
    def from_settings(cls, settings: Mapping[str, str]) -> "EngineConfig":
        """Build a config from text, as environment variables and config.pbtxt parameters bring it.

        Args:
            settings: lower-case field names (no NEREID_ prefix) to text. Empty text is the default.

        Raises:
            ConfigError: an unknown name (the nearest known one is suggested) or a wrong value.
        """
        return from_texts(cls, settings)

    @property
    def kv_cache_bytes(self) -> int | None:
        """kv_cache_memory in bytes, None when it is to be chosen at load."""
        value = self.kv_cache_memory
        assert value is None or isinstance(value, int)
        return value

    def _check_grammar_limits(self) -> None:
        for name in ("grammar_threads", "max_grammar_bytes"):
            check_count(name, getattr(self, name), minimum=1)
        check_count("grammar_cache_bytes", self.grammar_cache_bytes, minimum=0)
        limit = self.grammar_timeout
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
            raise ConfigError(f"grammar_timeout: must be more than 0 seconds, got {limit!r}")

    def _check_names(self) -> None:
        check_checkpoint(self.model, self.dtype, self.device)
        check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        check_choice(
            "weight_dtype",
            self.weight_dtype,
            WEIGHT_DTYPES,
            hint=" (a checkpoint that is quantised already is loaded as it is)",
        )


def parse_bytes(value: int | str) -> int:
    """Read a size of memory: a number of bytes, or text such as "512MiB", "2 GiB", "1.5GB".

    Raises:
        ConfigError: not a positive size.
    """
    problem = ConfigError(
        f'kv_cache_memory: must be a positive number of bytes or text such as "2GiB", got {value!r}'
    )
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise problem
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(value).strip().lower())
    if match is None or match[2] not in _UNITS:
        raise problem
    size = int(float(match[1]) * _UNITS[match[2]])
    if size <= 0:
        raise problem
    return size


def check_checkpoint(model: object, dtype: object, device: object) -> None:
    """Check what every model has.

    Raises:
        ConfigError: a value is wrong.
    """
    if not isinstance(model, str) or not model:
        raise ConfigError(f"model: must be the path of a checkpoint, got {model!r}")
    check_choice("dtype", dtype, DTYPES)
    if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ConfigError(f"device: must be auto, cpu, cuda or cuda:N, got {device!r}")


def check_choice(name: str, value: object, choices: Sequence[str], *, hint: str = "") -> None:
    """Check a setting that is one of some words.

    Raises:
        ConfigError: it is none of them; the hint ends the message.
    """
    if value not in choices:
        raise ConfigError(f"{name}: must be one of {', '.join(choices)}, got {value!r}{hint}")


def check_count(name: str, value: object, *, minimum: int) -> None:
    """Check a setting that counts something.

    Raises:
        ConfigError: it is no integer, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name}: must be an integer of at least {minimum}, got {value!r}")
