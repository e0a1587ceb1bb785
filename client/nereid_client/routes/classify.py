"""POST /classify: the probabilities of a classifier's labels, in the shape of vLLM."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nereid_client.embeddings.embedding_output import envelope, usage_of
from nereid_client.embeddings.model_choice import choose, infer, need_kind, read
from nereid_client.embeddings.pooling_backend import RERANK, Served
from nereid_client.protocol.embedding_requests import ClassifyRequest
from nereid_client.request_context import request_id_of

router = APIRouter()


@router.post("/classify", summary="Tell which label each text has")
async def classify(request: Request) -> Response:
    """Each text's probabilities and its most probable label."""
    body = await read(request, ClassifyRequest)
    served = await choose(request, body.model, (RERANK,))
    need_kind(served, "classify", "probabilities of labels")
    field = "input" if body.input is not None else "inputs"
    options = {
        "activation": "none" if body.use_activation is False else None,
        "truncate": body.cuts,
    }
    reply = await infer(request, served, {"texts": body.texts}, options, {"texts": field})
    rows = reply.arrays["probabilities"].tolist()
    data = [_answer(index, row, served) for index, row in enumerate(rows)]
    answer = envelope("classify", request_id_of(request), served.name)
    return JSONResponse({**answer, "data": data, "usage": usage_of(reply)})


def _answer(index: int, row: list[float], served: Served) -> dict[str, Any]:
    best = max(range(len(row)), key=row.__getitem__)
    labels = served.info.get("labels") or [f"LABEL_{at}" for at in range(len(row))]
    return {"index": index, "label": labels[best], "probs": row, "num_classes": len(row)}
