"""POST /pooling."""

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

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
from nereid_client.embeddings.model_choice import call_model, choose_model, require_kind
from nereid_client.embeddings.pooling_backend import EMBEDDING, RERANK, PoolingOutputs, ServedModel
from nereid_client.embeddings.token_labels import tokens_of
from nereid_client.errors import ApiError
from nereid_client.protocol.embedding_requests import VectorsRequest
from nereid_client.request_context import read_and_validate, request_id_of

router = APIRouter(tags=["Embeddings and reranking"])

_EMBEDDING_TASKS = {"embed": "dense", "token_embed": "multi_vector"}
"""Maps each task of an embedding model to the kind of output."""
_CLASSIFIER_TASKS = {"classify": "classify", "token_classify": "token_classify"}
"""Maps each task of a classifier to the kind of output."""


@router.post("/pooling", summary="Compute vectors or labels (vLLM's format)")
async def pooling(request: Request) -> Response:
    """Return vectors of the texts, or the probabilities of labels, as vLLM does.

    The field `task` selects the output. The default depends on the model.

    - "embed" returns one vector for each text.
    - "token_embed" returns one vector for each token.
    - "classify" returns the probabilities of all labels for each text.
    - "token_classify" returns the probabilities of all labels for each token.
    """
    body = await read_and_validate(request, VectorsRequest)
    served = await choose_model(request, body.model, _model_kinds(body.task))
    output_kind = _output_kind(served, body.task)
    require_kind(served, output_kind)
    # Classifiers and rerankers have the kind RERANK. Most rerankers can also classify: they have a
    # single label, and return its probability.
    if served.kind == RERANK:
        outputs = await _classify(request, served, body)
        if output_kind == "token_classify":
            rows = [probabilities for probabilities, _ in tokens_of(outputs)]
        else:
            rows = list(outputs.arrays["probabilities"])
    else:
        options = body.options_for(served.info.get("prompts") or {}) | {"kind": output_kind}
        outputs = await call_model(request, served, body.model_inputs, options)
        rows = vectors_of(outputs)
    members = envelope("pool", request_id_of(request), served.name)
    members["usage"] = usage_of(outputs)
    encoded_rows = await _encode_rows(rows, body.vector_type)
    return json_response(members, "data", encoded_rows)


async def _encode_rows(rows: Sequence[Floats], vector_type: str) -> str:
    """Return the JSON text of the response's field `data`.

    The slow conversion of each row to JSON text runs only once, because the text of the row is then
    inserted into the text of its object.
    """
    to_json_text = WRITERS[vector_type]
    items = (
        join_json_object({"index": str(index), "object": '"pooling"', "data": to_json_text(row)})
        for index, row in enumerate(rows)
    )
    return await join_json_list(items)


def _model_kinds(task: str | None) -> Sequence[str]:
    """Return the kinds of models that can perform a task, or all kinds if `task` is None.

    Classifiers and rerankers have the kind RERANK. All other models have the kind EMBEDDING.
    """
    if task is None:
        return (EMBEDDING, RERANK)
    return (EMBEDDING,) if task in _EMBEDDING_TASKS else (RERANK,)


def _output_kind(served: ServedModel, task: str | None) -> str:
    """Return the kind of output for a task, such as "dense" for "embed".

    If `task` is None, return the default kind of the model.
    """
    if task is not None:
        return (_EMBEDDING_TASKS | _CLASSIFIER_TASKS)[task]
    default: str = served.info["kinds"][0]
    # This route cannot return sparse weights, which /embed_sparse returns, and it cannot return
    # scores, which require pairs of texts. If one of these two kinds of output is the default of
    # the model, this route returns a related kind.
    return {"sparse": "dense", "score": "classify"}.get(default, default)


async def _classify(request: Request, served: ServedModel, body: VectorsRequest) -> PoolingOutputs:
    """Call a model that can classify (a classifier or a reranker), and return its outputs."""
    if set(body.input.tensors) != {"texts"}:
        raise ApiError(
            400,
            "A classifier requires a text or a list of texts as the input, but the request has "
            "token ids or content parts.",
            param="input",
        )
    return await call_model(request, served, body.input, body.classifier_options)
