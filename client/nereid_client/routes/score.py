"""POST /v1/score and /score: how much texts have to do with each other, in the shape of vLLM."""

from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nereid_client.embeddings.embedding_output import envelope
from nereid_client.embeddings.model_choice import choose, infer, need_kind, read
from nereid_client.embeddings.pooling_backend import EMBEDDING, RERANK, PoolingReply, Served
from nereid_client.protocol.embedding_requests import ScoreRequest
from nereid_client.request_context import request_id_of

router = APIRouter()


@router.post("/v1/score", summary="Score pairs of texts")
@router.post("/score", summary="The same")
async def score(request: Request) -> Response:
    """A reranker scores each pair; an embedding model gives the cosine of their vectors."""
    body = await read(request, ScoreRequest)
    served = await choose(request, body.model, (RERANK, EMBEDDING))
    if served.kind == RERANK:
        scores, reply = await _scores(request, served, body)
    else:
        scores, reply = await _cosines(request, served, body)
    data = [
        {"index": index, "object": "score", "score": value}
        for index, value in enumerate(scores.tolist())
    ]
    answer = envelope("score", request_id_of(request), served.name)
    total = int(reply.arrays["num_tokens"].sum())
    usage = {"prompt_tokens": total, "total_tokens": total}
    return JSONResponse({**answer, "data": data, "usage": usage})


async def _scores(
    request: Request, served: Served, body: ScoreRequest
) -> tuple[npt.NDArray[Any], PoolingReply]:
    need_kind(served, "score", "scores of pairs")
    left, right = body.sides
    options = {
        "activation": "none" if body.use_activation is False else None,
        "instruction": body.instruction,
        "truncate": body.cuts,
    }
    tensors = {"query": body.left, "documents": body.right}
    fields = {"query": left[0], "documents": right[0]}
    reply = await infer(request, served, tensors, options, fields)
    return reply.arrays["scores"], reply


async def _cosines(
    request: Request, served: Served, body: ScoreRequest
) -> tuple[npt.NDArray[Any], PoolingReply]:
    need_kind(served, "dense", "one vector a text")
    texts = [*body.left, *body.right]
    options = {"kind": "dense", "normalize": True, "truncate": body.cuts}
    reply = await infer(request, served, {"texts": texts}, options, {"texts": body.sides[1][0]})
    vectors = reply.arrays["embeddings"]
    num_left = len(body.left)
    return np.sum(vectors[:num_left] * vectors[num_left:], axis=1), reply
