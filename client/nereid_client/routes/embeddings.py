"""POST /v1/embeddings, Cohere's /v1/embed and /v2/embed, TEI's /embed, /embed_all and _sparse."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nereid_client.embeddings.embedding_output import (
    Floats,
    bits_writer,
    list_response,
    lists_response,
    rows_of,
    usage_of,
    vector_writer,
)
from nereid_client.embeddings.model_choice import choose, infer, need_kind, need_room, read
from nereid_client.embeddings.pooling_backend import EMBEDDING, PoolingReply, Served
from nereid_client.errors import ApiError, BackendError
from nereid_client.protocol.embedding_requests import (
    CohereEmbedRequest,
    EmbeddingOptions,
    EmbeddingRequest,
    TeiEmbedRequest,
    read_inputs,
)
from nereid_client.request_context import request_id_of

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


@router.post("/v2/embed", summary="Vectors, in the shape of Cohere's version 2")
async def cohere_embed(request: Request) -> Response:
    """A list of vectors for each of `embedding_types`."""
    return await _cohere_embed(request, "2")


@router.post("/v1/embed", summary="The same, in the shape of Cohere's version 1")
async def cohere_embed_1(request: Request) -> Response:
    """The same; one list of vectors where no `embedding_types` are given."""
    return await _cohere_embed(request, "1")


async def _cohere_embed(request: Request, version: str) -> Response:
    body = await read(request, CohereEmbedRequest)
    served = await choose(request, body.model, (EMBEDDING,))
    need_kind(served, "dense", "one vector a text")
    need_room(served, "max_tokens", body.max_tokens)
    try:
        value = body.input
    except ValueError as error:
        raise ApiError(400, str(error), param=body.field) from None
    options = body.options(served.info.get("prompts") or {})
    try:
        reply = await embed(request, served, options, body.field, value, "dense")
    except BackendError as error:
        message = error.message.replace("dimensions: ", "output_dimension: ", 1)
        raise BackendError(error.code, message) from None
    rows = rows_of(reply)
    tokens = usage_of(reply)["prompt_tokens"]
    head = {
        "id": f"embed-{request_id_of(request)}",
        "texts": body.texts or [],
        "meta": {"api_version": {"version": version}, "billed_units": {"input_tokens": tokens}},
    }
    if version == "1" and body.embedding_types is None:
        head["response_type"] = "embeddings_floats"
        return await list_response(head, "embeddings", _written(rows, _COHERE["float"]))
    kinds: Sequence[str] = body.embedding_types or ["float"]
    head["response_type"] = "embeddings_by_type"
    lists = {kind: _written(rows, _COHERE[kind]) for kind in kinds}
    return await lists_response(head, "embeddings", lists)


_COHERE = {
    "float": vector_writer("float"),
    "base64": vector_writer("base64"),
    "binary": bits_writer(is_signed=True),
    "ubinary": bits_writer(is_signed=False),
}


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


def _written(rows: list[Floats], write: Callable[[Floats], str]) -> Iterator[tuple[str, int]]:
    return ((write(row), row.size) for row in rows)


async def _bare_lists(request: Request, kind: str) -> Response:
    body = await read(request, TeiEmbedRequest)
    served = await choose(request, body.model, (EMBEDDING,))
    need_kind(served, kind, "one vector a text" if kind == "dense" else "a vector a token")
    reply = await embed(request, served, body, "inputs", body.inputs, kind)
    write = vector_writer("float")
    return await list_response({}, "", _written(rows_of(reply), write))


def _pairs(row: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [
        {"index": index, "value": value}
        for index, value in zip(row["indices"], row["values"], strict=True)
    ]
