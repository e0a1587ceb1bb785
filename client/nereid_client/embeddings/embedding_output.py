"""Encodes vectors and scores as JSON, in the formats of OpenAI, vLLM, Jina, Cohere, SGLang and TEI.

It takes a long time to encode thousands of vectors. A response is therefore encoded in several
steps, and other requests run between two steps.
"""

import asyncio
import base64
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.responses import Response

from nereid_client.embeddings.pooling_backend import PoolingOutputs

Floats = npt.NDArray[np.float32]

_CHARS_PER_PART = 400_000  # encoding this many characters of numbers takes about 15 ms
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode


@dataclass(frozen=True)
class Ranked:
    """A document and its score.

    Attributes:
        index: the index of the document in the request.
        score: the relevance of the document to the query.
        text: the text of the document, or None if the response does not repeat the texts.
    """

    index: int
    score: float
    text: str | None


def usage_of(outputs: PoolingOutputs) -> dict[str, int]:
    """Return OpenAI's usage object. Pooling models generate no tokens."""
    total = int(outputs.arrays["num_tokens"].sum())
    return {"prompt_tokens": total, "total_tokens": total}


def envelope(prefix: str, request_id: str, model: str) -> dict[str, Any]:
    """Return the fields that vLLM's responses contain in addition to the list of results.

    Args:
        prefix: the beginning of the response's id, such as "pool".
        request_id: the id of the request.
        model: the name of the model.
    """
    return {
        "id": f"{prefix}-{request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
    }


def vectors_of(outputs: PoolingOutputs) -> list[Floats]:
    """Split the outputs of an embedding model into one float32 array for each text or image.

    The shape of an array is [dimension] if the model returns one vector for each input, and
    [num_vectors, dimension] if the model returns one vector for each token.
    """
    vectors = outputs.arrays["embeddings"]
    num_vectors = outputs.arrays.get("num_vectors")
    if num_vectors is None:
        return list(vectors)
    return np.split(vectors, np.cumsum(num_vectors)[:-1])


def vector_writer(encoding_format: str | None) -> Callable[[Floats], str]:
    """Return a function that converts an array to JSON text.

    Args:
        encoding_format: "base64" encodes the numbers as little-endian float32 in base64. "float"
            and None encode the numbers as nested lists.
    """
    if encoding_format == "base64":
        return lambda array: f'"{base64.b64encode(array.astype("<f4").tobytes()).decode()}"'
    return lambda array: _encode(array.tolist())


def bytes_writer(*, is_signed: bool, is_base64: bool = False) -> Callable[[Floats], str]:
    """Return a function that rounds an array to 8-bit integers and converts them to JSON text.

    The array is one vector, [dimension], or several vectors, [num_vectors, dimension]. Each vector
    is scaled so that the largest absolute value of its numbers becomes 127. The scale does not
    change cosine similarities, but it changes dot products. A vector of zeros is not scaled.
    Example: the array [0.5, -0.25] is encoded as "[127,-64]" if the integers are signed, and as
    "[255,64]" if the integers are unsigned.

    Args:
        is_signed: whether the integers are from -127 to 127 (`int8`) or from 1 to 255 (`uint8`).
        is_base64: whether the bytes are encoded as base64 instead of a list of integers.
    """
    offset = 0 if is_signed else 128

    def write(array: Floats) -> str:
        largest = np.abs(array).max(axis=-1, keepdims=True)  # of each vector
        divisor = np.where(largest > 0, largest, 1)  # a vector of zeros is divided by 1
        # `array` is divided first and multiplied by 127 afterwards, because 127 / divisor would
        # overflow to infinity if `divisor` is tiny.
        integers = np.rint(array / divisor * 127).astype(np.int16)
        return _encode_bytes(integers + offset, is_base64=is_base64)

    return write


def bits_writer(*, is_signed: bool, is_base64: bool = False) -> Callable[[Floats], str]:
    """Return a function that packs the signs of an array into bytes, and encodes the bytes as JSON.

    Eight numbers become one byte. The bit of a positive number is 1, and the bit of any other
    number is 0. The first of the eight numbers becomes the highest bit. Example: the array
    [1, -1, -1, -1, -1, -1, -1, 1] is encoded as "[129]" if the bytes are unsigned, and as "[1]" if
    the bytes are signed, because Cohere's API subtracts 128 from each byte. If the array contains
    several vectors, [num_vectors, dimension], each vector becomes a list of bytes.

    Args:
        is_signed: whether the bytes are from -128 to 127 (Cohere's `binary`) or from 0 to 255
            (`ubinary`).
        is_base64: whether the bytes are encoded as base64 instead of a list of integers.
    """
    offset = 128 if is_signed else 0

    def write(array: Floats) -> str:
        packed = np.packbits(array > 0, axis=-1).astype(np.int16)
        return _encode_bytes(packed - offset, is_base64=is_base64)

    return write


