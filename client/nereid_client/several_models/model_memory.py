"""Estimates the memory of a model from its settings and from the headers of its weight files.

The estimate contains the weights and the KV cache. It does not contain the activations of a step
and the libraries.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from nereid_client.settings import NumBytes, SettingsError
from nereid_client.supervise.weight_files import model_folder, safetensors_files, tensors_of

_GIB = 1 << 30
_MAX_DEFAULT_KV_CACHE = 4 * _GIB
# Maps each value of the setting `dtype`, except "auto", to the size of one weight in bytes.
_DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
# Maps each value of `weight_dtype` to the average number of bytes per weight, including the scales.
_QUANTIZED_BYTES = {"int8": 1.04, "int4": 0.63, "fp8": 1.01}
# Weights of these data types are converted to the data type in the setting `dtype`, or are
# quantized. Other numbers, such as the integers of a quantized checkpoint, stay unchanged.
_CONVERTED_TYPES = {"F64", "F32", "F16", "BF16"}
# With `dtype` "auto", a model on a CPU converts float16 weights to float32.
_FLOAT16_BYTES_ON_CPU = _DTYPE_BYTES["float32"]


@dataclass(frozen=True)
class ModelMemory:
    """The estimated memory of a model, in bytes.

    Attributes:
        weights: the size of the weights of the model and of its draft model.
        kv_cache: the size of the KV cache. 0 for embedding models and rerankers.
    """

    weights: int
    kv_cache: int

    @property
    def total(self) -> int:
        """The total memory of the model."""
        return self.weights + self.kv_cache

    def describe(self) -> str:
        """Return the size of the memory as a text for messages.

        Example: "3 GiB (weights 2 GiB, KV cache 1 GiB)".
        """
        if not self.kv_cache:
            return format_bytes(self.total)
        parts = f"weights {format_bytes(self.weights)}, KV cache {format_bytes(self.kv_cache)}"
        return f"{format_bytes(self.total)} ({parts})"


def estimate_memory(folder: Path, settings: Mapping[str, str]) -> ModelMemory:
    """Estimate the memory of a model, including its draft model and all of its replicas.

    Args:
        folder: the folder of the checkpoint.
        settings: the settings of the model. If kv_cache_memory is not set, the size of the KV cache
            is 0.

    Raises: SettingsError if kv_cache_memory is not a size, or if draft_model begins with "~" and
        the home folder is unknown.
    """
    weights = _weight_bytes(folder, settings)
    draft_model = settings.get("draft_model")
    if draft_model:
        # The settings `dtype`, `weight_dtype` and `device` also apply to the draft model.
        weights += _weight_bytes(_expanded("draft_model", draft_model), settings)
    kv_cache_memory = settings.get("kv_cache_memory")
    kv_cache = parse_size("kv_cache_memory", kv_cache_memory) if kv_cache_memory else 0
    text = settings.get("data_parallel_size", "1")
    num_replicas = int(text) if text.isdecimal() else 1  # the model rejects an invalid value
    return ModelMemory(num_replicas * weights, num_replicas * kv_cache)


def default_kv_cache(budget: int) -> int:
    """Return the default KV cache size in bytes, for models without the setting kv_cache_memory.

    The size is a quarter of the memory budget, but at most 4 GiB.
    """
    return min(budget // 4, _MAX_DEFAULT_KV_CACHE)


def parse_size(name: str, text: object) -> int:
    """Return a number of bytes. Example: "2GiB" returns 2147483648.

    Raises: SettingsError that names the setting `name` if the text is not a positive size.
    """
    try:
        size = int(TypeAdapter(NumBytes).validate_python(text))
    except ValidationError:
        size = 0
    if size <= 0:
        raise SettingsError(
            f'{name} must be a positive size in bytes, for example "12GiB", but it is {text!r}.'
        )
    return size


def format_bytes(size: int) -> str:
    """Return a size as text. Example: 1610612736 returns "1.5 GiB"."""
    if size < _GIB:
        return f"{size / (1 << 20):.0f} MiB"
    return f"{size / _GIB:.3g} GiB"


def _expanded(name: str, path: str) -> Path:
    """Return a path, in which a "~" at the beginning is replaced by the home folder.

    Raises: SettingsError if the home folder is unknown. The error names the setting `name`.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise SettingsError(
            f"{name}: the path {path} begins with ~, but the home folder is unknown. Give a path "
            "that does not begin with ~."
        ) from None


def _weight_bytes(folder: Path, settings: Mapping[str, str]) -> int:
    """Return the size of the weights in memory, in bytes.

    For formats other than safetensors, return the size of the files, which is about the same.
    """
    return int(sum(_file_bytes(path, settings) for path in _weight_files(folder)))


def _weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a checkpoint. If it has safetensors files, return only these."""
    if folder.is_file():
        return [folder]
    folder = model_folder(folder)
    files = safetensors_files(folder)
    return files or [*folder.glob("*.gguf"), *folder.glob("pytorch_model*.bin")]


def _file_bytes(path: Path, settings: Mapping[str, str]) -> float:
    """Return how many bytes of memory the weights of one file need.

    If the header of the file is damaged, return the size of the file. The loading of the model will
    then fail with an error.
    """
    if path.suffix == ".safetensors":
        with suppress(KeyError, TypeError, ValueError):
            return sum(_tensor_bytes(tensor, settings) for tensor in tensors_of(path))
    return path.stat().st_size


def _tensor_bytes(tensor: Mapping[str, Any], settings: Mapping[str, str]) -> float:
    """Return how many bytes of memory a tensor needs."""
    bytes_per_number = _converted_bytes(tensor["dtype"], len(tensor["shape"]), settings)
    if bytes_per_number is None:  # the tensor has the same size in memory as in the file
        start, end = tensor["data_offsets"]
        return float(end - start)
    num_numbers: int = prod(tensor["shape"])
    return num_numbers * bytes_per_number


def _converted_bytes(
    stored_type: str, num_dimensions: int, settings: Mapping[str, str]
) -> float | None:
    """Return how many bytes each number of a tensor needs after the model has converted the tensor.

    Return None if the model does not convert the tensor.

    Example: numbers with the type "F32" in the file, and {"dtype": "bfloat16"}, return 2.0.
    """
    if stored_type not in _CONVERTED_TYPES:  # for example integers, which stay unchanged
        return None
    quantized_bytes = _QUANTIZED_BYTES.get(settings.get("weight_dtype", ""))
    if quantized_bytes is not None and num_dimensions > 1:  # not a bias or a norm
        return quantized_bytes
    dtype = settings.get("dtype", "auto")
    if dtype == "auto":
        # If the setting `device` is missing, the model may run on a CPU, so the larger size is
        # assumed.
        may_run_on_cpu = not settings.get("device", "").startswith("cuda")
        may_convert = may_run_on_cpu and stored_type == "F16"
        return _FLOAT16_BYTES_ON_CPU if may_convert else None
    return _DTYPE_BYTES.get(dtype)  # with an unknown `dtype`, the model does not start
