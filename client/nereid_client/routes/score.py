"""POST /v1/score and /score."""

from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nereid_client.embeddings.embedding_output import envelope
from nereid_client.embeddings.model_choice import (
    call_model,
    choose_model,
    read_request,
    require_kind,
)
from nereid_client.embeddings.pooling_backend import EMBEDDING, RERANK, PoolingOutputs, ServedModel
from nereid_client.protocol.rerank_requests import ScoreRequest
from nereid_client.request_context import request_id_of

router = APIRouter(tags=["Embeddings and reranking"])


@router.post("/v1/score", summary="Score pairs of texts")
@router.post("/score", summary="Score pairs of texts (path without /v1)")
async def score(request: Request) -> Response:
    """Return the score of each pair of texts, in vLLM's format.

    A reranker computes the scores. If none is served, the score is the cosine similarity of the
    vectors that the embedding model computes.
    """
    body = await read_request(request, ScoreRequest)
    served = await choose_model(request, body.model, (RERANK, EMBEDDING))
    if served.kind == RERANK:
        scores, outputs = await _reranker_scores(request, served, body)
    else:
        scores, outputs = await _cosine_similarities(request, served, body)
    data = [
        {"index": index, "object": "score", "score": value}
        for index, value in enumerate(scores.tolist())
    ]
    head = envelope("score", request_id_of(request), served.name)
    total = int(outputs.arrays["num_tokens"].sum())
    usage = {"prompt_tokens": total, "total_tokens": total}
    return JSONResponse({**head, "data": data, "usage": usage})


async def _reranker_scores(
    request: Request, served: ServedModel, body: ScoreRequest
) -> tuple[npt.NDArray[Any], PoolingOutputs]:
    """Return the scores of a reranker, a float32 array of shape [num_pairs]."""
    require_kind(served, "score", "scores of pairs of texts")
    left, right = body.sides
    options = {
        "activation": "none" if body.use_activation is False else None,
        "instruction": body.instruction,
        "truncate": body.cuts,
    }
    tensors = {"query": body.left, "documents": body.right}
    fields = {"query": left[0], "documents": right[0]}
    outputs = await call_model(request, served, tensors, options, fields)
    return outputs.arrays["scores"], outputs


async def _cosine_similarities(
    request: Request, served: ServedModel, body: ScoreRequest
) -> tuple[npt.NDArray[Any], PoolingOutputs]:
    """Return the cosine similarities of the pairs, a float32 array of shape [num_pairs]."""
    require_kind(served, "dense", "one vector for each text")
    texts = [*body.left, *body.right]
    options = {"kind": "dense", "normalize": True, "truncate": body.cuts}
    outputs = await call_model(
        request, served, {"texts": texts}, options, {"texts": body.sides[1][0]}
    )
    vectors = outputs.arrays["embeddings"]
    num_left = len(body.left)
    return np.sum(vectors[:num_left] * vectors[num_left:], axis=1), outputs