def _encode_bytes(integers: npt.NDArray[np.int16], *, is_base64: bool) -> str:
    """Encode integers from -128 to 255 as JSON: as a list, or as the base64 text of their bytes."""
    if is_base64:
        return f'"{base64.b64encode(integers.astype(np.uint8).tobytes()).decode()}"'
    return _encode(integers.tolist())


WRITERS: Mapping[str, Callable[[Floats], str]] = {
    "float": vector_writer("float"),
    "base64": vector_writer("base64"),
    "int8": bytes_writer(is_signed=True),
    "uint8": bytes_writer(is_signed=False),
    "binary": bits_writer(is_signed=True),
    "ubinary": bits_writer(is_signed=False),
    "int8 base64": bytes_writer(is_signed=True, is_base64=True),
    "uint8 base64": bytes_writer(is_signed=False, is_base64=True),
    "binary base64": bits_writer(is_signed=True, is_base64=True),
    "ubinary base64": bits_writer(is_signed=False, is_base64=True),
}
"""Maps a vector type, such as "float", to the function that converts an array to JSON text."""


def json_response(members: Mapping[str, Any], name: str, encoded: str) -> Response:
    """Return an HTTP response with a JSON object. The value of `name` is already encoded as JSON.

    Example: the members {"model": "a"}, the name "data" and the encoded member "[[0.5]]" return
    the body {"data":[[0.5]],"model":"a"}.

    Args:
        members: the other members of the object.
        name: the name of the encoded member.
        encoded: the JSON text of the encoded member's value.
    """
    others = {other: _encode(value) for other, value in members.items()}
    body = join_json_object({name: encoded, **others})
    return Response(body, media_type="application/json")


def join_json_object(encoded_members: Mapping[str, str]) -> str:
    """Build the JSON text of an object. The values are already encoded as JSON.

    Example: {"float": "[[0.5]]", "int8": "[[127]]"} returns '{"float":[[0.5]],"int8":[[127]]}'.
    """
    members = (f"{_encode(name)}:{encoded}" for name, encoded in encoded_members.items())
    return f"{{{','.join(members)}}}"


async def join_json_list(items: Iterable[str]) -> str:
    """Build the JSON text of a list. The items are already encoded as JSON.

    Between the items of a long list, the event loop runs the tasks of other requests.

    Example: the items "[0.5]" and "[0.7]" return "[[0.5],[0.7]]".

    Args:
        items: usually a generator, which encodes an item when the item is needed.
    """
    encoded = []
    num_chars = 0
    for item in items:
        encoded.append(item)
        num_chars += len(item)
        if num_chars >= _CHARS_PER_PART:
            num_chars = 0
            await asyncio.sleep(0)  # other tasks run now
    return f"[{','.join(encoded)}]"


def ranking(
    scores: Floats, documents: Sequence[object], top_n: int | None, *, with_text: bool
) -> list[Ranked]:
    """Return the documents, sorted by descending score.

    Example: the scores [0.1, 0.9] of the documents ["a", "b"] with top_n=1 return
    [Ranked(index=1, score=0.9, text="b")].

    Args:
        scores: the score of each document, a float32 array.
        documents: the texts or images.
        top_n: the number of documents to return. None or 0 returns all.
        with_text: whether the result contains the texts. Images are never repeated.
    """
    order: list[int] = np.argsort(-scores, kind="stable").tolist()
    if top_n:
        order = order[:top_n]
    ranked = []
    for index in order:
        document = documents[index]
        text = document if with_text and isinstance(document, str) else None
        ranked.append(Ranked(index, float(scores[index]), text))
    return ranked


def jina_results(ranked: Sequence[Ranked]) -> list[dict[str, Any]]:
    """Return the ranked documents as the list `results`, in the format of Jina, vLLM and Cohere."""
    return [
        {"index": document.index, "relevance_score": document.score}
        | ({} if document.text is None else {"document": {"text": document.text}})
        for document in ranked
    ]


def sglang_results(ranked: Sequence[Ranked]) -> list[dict[str, Any]]:
    """Return the ranked documents as a list, in SGLang's format."""
    return [
        {"score": document.score}
        | ({} if document.text is None else {"document": document.text})
        | {"index": document.index, "meta_info": None}
        for document in ranked
    ]


def tei_results(ranked: Sequence[Ranked]) -> list[dict[str, Any]]:
    """Return the ranked documents as a list, in TEI's format."""
    return [
        {"index": document.index}
        | ({} if document.text is None else {"text": document.text})
        | {"score": document.score}
        for document in ranked
    ]
