"""POST /predict, POST /decode and GET /info, in TEI's format."""

from typing import Any

from fastapi import APIRouter, Request

import nereid_client
from nereid_client.embeddings.model_choice import (
    call_model,
    choose_model,
    pooling_models_of,
    require_kind,
)
from nereid_client.embeddings.pooling_backend import (
    EMBEDDING,
    RERANK,
    PoolingOutputs,
    ServedModel,
)
from nereid_client.embeddings.token_labels import labelled_groups, labelled_tokens, tokens_of
from nereid_client.errors import ApiError, BackendError
from nereid_client.protocol.tei_requests import DecodeRequest, PredictRequest
from nereid_client.request_context import (
    context_of,
    read_and_validate,
    read_prompt_body,
    unique_request_id,
    validate,
)
from nereid_client.routes.classify import labels_of
from nereid_client.streaming.field_names import FieldNames

router = APIRouter(tags=["Embeddings and reranking"])

_DECODE_FIELD_NAMES = FieldNames({"prompt": "ids"})
"""In the errors of the backend, the field with the token ids is called `prompt`, not `ids`."""


@router.post("/predict", summary="Classify texts (TEI's format)")
async def predict(request: Request) -> list[Any]:
    """Return the labels of a text with their scores, sorted by descending score.

    If the model classifies single tokens, return the labelled parts of the text and the positions
    of these parts instead. If the request has a list of texts, return one result for each text.

    The field `aggregation_strategy`, which combines the labels of tokens, is refused if the model
    classifies whole texts.
    """
    body = await read_and_validate(request, PredictRequest)
    served = await choose_model(request, body.model, (RERANK,))  # `rerank` also runs classifiers
    if "token_classify" in served.info.get("kinds", ()):
        results = _labelled_parts(body, await _classify(request, served, body), served)
    else:
        require_kind(served, "classify")
        _refuse_aggregation_strategy(body)
        results = _labelled_texts(await _classify(request, served, body), served)
    return results if body.is_batch else results[0]


async def _classify(request: Request, served: ServedModel, body: PredictRequest) -> PoolingOutputs:
    """Call the classifier, and return its output tensors."""
    options = {"activation": "none" if body.raw_scores else None, "truncate": body.truncates}
    return await call_model(request, served, body.model_inputs, options)


def _refuse_aggregation_strategy(body: PredictRequest) -> None:
    """Raise an error if the request has the field aggregation_strategy.

    The caller has checked that the served model classifies whole texts, not single tokens.
    """
    if body.aggregation_strategy is not None:
        raise ApiError(
            400,
            "aggregation_strategy requires a model that classifies single tokens, but the served "
            "model classifies whole texts. Leave the field out.",
            param="aggregation_strategy",
        )


def _labelled_parts(
    body: PredictRequest, outputs: PoolingOutputs, served: ServedModel
) -> list[list[dict[str, Any]]]:
    """Return the labelled parts of each text."""
    label_parts = labelled_tokens if body.aggregation_strategy == "none" else labelled_groups
    labels = labels_of(served, outputs.arrays["probabilities"].shape[1])
    texts = body.model_inputs.tensors["texts"]
    return [
        label_parts(text, probabilities, offsets, labels)
        for text, (probabilities, offsets) in zip(texts, tokens_of(outputs), strict=True)
    ]


@router.post("/decode", summary="Convert token ids to texts (TEI's format)")
async def decode(request: Request) -> list[str]:
    """Convert each list of token ids to a text, with the tokenizer of the language model.

    As in TEI, special tokens are left out of the text unless `skip_special_tokens` is false.
    """
    body = validate(DecodeRequest, await read_prompt_body(request))
    backend = context_of(request).backend
    try:
        return [
            await backend.detokenize(
                unique_request_id(request),
                ids,
                skip_special_tokens=body.skip_special_tokens is not False,  # None means True
            )
            for ids in body.lists
        ]
    except BackendError as error:
        # The error of the backend names the field `prompt`, but the client sent the token ids in
        # `ids`.
        raise _DECODE_FIELD_NAMES.rename_fields(error) from None


@router.get("/info", summary="Describe the served model (TEI's format)")
async def info(request: Request) -> dict[str, Any]:
    """Return the properties of the served embedding model.

    If there is no embedding model, return the properties of the reranker.

    If Nereid does not have a property of TEI, the property is null.
    """
    models = {model.kind: model for model in await pooling_models_of(request).all()}
    served = models.get(EMBEDDING) or models.get(RERANK)
    if served is None:
        # No model has answered. `choose_model` queries the models again. If this fails, too,
        # `choose_model` raises an ApiError that gives the reason.
        served = await choose_model(request, None, (EMBEDDING, RERANK))
    settings = context_of(request).settings
    return {
        "model_id": served.name,
        "served_model_name": served.name,
        "model_sha": None,
        "model_dtype": served.info.get("dtype"),
        "model_type": _model_type(served),
        "max_concurrent_requests": settings.max_concurrent_requests,
        "max_input_length": served.info.get("max_model_len"),
        "max_batch_tokens": None,
        "max_batch_requests": None,
        "max_client_batch_size": None,
        "auto_truncate": False,
        "tokenization_workers": None,
        "version": nereid_client.__version__,
        "sha": None,
        "docker_label": None,
    }


def _model_type(served: ServedModel) -> dict[str, Any]:
    """Return the field `model_type`, which contains the model's labels or its kind of pooling.

    Example: a classifier with the labels "no" and "yes" returns {"classifier": {"id2label": {"0":
    "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}}.
    """
    if served.kind == EMBEDDING:
        return {"embedding": {"pooling": served.info.get("pooling")}}
    kind = "classifier" if "classify" in served.info.get("kinds", ()) else "reranker"
    labels = served.info.get("labels") or []
    return {
        kind: {
            "id2label": {str(number): label for number, label in enumerate(labels)},
            "label2id": {label: number for number, label in enumerate(labels)},
        }
    }


def _labelled_texts(outputs: PoolingOutputs, served: ServedModel) -> list[list[dict[str, Any]]]:
    """Return the labels of each text with their scores, sorted by descending score."""
    results = []
    for scores in outputs.arrays["probabilities"].tolist():
        pairs = zip(labels_of(served, len(scores)), scores, strict=True)
        ranked = sorted(pairs, key=lambda pair: -pair[1])
        results.append([{"score": score, "label": label} for label, score in ranked])
    return results
