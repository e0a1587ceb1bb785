"""POST /v1/score and /score."""

import re

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nereid_client.embeddings.embedding_output import Floats, envelope, usage_of
from nereid_client.embeddings.late_interaction import late_interaction, uses_late_interaction
from nereid_client.embeddings.model_choice import (
    call_model,
    choose_model,
    refuse_instruction_for_embedding_model,
    refuse_token_limits_below_model_limit,
    require_kind,
)
from nereid_client.embeddings.pooling_backend import EMBEDDING, RERANK, PoolingOutputs, ServedModel
from nereid_client.errors import BackendError
from nereid_client.protocol.embedding_requests import ModelInputs
from nereid_client.protocol.rerank_requests import ScoreRequest, SimilarityRequest
from nereid_client.request_context import read_and_validate, request_id_of

router = APIRouter(tags=["Embeddings and reranking"])


@router.post("/v1/score", summary="Score pairs of texts")
@router.post("/score", summary="Score pairs of texts (path without /v1)")
async def score(request: Request) -> Response:
    """Return the score of each pair of texts, in vLLM's format.

    A reranker computes the scores. If no reranker is served, the score is the cosine similarity of
    the vectors that the embedding model computes. If the embedding model computes one vector for
    each token, as ColBERT does, the score is MaxSim: each token of the query contributes its
    largest similarity to a token of the document, and the score is the sum.
    """
    body = await read_and_validate(request, ScoreRequest)
    served = await choose_model(request, body.model, (RERANK, EMBEDDING))
    refuse_token_limits_below_model_limit(served, body)
    refuse_instruction_for_embedding_model(served, body)
    outputs = await _score(request, served, body)
    data = [
        {"index": index, "object": "score", "score": value}
        for index, value in enumerate(outputs.arrays["scores"].tolist())
    ]
    head = envelope("score", request_id_of(request), served.name)
    return JSONResponse({**head, "data": data, "usage": usage_of(outputs)})


async def _score(request: Request, served: ServedModel, body: ScoreRequest) -> PoolingOutputs:
    """Return the output tensors `scores` and `num_tokens`. Each pair of texts has one score.

    The kind of the model `served` decides how the scores are computed.
    """
    if served.kind == RERANK:
        return await _call_reranker(request, served, body)
    if uses_late_interaction(served):
        inputs = body.model_inputs
        return await late_interaction(request, served, inputs, truncate=body.truncates)
    outputs = await _call_embedder(request, served, body)
    vectors = outputs.arrays["embeddings"]  # first the queries, and then the documents
    scores = _cosine_similarities(vectors, num_queries=len(body.query_texts))
    return PoolingOutputs(arrays={**outputs.arrays, "scores": scores}, strings={})


@router.post("/similarity", summary="Compare texts with one text (TEI's format)")
async def similarity(request: Request) -> Response:
    """Return the cosine similarity between the source sentence and each sentence, as TEI does."""
    body = await read_and_validate(request, SimilarityRequest)
    served = await choose_model(request, body.model, (EMBEDDING,))
    require_kind(served, "dense")
    texts = [body.inputs.source_sentence, *body.inputs.sentences]
    options = {
        "kind": "dense",
        "normalize": True,
        "prompt_name": body.prompt_name,
        "truncate": body.truncates,
    }
    # An error about the input tensor "texts" names the field inputs.sentences of the request.
    inputs = ModelInputs(tensors={"texts": texts}, fields={"texts": "inputs.sentences"})
    try:
        outputs = await call_model(request, served, inputs, options)
    except BackendError as error:
        # The source sentence is the first text, so the model counts it as a sentence, too.
        raise _correct_index(
            error,
            num_queries=1,
            query_field="inputs.source_sentence",
            document_field="inputs.sentences",
        ) from None
    similarities = _cosine_similarities(outputs.arrays["embeddings"], num_queries=1)
    return JSONResponse(similarities.tolist())


async def _call_reranker(
    request: Request, served: ServedModel, body: ScoreRequest
) -> PoolingOutputs:
    """Call the reranker. The output `scores` has one score for each pair of texts."""
    require_kind(served, "score")
    options = {
        "activation": "none" if body.use_activation is False else None,
        "instruction": body.instruction,
        "truncate": body.truncates,
    }
    return await call_model(request, served, body.model_inputs, options)


async def _call_embedder(
    request: Request, served: ServedModel, body: ScoreRequest
) -> PoolingOutputs:
    """Call the embedding model.

    The array `embeddings` has one vector for each query, followed by one vector for each document.
    All vectors have length 1.
    """
    require_kind(served, "dense")
    options = {"kind": "dense", "normalize": True, "truncate": body.truncates}
    try:
        return await call_model(request, served, body.embedding_inputs, options)
    except BackendError as error:
        num_queries = len(body.query_texts)
        raise _correct_index(error, num_queries, body.query_field, body.document_field) from None


def _correct_index(
    error: BackendError, num_queries: int, query_field: str, document_field: str
) -> BackendError:
    """Correct the field and the index in an error, so that they match the client's request.

    The embedding model receives one list: first the queries, then the documents. An error of the
    model contains an index into this list. The index must be parsed, because the error
    of the Triton server contains only a text. If the text contains no index, the error is returned
    unchanged.

    Example: with one query, "text_2: element 3: has 13 tokens" becomes "text_2: element 2: has 13
    tokens", and "text_2: element 0: has 13 tokens" becomes "text_1: element 0: has 13 tokens".
    """
    match = re.match(rf"{re.escape(document_field)}: element (\d+): ", error.message)
    if match is None:
        return error
    index = int(match[1])
    is_query = index < num_queries
    field = query_field if is_query else document_field
    index_in_field = index if is_query else index - num_queries
    rest = error.message[match.end() :]
    return BackendError(error.code, f"{field}: element {index_in_field}: {rest}")


def _cosine_similarities(vectors: Floats, num_queries: int) -> Floats:
    """For each pair of a query and a document, return the cosine similarity.

    Example: for the vectors [q, d1, d2] and one query, the similarities are [q·d1, q·d2].

    Args:
        vectors: an array [num_queries + num_documents, dimension]. All vectors have length 1.
        num_queries: 1, or the number of documents.
    """
    similarities: Floats = np.sum(vectors[:num_queries] * vectors[num_queries:], axis=1)
    return similarities
