# SPDX-License-Identifier: Apache-2.0
"""A request's tensors -> a job: what is sent is checked, and each error names its input."""

import base64
import binascii
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nereid_backend.errors import RequestError
from nereid_backend.serving import pooling_tensor_names as names

EMBEDDING_OPTIONS: Mapping[str, type] = {
    "kind": str,
    "dimensions": int,
    "normalize": bool,
    "prompt_name": str,
    "prompt": str,
    "truncate": bool,
}
RERANK_OPTIONS: Mapping[str, type] = {
    "activation": str,
    "instruction": str,
    "truncate": bool,
}
_WORDS = {str: "text", int: "an integer", bool: "true or false"}


def options(text: str | None, known: Mapping[str, type]) -> dict[str, Any]:
    """The JSON object in `options`; null stands for the default.

    Raises:
        RequestError: an unknown name or a value of the wrong type.
    """
    if not text:
        return {}
    try:
        values = json.loads(text)
    except ValueError as error:
        raise RequestError(f"{names.OPTIONS}: is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise RequestError(f"{names.OPTIONS}: must be a JSON object, got {text[:80]}")
    for name, value in values.items():
        if name not in known:
            raise RequestError(
                f"{names.OPTIONS}: {name!r} is not one of {', '.join(sorted(known))}"
            )
        if value is not None and type(value) is not known[name]:
            raise RequestError(f"{name}: must be {_WORDS[known[name]]}, got {json.dumps(value)}")
    return {name: value for name, value in values.items() if value is not None}


def texts(values: Iterable[Any], field: str) -> list[str]:
    """STRING elements as text.

    Raises:
        RequestError: one is not UTF-8.
    """
    decoded = []
    for index, value in enumerate(values):
        try:
            decoded.append(value if isinstance(value, str) else value.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise RequestError(f"{field}: element {index} is not UTF-8: {error}") from None
    return decoded


def id_lists(ids: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32] | None) -> list[list[int]]:
    """Token ids, one after the other, cut into inputs.

    Args:
        ids: of all inputs [sum of lengths].
        lengths: of each input [n]; None: one input.

    Raises:
        RequestError: the lengths do not add up, or one is below 1.
    """
    if lengths is None:
        return [ids.tolist()]
    if lengths.size and int(lengths.min()) < 1:
        raise RequestError(f"{names.INPUT_LENGTHS}: each must be at least 1, got {lengths.min()}")
    total = int(lengths.sum())
    if total != ids.size:
        raise RequestError(
            f"{names.INPUT_LENGTHS}: they add up to {total}, but {names.INPUT_IDS} has {ids.size}"
        )
    ends = np.cumsum(lengths)[:-1]
    return [part.tolist() for part in np.split(ids, ends)] if lengths.size else []


def part(text: str, index: int) -> tuple[str, Any]:
    """One element of `parts`: JSON with either a text or an image.

    Returns:
        The field of PoolingItem and its value: ("text", str) or ("image", bytes).

    Raises:
        RequestError: it is neither, or the image is no base64.
    """
    where = f"{names.PARTS}: element {index}"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RequestError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(value, dict) or set(value) not in ({"text"}, {"image"}):
        raise RequestError(f'{where} must be {{"text": ...}} or {{"image": ...}}, got {text[:80]}')
    ((name, content),) = value.items()
    if not isinstance(content, str):
        raise RequestError(f"{where}: {name} must be a string, got {json.dumps(content)[:80]}")
    return (name, content) if name == "text" else (name, image_bytes(content, where))


def image_bytes(text: str, where: str) -> bytes:
    """The bytes of a data: URL or of plain base64.

    Raises:
        RequestError: it is another kind of URL, which is not fetched, or no base64.
    """
    if text.startswith("data:"):
        header, comma, text = text.partition(",")
        if not comma or not header.endswith(";base64"):
            raise RequestError(f"{where}: a data: URL must be data:image/...;base64,...")
    elif "://" in text[:16]:
        raise RequestError(
            f"{where}: {text[:80]!r} is not fetched; send the image as a data: URL or base64"
        )
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{where}: the image is not valid base64: {error}") from None


def pairs(queries: Sequence[str], documents: Sequence[str]) -> list[tuple[str, str]]:
    """One query with each document, or each query with its own document.

    Raises:
        RequestError: their numbers do not fit.
    """
    if len(queries) == 1:
        return [(queries[0], document) for document in documents]
    if len(queries) != len(documents):
        raise RequestError(
            f"{names.QUERY}: must be one, or one for each of the {len(documents)} documents, "
            f"got {len(queries)}"
        )
    return list(zip(queries, documents, strict=True))
