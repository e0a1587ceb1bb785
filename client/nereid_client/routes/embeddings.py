"""POST /v1/embeddings, and TEI's /embed, /embed_all and /embed_sparse."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nereid_client.errors import ApiError
from nereid_client.pooling.answers import list_response, rows_of, usage_of, vector_writer
from nereid_client.pooling.backend import EMBEDDING, PoolingReply, Served
from nereid_client.pooling.context import choose, infer, need_kind, read
from nereid_client.protocol.pooling import (
    EmbeddingOptions,
    EmbeddingRequest,
    TeiEmbedRequest,
    read_inputs,
)

router = APIRouter()


@router.post("/v1/embeddings", summary="Turn texts into vectors")
async def embeddings(request: Request) -> Response:
    """OpenAI's request and answer."""
    body = await read(request, EmbeddingRequest)
    served = await choose(request, body.model, (EMBEDDING,))
    reply = await embed(request, served, body, "input", body.input, "")
    write = vector_writer(body.encoding_format)

    def items() -> Iterator[tuple[str, int]]:
        for index, row in enumerate(rows_of(reply)):
            head = f'{{"object":"embedding","index":{index},"embedding":'
            yield f"{head}{write(row)}}}", row.size

    head = {"object": "list", "model": served.name, "usage": usage_of(reply)}
    return await list_response(head, "data", items())


@router.post("/embed", summary="Vectors, in the shape of TEI")
async def tei_embed(request: Request) -> Response:
    """A bare list of vectors."""
    return await _bare_lists(request, "dense")


@router.post("/embed_all", summary="A vector for each token, in the shape of TEI")
async def tei_embed_all(request: Request) -> Response:
    """A bare list of lists of vectors."""
    return await _bare_lists(request, "multi_vector")


@router.post("/embed_sparse", summary="Weights of the vocabulary, in the shape of TEI")
async def tei_embed_sparse(request: Request) -> Response:
    """A bare list of lists of `{"index", "value"}`."""
    body = await read(request, TeiEmbedRequest)
    served = await choose(request, body.model, (EMBEDDING,))
    need_kind(served, "sparse", "sparse weights")
    reply = await embed(request, served, body, "inputs", body.inputs, "sparse")
    rows = [json.loads(row) for row in reply.strings["sparse"]]
    return JSONResponse([_pairs(row) for row in rows])


async def embed(
    request: Request,
    served: Served,
    body: EmbeddingOptions,
    field: str,
    value: object,
    kind: str,
) -> PoolingReply:
    """Call the embedding model for what a body's field holds.

    Args:
        request: the HTTP request.
        served: the embedding model.
        body: how to embed.
        field: name of the field, for errors.
        value: what it holds.
        kind: "dense", "sparse", "multi_vector"; "" is the model's usual one.

    Raises: ApiError, BackendError.
    """
    try:
        inputs: dict[str, list[Any]] = read_inputs(value, field)
    except ValueError as error:
        raise ApiError(400, str(error), param=field) from None
    if "parts" in inputs:
        inputs = {"parts": [json.dumps(part, ensure_ascii=False) for part in inputs["parts"]]}
    fields = dict.fromkeys(("texts", "input_ids", "input_lengths", "parts"), field)
    options = body.options() | {"kind": kind or None}
    return await infer(request, served, inputs, options, fields)


async def _bare_lists(request: Request, kind: str) -> Response:
    body = await read(request, TeiEmbedRequest)
    served = await choose(request, body.model, (EMBEDDING,))
    need_kind(served, kind, "one vector a text" if kind == "dense" else "a vector a token")
    reply = await embed(request, served, body, "inputs", body.inputs, kind)
    write = vector_writer("float")
    return await list_response({}, "", ((write(row), row.size) for row in rows_of(reply)))


def _pairs(row: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [
        {"index": index, "value": value}
        for index, value in zip(row["indices"], row["values"], strict=True)
    ]
