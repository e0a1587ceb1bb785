"""Encode vectors and scores as JSON, in the formats of OpenAI, vLLM, Jina, Cohere, SGLang and TEI.

A response with thousands of vectors takes long to encode. It is therefore encoded in parts, and
other requests run in between.
"""

import base64
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.responses import Response

from nereid_client.embeddings.model_choice import let_others_run
from nereid_client.embeddings.pooling_backend import PoolingOutputs

Floats = npt.NDArray[np.float32]

_NUMBERS_PER_PART = 20_000  # encoding a part takes about 15 ms
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode


@dataclass(frozen=True)
class Ranked:
    """A ranked document.

    Attributes:
        index: its index in the request.
        score: its relevance.
        text: its text, or None if the response does not repeat it.
    """

    index: int
    score: float
    text: str | None


def usage_of(reply: PoolingOutputs) -> dict[str, int]:
    """Return OpenAI's usage object. Pooling models generate no tokens."""
    total = int(reply.arrays["num_tokens"].sum())
    return {"prompt_tokens": total, "total_tokens": total}


def envelope(prefix: str, request_id: str, model: str) -> dict[str, Any]:
    """Return the fields that vLLM's responses have in addition to the list.

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


def rows_of(reply: PoolingOutputs) -> list[Floats]:
    """Return one float32 array for each input.

    The shape of an array is [dimension] if the model returns one vector for each input, and
    [num_vectors, dimension] if the model returns one vector for each token.
    """
    vectors = reply.arrays["embeddings"]
    counts = reply.arrays.get("num_vectors")
    if counts is None:
        return list(vectors)
    return np.split(vectors, np.cumsum(counts)[:-1])


def vector_writer(encoding_format: str | None) -> Callable[[Floats], str]:
    """Return a function that encodes an array as JSON.

    Args:
        encoding_format: "base64" encodes the bytes of little-endian float32 numbers; anything else
            encodes nested lists.
    """
    if encoding_format == "base64":
        return lambda row: f'"{base64.b64encode(row.astype("<f4").tobytes()).decode()}"'
    return lambda row: _encode(row.tolist())


def bits_writer(*, is_signed: bool) -> Callable[[Floats], str]:
    """Return a function that encodes the signs of an array, eight in one byte, as JSON.

    The bit of a positive number is 1. The first of eight numbers is the highest bit.
    Example: [1, -1, -1, -1, -1, -1, -1, 1] is 129 unsigned, and 1 signed.

    Args:
        is_signed: whether bytes are from -128 to 127 (Cohere's `binary`) or from 0 to 255
            (`ubinary`).
    """
    offset = 128 if is_signed else 0
    return lambda row: _encode((np.packbits(row > 0).astype(np.int16) - offset).tolist())


async def nested_lists_response(
    head: Mapping[str, Any], key: str, lists: Mapping[str, Iterable[tuple[str, int]]]
) -> Response:
    """Return a response whose JSON object contains an object of long lists.

    Example: {"embeddings": {"float": [[0.5]], "binary": [[1]]}, "id": "a"} has the key
    "embeddings", and the head {"id": "a"}.

    Args:
        head: the other members of the JSON object.
        key: the name of the object with the lists.
        lists: the lists by name. Each item is a pair of its JSON and its number of numbers.
    """
    written = []
    for name, items in lists.items():
        pieces = [piece async for piece in _in_parts(items)]
        written.append(f'"{name}":[{",".join(pieces)}]')
    body = f'{{"{key}":{{{",".join(written)}}},{_encode(dict(head))[1:]}'
    return Response(body, media_type="application/json")


async def list_response(
    head: Mapping[str, Any], key: str, items: Iterable[tuple[str, int]]
) -> Response:
    """Return a response whose JSON object contains a long list.

    Example: {"data": [[0.5], [0.7]], "model": "a"} has the key "data", and the head {"model": "a"}.

    Args:
        head: the other members of the JSON object.
        key: the name of the list. For "", the response is the list alone.
        items: the items of the list. Each one is a pair of its JSON and its number of numbers.
    """
    pieces = [piece async for piece in _in_parts(items)]
    body = f"[{','.join(pieces)}]"
    if key:
        inner = _encode(dict(head))[1:-1]
        body = f'{{"{key}":{body}{"," if inner else ""}{inner}}}'
    return Response(body, media_type="application/json")


async def _in_parts(items: Iterable[tuple[str, int]]) -> AsyncIterator[str]:
    """Yield the JSON of each item. Let other requests run after each part."""
    num_encoded = 0
    for piece, size in items:
        yield piece
        num_encoded += size
        if num_encoded >= _NUMBERS_PER_PART:
            num_encoded = 0
            await let_others_run()


def ranking(
    scores: Floats, documents: Sequence[str], top_n: int | None, with_text: bool
) -> list[Ranked]:
    """Return the documents in the order of their scores, the highest first.

    Args:
        scores: the score of each document, a float32 array.
        documents: the texts.
        top_n: the number of documents to return. None or 0 returns all.
        with_text: whether the result has the texts.
    """
    order = np.argsort(-scores, kind="stable")[: top_n or None]
    return [Ranked(int(i), float(scores[i]), documents[i] if with_text else None) for i in order]


def jina_results(ranked: Sequence[Ranked]) -> list[dict[str, Any]]:
    """Return the list `results` in the format of Jina, vLLM and Cohere."""
    return [
        {"index": one.index, "relevance_score": one.score}
        | ({} if one.text is None else {"document": {"text": one.text}})
        for one in ranked
    ]


def sglang_results(ranked: Sequence[Ranked]) -> list[dict[str, Any]]:
    """Return the response of SGLang, which is a list."""
    return [
        {"score": one.score}
        | ({} if one.text is None else {"document": one.text})
        | {"index": one.index, "meta_info": None}
        for one in ranked
    ]


def tei_results(ranked: Sequence[Ranked]) -> list[dict[str, Any]]:
    """Return the response of TEI, which is a list."""
    return [
        {"index": one.index}
        | ({} if one.text is None else {"text": one.text})
        | {"score": one.score}
        for one in ranked
    ]
