"""POST /classify."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nereid_client.embeddings.embedding_output import envelope, usage_of
from nereid_client.embeddings.model_choice import (
    call_model,
    choose_model,
    read_request,
    require_kind,
)
from nereid_client.embeddings.pooling_backend import RERANK, ServedModel
from nereid_client.protocol.rerank_requests import ClassifyRequest
from nereid_client.request_context import request_id_of

router = APIRouter(tags=["Embeddings and reranking"])


@router.post("/classify", summary="Classify texts")
async def classify(request: Request) -> Response:
    """Return the probabilities of all labels for each text, and the most probable label.

    The format is vLLM's. The served reranker must be a classifier.
    """
    body = await read_request(request, ClassifyRequest)
    served = await choose_model(request, body.model, (RERANK,))
    require_kind(served, "classify", "the probabilities of labels")
    field = "input" if body.input is not None else "inputs"
    options = {
        "activation": "none" if body.use_activation is False else None,
        "truncate": body.cuts,
    }
    outputs = await call_model(request, served, {"texts": body.texts}, options, {"texts": field})
    rows = outputs.arrays["probabilities"].tolist()
    data = [_result(index, row, served) for index, row in enumerate(rows)]
    head = envelope("classify", request_id_of(request), served.name)
    return JSONResponse({**head, "data": data, "usage": usage_of(outputs)})


def _result(index: int, row: list[float], served: ServedModel) -> dict[str, Any]:
    """Return the result for one text, whose probabilities are `row`."""
    best = max(range(len(row)), key=row.__getitem__)
    labels = served.info.get("labels") or [f"LABEL_{at}" for at in range(len(row))]
    return {"index": index, "label": labels[best], "probs": row, "num_classes": len(row)}
