"""POST /v1/embeddings, /v1/embed, /v2/embed, /embed, /embed_all and /embed_sparse."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nereid_client.embeddings.embedding_output import (
    WRITERS,
    Floats,
    envelope,
    join_json_list,
    join_json_object,
    json_response,
    usage_of,
    vectors_of,
)
from nereid_client.embeddings.late_interaction import uses_late_interaction
from nereid_client.embeddings.model_choice import (
    call_model,
    choose_model,
    refuse_truncation_below_model_limit,
    require_kind,
)
from nereid_client.embeddings.pooling_backend import EMBEDDING, PoolingOutputs, ServedModel
from nereid_client.protocol.embedding_requests import (
    CohereEmbedRequest,
    EmbeddingRequest,
    TeiEmbedRequest,
)
from nereid_client.request_context import read_and_validate, request_id_of

router = APIRouter(tags=["Embeddings and reranking"])


@router.post("/v1/embeddings", summary="Create embeddings")
async def embeddings(request: Request) -> Response:
    """Return one vector for each text, as OpenAI's API does.

    If the model has prompts, such as "query: ", the field `input_type` can select a prompt.
    """
    body = await read_and_validate(request, EmbeddingRequest)
    served = await choose_model(request, body.model, (EMBEDDING,))
    # This route never requests the kind "sparse". The route /embed_sparse returns sparse weights.
    kind = "multi_vector" if uses_late_interaction(served) else "dense"
    require_kind(served, kind)
    options = body.options_for(_prompt_names(served)) | {"kind": kind}
    outputs = await call_model(request, served, body.model_inputs, options)
    encoded_items = _encode_items(vectors_of(outputs), WRITERS[body.vector_type])
    # `envelope` adds an id and a time. OpenAI does not return these fields, but vLLM returns them.
    # The Python client of Mistral requires the id.
    members = envelope("embd", request_id_of(request), served.name) | {"usage": usage_of(outputs)}
    return json_response(members, "data", await join_json_list(encoded_items))


def _encode_items(
    vectors: Iterable[Floats], vector_to_json: Callable[[Floats], str]
) -> Iterator[str]:
    """Yield the JSON text of each item in the list `data` of OpenAI's response.

    Example: the vector [0.5] yields '{"object":"embedding","index":0,"embedding":[0.5]}'.

    Args:
        vectors: the vectors of all inputs.
        vector_to_json: converts one vector to JSON text.
    """
    for index, vector in enumerate(vectors):
        encoded_members = {
            "object": '"embedding"',
            "index": str(index),
            "embedding": vector_to_json(vector),
        }
        yield join_json_object(encoded_members)


@router.post("/v2/embed", summary="Create embeddings (Cohere's API, version 2)")
async def cohere_embed(request: Request) -> Response:
    """For each type in `embedding_types`, return one list of vectors, in Cohere's format."""
    return await _cohere_embed(request, "2")


@router.post("/v1/embed", summary="Create embeddings (Cohere's API, version 1)")
async def cohere_embed_1(request: Request) -> Response:
    """Return vectors in Cohere's format.

    With `embedding_types`, the response has one list of vectors for each type. Without this field,
    the response has only one list, whose vectors consist of floats.
    """
    return await _cohere_embed(request, "1")


async def _cohere_embed(request: Request, version: str) -> Response:
    """Return the response to a request of Cohere's API.

    Version 1 without `embedding_types` returns one list of vectors in the member `embeddings`.
    Otherwise, `embeddings` is an object with one list for each type, such as
    {"float": [[0.5]], "int8": [[127]]}.
    """
    body = await read_and_validate(request, CohereEmbedRequest)
    outputs = await _cohere_outputs(request, body)
    encoded_lists = await _encode_lists(vectors_of(outputs), body.embedding_types or ["float"])
    returns_one_list = version == "1" and body.embedding_types is None
    if returns_one_list:
        response_type, embeddings = "embeddings_floats", encoded_lists["float"]
    else:
        response_type, embeddings = "embeddings_by_type", join_json_object(encoded_lists)
    num_tokens = usage_of(outputs)["prompt_tokens"]
    members = {
        "id": f"embed-{request_id_of(request)}",
        "texts": body.texts or [],
        "meta": {"api_version": {"version": version}, "billed_units": {"input_tokens": num_tokens}},
        "response_type": response_type,
    }
    return json_response(members, "embeddings", embeddings)


