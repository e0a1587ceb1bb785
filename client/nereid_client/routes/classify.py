"""POST /classify."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nereid_client.embeddings.embedding_output import envelope, usage_of
from nereid_client.embeddings.model_choice import call_model, choose_model, require_kind
from nereid_client.embeddings.pooling_backend import RERANK, ServedModel
from nereid_client.protocol.rerank_requests import ClassifyRequest
from nereid_client.request_context import read_and_validate, request_id_of

router = APIRouter(tags=["Embeddings and reranking"])


@router.post("/classify", summary="Classify texts")
async def classify(request: Request) -> Response:
    """Classify texts. For each text, return the most probable label and all probabilities.

    The format is vLLM's. The served reranker must be a classifier.
    """
    body = await read_and_validate(request, ClassifyRequest)
    served = await choose_model(request, body.model, (RERANK,))
    require_kind(served, "classify")
    options = {
        "activation": "none" if body.use_activation is False else None,
        "truncate": body.truncates,
    }
    outputs = await call_model(request, served, body.model_inputs, options)
    probabilities = outputs.arrays["probabilities"].tolist()
    data = [_result(index, row, served) for index, row in enumerate(probabilities)]
    head = envelope("classify", request_id_of(request), served.name)
    return JSONResponse({**head, "data": data, "usage": usage_of(outputs)})


def labels_of(served: ServedModel, num_classes: int) -> list[str]:
    """Return the labels of a classifier, or LABEL_0, LABEL_1, ... if the model has no labels."""
    return served.info.get("labels") or [f"LABEL_{at}" for at in range(num_classes)]


def _result(index: int, probabilities: list[float], served: ServedModel) -> dict[str, Any]:
    """Return the classification of one text.

    Example: the probabilities [0.1, 0.9] of the labels "no" and "yes" return {"index": 0,
    "label": "yes", "probs": [0.1, 0.9], "num_classes": 2}.
    """
    num_classes = len(probabilities)
    label = labels_of(served, num_classes)[probabilities.index(max(probabilities))]
    return {"index": index, "label": label, "probs": probabilities, "num_classes": num_classes}
