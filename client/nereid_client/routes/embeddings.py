"""POST /v1/embeddings, /v1/embed, /v2/embed, /embed, /embed_all and /embed_sparse."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nereid_client.embeddings.embedding_output import (
    Floats,
    bits_writer,
    list_response,
    nested_lists_response,
    rows_of,
    usage_of,
    vector_writer,
)
from nereid_client.embeddings.model_choice import (
    call_model,
    choose_model,
    read_request,
    require_full_length,
    require_kind,
)
from nereid_client.embeddings.pooling_backend import EMBEDDING, PoolingOutputs, ServedModel
from nereid_client.errors import ApiError, BackendError, FieldError
from nereid_client.protocol.embedding_requests import (
    CohereEmbedRequest,
    EmbeddingOptions,
    EmbeddingRequest,
    TeiEmbedRequest,
    read_inputs,
)
from nereid_client.request_context import request_id_of

router = APIRouter(tags=["Embeddings and reranking"])

DESCRIPTIONS = {
    "dense": "one vector for each text",
    "multi_vector": "one vector for each token",
    "sparse": "sparse weights",
}
"""The kinds of output of an embedding model, in words for error messages."""


@router.post("/v1/embeddings", summary="Create embeddings")
async def embeddings(request: Request) -> Response:
    """Return one vector for each text, as OpenAI's API does."""
    body = await read_request(request, EmbeddingRequest)
    served = await choose_model(request, body.model, (EMBEDDING,))
    outputs = await embed(request, served, body, "input", body.input, "")
    write = vector_writer(body.encoding_format)

    def items() -> Iterator[tuple[str, int]]:
        for index, row in enumerate(rows_of(outputs)):
            head = f'{{"object":"embedding","index":{index},"embedding":'
            yield f"{head}{write(row)}}}", row.size

    head = {"object": "list", "model": served.name, "usage": usage_of(outputs)}
    return await list_response(head, "data", items())


@router.post("/v2/embed", summary="Create embeddings (Cohere's API, version 2)")
async def cohere_embed(request: Request) -> Response:
    """Return a list of vectors for each member of `embedding_types`, in Cohere's format."""
    return await _cohere_embed(request, "2")


@router.post("/v1/embed", summary="Create embeddings (Cohere's API, version 1)")
async def cohere_embed_1(request: Request) -> Response:
    """Return vectors in Cohere's format: one list, or one for each member of `embedding_types`."""
    return await _cohere_embed(request, "1")


async def _cohere_embed(request: Request, version: str) -> Response:
    """Return the response of both versions of Cohere's API."""
    body = await read_request(request, CohereEmbedRequest)
    served = await choose_model(request, body.model, (EMBEDDING,))
    require_kind(served, "dense", DESCRIPTIONS["dense"])
    require_full_length(served, "max_tokens", body.max_tokens)
    try:
        value = body.input
    except FieldError as error:
        raise ApiError(400, str(error), param=error.field) from None
    options = body.options(served.info.get("prompts") or {})
    try:
        outputs = await embed(request, served, options, body.field, value, "dense")
    except BackendError as error:
        message = re.sub(r"^dimensions\b", "output_dimension", error.message)
        raise BackendError(error.code, message) from None
    rows = rows_of(outputs)
    tokens = usage_of(outputs)["prompt_tokens"]
    head = {
        "id": f"embed-{request_id_of(request)}",
        "texts": body.texts or [],
        "meta": {"api_version": {"version": version}, "billed_units": {"input_tokens": tokens}},
    }
    if version == "1" and body.embedding_types is None:
        head["response_type"] = "embeddings_floats"
        return await list_response(head, "embeddings", _encoded(rows, _COHERE["float"]))
    kinds: Sequence[str] = body.embedding_types or ["float"]
    head["response_type"] = "embeddings_by_type"
    lists = {kind: _encoded(rows, _COHERE[kind]) for kind in kinds}
    return await nested_lists_response(head, "embeddings", lists)


_COHERE = {
    "float": vector_writer("float"),
    "base64": vector_writer("base64"),
    "binary": bits_writer(is_signed=True),
    "ubinary": bits_writer(is_signed=False),
}


@router.post("/embed", summary="Create embeddings (TEI's format)")
async def tei_embed(request: Request) -> Response:
    """Return a list of vectors, one for each text."""
    return await _list_of_vectors(request, "dense")


@router.post("/embed_all", summary="Create one embedding for each token (TEI's format)")
async def tei_embed_all(request: Request) -> Response:
    """Return a list for each text, with one vector for each token."""
    return await _list_of_vectors(request, "multi_vector")


@router.post("/embed_sparse", summary="Create sparse embeddings (TEI's format)")
async def tei_embed_sparse(request: Request) -> Response:
    """Return a list for each text, with `{"index", "value"}` for each weighted token."""
    body = await read_request(request, TeiEmbedRequest)
    served = await choose_model(request, body.model, (EMBEDDING,))
    require_kind(served, "sparse", DESCRIPTIONS["sparse"])
    outputs = await embed(request, served, body, "inputs", body.inputs, "sparse")
    rows = [json.loads(row) for row in outputs.strings["sparse"]]
    return JSONResponse([_index_value_pairs(row) for row in rows])


async def embed(
    request: Request,
    served: ServedModel,
    body: EmbeddingOptions,
    field: str,
    value: object,
    kind: str,
) -> PoolingOutputs:
    """Call the embedding model.

    Args:
        request: the HTTP request.
        served: the embedding model.
        body: the options of the request.
        field: the name of the request field with the input, for error messages.
        value: the value of this field.
        kind: "dense", "sparse" or "multi_vector"; "" is the default of the model.

    Raises: ApiError, BackendError.
    """
    try:
        inputs: dict[str, list[Any]] = read_inputs(value, field)
    except FieldError as error:
        raise ApiError(400, str(error), param=error.field) from None
    if "parts" in inputs:
        inputs = {"parts": [json.dumps(part, ensure_ascii=False) for part in inputs["parts"]]}
    fields = dict.fromkeys(("texts", "input_ids", "input_lengths", "parts"), field)
    options = body.options() | {"kind": kind or None}
    return await call_model(request, served, inputs, options, fields)


def _encoded(rows: list[Floats], write: Callable[[Floats], str]) -> Iterator[tuple[str, int]]:
    """Yield the JSON of each array, and how many numbers it has."""
    return ((write(row), row.size) for row in rows)


async def _list_of_vectors(request: Request, kind: str) -> Response:
    body = await read_request(request, TeiEmbedRequest)
    served = await choose_model(request, body.model, (EMBEDDING,))
    require_kind(served, kind, DESCRIPTIONS[kind])
    outputs = await embed(request, served, body, "inputs", body.inputs, kind)
    write = vector_writer("float")
    return await list_response({}, "", _encoded(rows_of(outputs), write))


def _index_value_pairs(row: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [
        {"index": index, "value": value}
        for index, value in zip(row["indices"], row["values"], strict=True)
    ]