async def _cohere_outputs(request: Request, body: CohereEmbedRequest) -> PoolingOutputs:
    """Call the embedding model for a request of Cohere's API, and return the output tensors.

    Raises: ApiError 400 if the model does not compute one vector for each text, or if `max_tokens`
        is smaller than the model's limit, because the server truncates texts only to this limit.
    """
    served = await choose_model(request, body.model, (EMBEDDING,))
    require_kind(served, "dense")
    refuse_truncation_below_model_limit(served, "max_tokens", body.max_tokens)
    options = body.options(_prompt_names(served)) | {"kind": "dense"}
    return await call_model(request, served, body.model_inputs, options)


def _prompt_names(served: ServedModel) -> Collection[str]:
    """Return the names of the prompts that the checkpoint defines, such as "query" and "document".

    Each of these prompts is a text such as "query: ", which the model expects before inputs of this
    type. The field `input_type` or `prompt_name` of a request selects one of the prompts.
    """
    prompts: Mapping[str, str] = served.info.get("prompts") or {}
    return prompts.keys()


async def _encode_lists(vectors: Sequence[Floats], vector_types: Sequence[str]) -> dict[str, str]:
    """Encode all vectors in each vector type. Return one JSON list of vectors for each type.

    If `vector_types` contains a type several times, the vectors are encoded in this type only once.

    Example: the vectors [0.5] and [0.25] in the types "float" and "int8" return {"float":
    "[[0.5],[0.25]]", "int8": "[[127],[127]]"}.
    """
    return {
        vector_type: await join_json_list(map(WRITERS[vector_type], vectors))
        for vector_type in dict.fromkeys(vector_types)
    }


@router.post("/embed", summary="Create embeddings (TEI's format)")
async def tei_embed(request: Request) -> Response:
    """Return a list that contains one vector for each text."""
    return await _list_of_vectors(await _tei_outputs(request, "dense"))


@router.post("/embed_all", summary="Create one embedding for each token (TEI's format)")
async def tei_embed_all(request: Request) -> Response:
    """For each text, return a list that contains one vector for each token."""
    return await _list_of_vectors(await _tei_outputs(request, "multi_vector"))


@router.post("/embed_sparse", summary="Create sparse embeddings (TEI's format)")
async def tei_embed_sparse(request: Request) -> Response:
    """Return one sparse vector for each text: a list of token ids with their weights.

    Example of a vector: [{"index": 7, "value": 0.5}].
    """
    outputs = await _tei_outputs(request, "sparse")
    rows = [json.loads(row) for row in outputs.strings["sparse"]]
    return JSONResponse([_index_value_pairs(row) for row in rows])


async def _tei_outputs(request: Request, kind: str) -> PoolingOutputs:
    """Read a request in TEI's format, call the embedding model, and return the output tensors."""
    body = await read_and_validate(request, TeiEmbedRequest)
    served = await choose_model(request, body.model, (EMBEDDING,))
    require_kind(served, kind)
    return await call_model(request, served, body.inputs, body.options() | {"kind": kind})


async def _list_of_vectors(outputs: PoolingOutputs) -> Response:
    """Return a response whose body is a JSON list with one vector for each input."""
    body = await join_json_list(map(WRITERS["float"], vectors_of(outputs)))
    return Response(body, media_type="application/json")


def _index_value_pairs(row: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Convert a sparse vector to TEI's format.

    Example: {"indices": [7], "values": [0.5]} returns [{"index": 7, "value": 0.5}].
    """
    return [
        {"index": index, "value": value}
        for index, value in zip(row["indices"], row["values"], strict=True)
    ]
