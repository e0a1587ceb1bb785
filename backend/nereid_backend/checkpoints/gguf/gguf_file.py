# SPDX-License-Identifier: Apache-2.0
"""Reads the metadata and the positions of the tensors from the header of a GGUF file.

Source: docs/gguf.md in the repository of ggml, version 3 of the format. All numbers are
little-endian:

    "GGUF", version uint32, number of tensors uint64, number of metadata values uint64
    each metadata value: name, type uint32, value
    each tensor: name, number of dimensions uint32, dimensions uint64, type uint32, offset uint64
    padding, then the numbers of the tensors

Every length in the header is checked before memory is allocated.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from nereid_backend.errors import ModelError, UnsupportedModelError

_MAGIC = b"GGUF"  # the first bytes of every GGUF file
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
# The limits on the number of strings and on the size of a header. A larger header is refused,
# because a malicious header could use all memory. The vocabularies of real models have fewer
# strings.
_MAX_STRINGS = 2**22
_MAX_HEADER_BYTES = 2**29
# The type numbers of strings and arrays in GGUF. Values of these types have no fixed size.
_STRING, _ARRAY = 8, 9
# The format characters of Python's `struct` module for the integers in the header.
_UINT32, _UINT64 = "I", "Q"
# A string begins with its length, which has 8 bytes.
_STRING_LENGTH_BYTES = 8
# In the header, a metadata value has at least 13 bytes, including its name and its type. The
# description of a tensor has at least 24 bytes.
_MIN_VALUE_BYTES = 13
_MIN_TENSOR_BYTES = 24
# The types that the gguf library cannot dequantise.
_UNSUPPORTED_TYPES = ("Q1_0", "Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64")
# llama.cpp has added some types and removed others. The gguf library does not know the numbers of
# these types, but the numbers are not above `_MAX_TYPE`. A larger number means that the file is
# probably damaged.
_MAX_TYPE = 99
# If the metadata contains no alignment, each tensor starts at a multiple of `_DEFAULT_ALIGNMENT`
# bytes.
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 2**16
# Maps the numbers of the metadata types with a fixed size to format characters of Python's `struct`
# module. Example: the type number 6 means float32, which has the format character "f".
_FORMATS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The name, shape, number type and position of a tensor in a GGUF file.

    Attributes:
        name: the name of the tensor.
        shape: the shape, in the order of torch: adjacent numbers in the file are adjacent in the
            last dimension.
        kind: the type of the numbers, such as Q4_K.
        start: the offset of the first byte from the beginning of the file.
        num_bytes: the size of the tensor in bytes.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a GGUF file.

    Attributes:
        path: the path of the file.
        metadata: maps the name of a metadata value to the value. Arrays are lists.
        tensors: maps the name of a tensor to the tensor.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """The architecture, such as "llama"."""
        return str(self.metadata.get("general.architecture", ""))


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file: the metadata, and the descriptions of the tensors.

    The numbers of the tensors are not read.

    Raises:
        ModelError: if the file is missing, incomplete or damaged.
        UnsupportedModelError: if a tensor has a type that is not supported.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
            metadata, tensors = _read_header(content)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error}).") from error
    except _UnsupportedTypeError as error:
        raise UnsupportedModelError(
            f"{path}: {error}. Use a GGUF file of another type, such as Q4_K_M, or the model's "
            "safetensors files."
        ) from error
    except (ValueError, struct.error) as error:
        raise ModelError(
            f"{path} is incomplete or damaged, or it is not a GGUF file: {error}. Download the "
            "file again."
        ) from error
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in tensors})


class _UnsupportedTypeError(Exception):
    """Raised if a tensor has a type that is not supported."""


def _read_header(content: mmap.mmap) -> tuple[dict[str, Any], list[GgufTensor]]:
    """Return the metadata of a GGUF file, and the descriptions of its tensors.

    The file contains, in this order: "GGUF", the version, the number of tensors, the number of
    metadata values, the metadata values, the descriptions of the tensors, and the tensors. Each
    method call of `reader` reads the next value in the file. A description contains the name, the
    shape, the type and the position of a tensor.

    Raises:
        ValueError, struct.error: if the file is damaged.
    """
    if content[: len(_MAGIC)] != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    reader = _Reader(content)
    version = reader.number(_UINT32)
    if version not in _VERSIONS:
        raise ValueError(f"the version is {version}, but only the versions 2 and 3 are supported")
    num_tensors = reader.number(_UINT64)
    num_values = reader.number(_UINT64)
    # Check that the file is large enough for `num_values` values and `num_tensors` tensors. In a
    # damaged file, these numbers may be so large that the loops below would take very long.
    reader.check(num_values * _MIN_VALUE_BYTES + num_tensors * _MIN_TENSOR_BYTES)
    metadata = {}
    for _ in range(num_values):
        name = reader.string()
        kind = reader.number(_UINT32)
        metadata[name] = reader.value(kind)
    entries = [reader.tensor() for _ in range(num_tensors)]
    # The data of the tensors begins at the next multiple of the alignment.
    padding = -reader.place % _read_alignment(metadata)
    tensors = [_locate_tensor(entry, data_start=reader.place + padding) for entry in entries]
    _check_positions(tensors, len(content))
    _check_names(tensors)
    return metadata, tensors


def _read_alignment(metadata: Mapping[str, Any]) -> int:
    """Return the alignment in bytes. The position of each tensor is a multiple of the alignment.

    Raises:
        ValueError: if the number in the metadata is not valid.
    """
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT:
        raise ValueError(
            f"general.alignment must be a number from 1 to {_MAX_ALIGNMENT}, but it is {alignment}"
        )
    return alignment


class _TensorEntry(NamedTuple):
    """The description of a tensor in the header of a GGUF file.

    Attributes:
        name: the name of the tensor.
        shape: the shape, in the order of torch.
        kind: the number of the type, see `GGMLQuantizationType`.
        offset: the offset of the first byte from the position of the first tensor in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class _Reader:
    """Reads the values of a header one after the other.

    Attributes:
        place: the offset of the next byte.
    """

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._num_strings = 0
        self.place = len(_MAGIC)

    def check(self, num_bytes: int) -> None:
        """Raise a ValueError if the next `num_bytes` bytes reach beyond the end of the file.

        Also raise a ValueError if they reach beyond the largest size of a header,
        `_MAX_HEADER_BYTES`.
        """
        end = self.place + num_bytes
        if end > len(self._content):
            raise ValueError(
                f"a value ends at byte {end}, but the file has only {len(self._content)} bytes"
            )
        if end > _MAX_HEADER_BYTES:
            raise ValueError(f"the header has more than {_MAX_HEADER_BYTES} bytes")

    def number(self, code: str) -> Any:  # noqa: ANN401 - an integer, a float or a boolean
        """Return the next number. `code` is the number's `struct` format character, such as "I"."""
        return self._numbers(code, 1)[0]

    def string(self) -> str:
        """Return the next string."""
        length = self.number(_UINT64)
        self.check(length)
        self._num_strings += 1
        if self._num_strings > _MAX_STRINGS:
            raise ValueError(f"the header has more than {_MAX_STRINGS} strings")
        text = self._content[self.place : self.place + length].decode("utf-8", errors="replace")
        self.place += length
        return text

    def value(self, kind: int) -> Any:  # noqa: ANN401 - a number, a string or a list
        """Return the next metadata value. `kind` is the number that GGUF uses for the value's type.

        `_FORMATS` maps the types of plain numbers to their struct formats.

        Raises:
            ValueError, struct.error: if the value is damaged.
        """
        if kind in _FORMATS:
            return self.number(_FORMATS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        raise ValueError(f"a metadata value has the unknown type {kind}")

    def _array(self) -> list[Any]:
        """Return the next array. The file contains its element type, length and elements."""
        element_kind = self.number(_UINT32)
        num_elements = self.number(_UINT64)
        if element_kind in _FORMATS:
            return list(self._numbers(_FORMATS[element_kind], num_elements))
        if element_kind != _STRING:
            raise ValueError(f"an array has elements of the unknown type {element_kind}")
        # Each string has at least 8 bytes, because a string begins with its length.
        self.check(num_elements * _STRING_LENGTH_BYTES)
        return [self.string() for _ in range(num_elements)]

    def tensor(self) -> _TensorEntry:
        """Return the next description of a tensor: its name, shape, type and position.

        Raises:
            ValueError, struct.error: if the description is damaged.
        """
        name = self.string()
        num_dimensions = self.number(_UINT32)
        if num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(
                f"the tensor {name} has {num_dimensions} dimensions, but at most {_MAX_DIMENSIONS} "
                "are supported"
            )
        dimensions = self._numbers(_UINT64, num_dimensions)
        kind = self.number(_UINT32)
        offset = self.number(_UINT64)
        # The file stores the dimensions of the shape in reverse order.
        return _TensorEntry(name, tuple(reversed(dimensions)), kind, offset)

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{code}") * count
        self.check(size)
        numbers = struct.unpack_from(f"<{count}{code}", self._content, self.place)
        self.place += size
        return numbers


def _locate_tensor(entry: _TensorEntry, data_start: int) -> GgufTensor:
    """Create the description of a tensor, with its size and its position in the file.

    The numbers of a tensor are stored in blocks. Example: a block of the type Q4_0 contains 32
    numbers in 18 bytes.

    Args:
        entry: the description of the tensor in the header.
        data_start: the position of the first tensor in the file.

    Raises:
        ValueError: if the type is unknown, or if a row cannot be divided into whole blocks.
        _UnsupportedTypeError: if the type is not supported.
    """
    kind = _type_of(entry)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if not entry.shape or entry.shape[-1] % block_size:
        raise ValueError(
            f"the rows of the tensor {entry.name}, which has the shape {entry.shape}, cannot be "
            f"divided into blocks of {block_size} numbers"
        )
    num_blocks = prod(entry.shape) // block_size
    return GgufTensor(
        name=entry.name,
        shape=entry.shape,
        kind=kind,
        start=data_start + entry.offset,
        num_bytes=num_blocks * block_bytes,
    )


def _type_of(entry: _TensorEntry) -> GGMLQuantizationType:
    """Return the type of a tensor's numbers.

    Raises:
        _UnsupportedTypeError: if the type is not supported.
        ValueError: if the number of the type is so large that the file is probably damaged.
    """
    if entry.kind > _MAX_TYPE:
        raise ValueError(f"the tensor {entry.name} has the impossible type number {entry.kind}")
    try:
        kind = GGMLQuantizationType(entry.kind)
    except ValueError:
        raise _UnsupportedTypeError(
            f"the type number {entry.kind} of the tensor {entry.name} is not supported"
        ) from None
    if kind.name in _UNSUPPORTED_TYPES:
        raise _UnsupportedTypeError(
            f"the type {kind.name} of the tensor {entry.name} is not supported"
        )
    return kind


def _check_positions(tensors: list[GgufTensor], file_bytes: int) -> None:
    """Check that each tensor is inside the file, and that no two tensors overlap.

    Args:
        tensors: the tensors of the file, in any order.
        file_bytes: the size of the file in bytes.

    Raises:
        ValueError: if a tensor ends after the end of the file, or overlaps another tensor.
    """
    by_position = sorted(tensors, key=lambda tensor: tensor.start)
    previous_end = 0
    for tensor in by_position:
        if tensor.start < previous_end:
            raise ValueError(f"the tensor {tensor.name} overlaps another tensor")
        end = tensor.start + tensor.num_bytes
        if end > file_bytes:
            raise ValueError(
                f"the tensor {tensor.name} ends at byte {end}, but the file has only {file_bytes} "
                "bytes"
            )
        previous_end = end


def _check_names(tensors: list[GgufTensor]) -> None:
    """Raise a ValueError if two tensors have the same name."""
    different_names = {tensor.name for tensor in tensors}
    if len(different_names) < len(tensors):
        raise ValueError("two tensors have the same name")
