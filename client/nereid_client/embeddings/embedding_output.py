"""Vectors and scores -> JSON, in the shapes of OpenAI, vLLM, Jina, Cohere, SGLang and TEI."""

import base64
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.responses import Response

from nereid_client.embeddings.model_choice import rest
from nereid_client.embeddings.pooling_backend import PoolingReply

Floats = npt.NDArray[np.float32]

_NUMBERS_AT_A_TIME = 20_000  # encoded before other requests have a turn: some 15 ms
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode


@dataclass(frozen=True)
class Ranked:
    """One document's place.

    Attributes:
        index: in the request.
        score: its relevance.
        text: None where the answer is not to repeat it.
    """

    index: int
    score: float
    text: str | None


def usage_of(reply: PoolingReply) -> dict[str, int]:
    """Token counts: there is a prompt and no completion."""
    total = int(reply.arrays["num_tokens"].sum())
    return {"prompt_tokens": total, "total_tokens": total}


def envelope(prefix: str, request_id: str, model: str) -> dict[str, Any]:
    """What vLLM puts around its lists."""
    return {
        "id": f"{prefix}-{request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
    }


def rows_of(reply: PoolingReply) -> list[Floats]:
    """One array for each input: a vector [dim], or its tokens' vectors [num_vectors, dim]."""
    vectors = reply.arrays["embeddings"]
    counts = reply.arrays.get("num_vectors")
    if counts is None:
        return list(vectors)
    return np.split(vectors, np.cumsum(counts)[:-1])


def vector_writer(encoding_format: str | None) -> Callable[[Floats], str]:
    """How an array is written: as nested lists, or as base64 of little-endian float32."""
    if encoding_format == "base64":
        return lambda row: f'"{base64.b64encode(row.astype("<f4").tobytes()).decode()}"'
    return lambda row: _encode(row.tolist())


def bits_writer(*, is_signed: bool) -> Callable[[Floats], str]:
    """How an array's signs are written: eight to a byte, the first in its highest bit.

    Args:
        is_signed: whether bytes go from -128 to 127 (Cohere's `binary`), or from 0 (`ubinary`).
    """
    offset = 128 if is_signed else 0
    return lambda row: _encode((np.packbits(row > 0).astype(np.int16) - offset).tolist())


async def lists_response(
    head: Mapping[str, Any], key: str, lists: Mapping[str, Iterable[tuple[str, int]]]
) -> Response:
    """A JSON object with an object of long lists in it, written as `list_response` does."""
    written = []
    for name, items in lists.items():
        pieces = [piece async for piece in _in_turns(items)]
        written.append(f'"{name}":[{",".join(pieces)}]')
    body = f'{{"{key}":{{{",".join(written)}}},{_encode(dict(head))[1:]}'
    return Response(body, media_type="application/json")


async def list_response(
    head: Mapping[str, Any], key: str, items: Iterable[tuple[str, int]]
) -> Response:
    """A JSON object whose long list is written piece by piece, other requests in between.

    Args:
        head: the other members.
        key: the list's name; "" sends the bare list.
        items: each one's JSON, and how many numbers it holds.
    """
    pieces = [piece async for piece in _in_turns(items)]
    body = f"[{','.join(pieces)}]"
    if key:
        inner = _encode(dict(head))[1:-1]
        body = f'{{"{key}":{body}{"," if inner else ""}{inner}}}'
    return Response(body, media_type="application/json")


async def _in_turns(items: Iterable[tuple[str, int]]) -> AsyncIterator[str]:
    waiting = 0
    for piece, size in items:
        yield piece
        waiting += size
        if waiting >= _NUMBERS_AT_A_TIME:
            waiting = 0
            await rest()


def ranking(
    scores: Floats, documents: Sequence[str], top_n: int | None, with_text: bool
) -> list[Ranked]:
    """The documents by falling score, equal ones in the request's order; top_n 0 means all."""
    order = np.argsort(-scores, kind="stable")[: top_n or None]
    return [Ranked(int(i), float(scores[i]), documents[i] if with_text else None) for i in order]


def jina(ranked: Sequence[Ranked]) -> list[dict[str, Any]]:
    """`results` of Jina, vLLM and Cohere."""
    return [
        {"index": one.index, "relevance_score": one.score}
        | ({} if one.text is None else {"document": {"text": one.text}})
        for one in ranked
    ]


def sglang(ranked: Sequence[Ranked]) -> list[dict[str, Any]]:
    """SGLang's bare list."""
    return [
        {"score": one.score}
        | ({} if one.text is None else {"document": one.text})
        | {"index": one.index, "meta_info": None}
        for one in ranked
    ]


def tei(ranked: Sequence[Ranked]) -> list[dict[str, Any]]:
    """TEI's bare list."""
    return [
        {"index": one.index}
        | ({} if one.text is None else {"text": one.text})
        | {"score": one.score}
        for one in ranked
    ]
