"""POST /v1/rerank, /v2/rerank and /rerank."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nereid_client.embeddings import embedding_output
from nereid_client.embeddings.embedding_output import Ranked, usage_of
from nereid_client.embeddings.late_interaction import (
    choose_scorer,
    late_interaction,
    uses_late_interaction,
)
from nereid_client.embeddings.model_choice import (
    call_model,
    choose_model,
    refuse_instruction_for_embedding_model,
    refuse_token_limits_below_model_limit,
    require_kind,
)
from nereid_client.embeddings.pooling_backend import RERANK, PoolingOutputs, ServedModel
from nereid_client.protocol.rerank_requests import RankingRequest, RerankRequest
from nereid_client.request_context import read_and_validate, read_body, request_id_of, validate

router = APIRouter(tags=["Embeddings and reranking"])


@router.post("/v1/rerank", summary="Rerank documents")
@router.post("/rerank", summary="Rerank documents (path without /v1)")
async def rerank(request: Request) -> Response:
    """Return the documents, sorted by their relevance to a query.

    A reranker computes the scores. If no reranker is served, an embedding model with one vector for
    each token, such as ColBERT, computes the scores.

    If the body has `texts`, the response has TEI's format. Otherwise, it has the format of Jina and
    vLLM. The field `format` selects another format.
    """
    return await _rerank(request, "jina")


@router.post("/v2/rerank", summary="Rerank documents (Cohere's API, version 2)")
async def rerank_cohere(request: Request) -> Response:
    """Return the documents, sorted by their relevance to a query, in Cohere's format.

    The field `format` selects another format.
    """
    return await _rerank(request, "cohere")


@router.post("/v1/ranking", summary="Rank passages (NVIDIA NIM's format)")
async def rank_passages(request: Request) -> Response:
    """Return the passages, sorted by their scores, as NVIDIA's NIM for reranking does.

    The scores are logits: no activation function is applied.
    """
    body = await read_and_validate(request, RankingRequest)
    served = await choose_model(request, body.model, (RERANK,))
    require_kind(served, "score")
    options = {"activation": "none", "truncate": body.truncates}
    outputs = await call_model(request, served, body.model_inputs, options)
    ranked = embedding_output.ranking(
        outputs.arrays["scores"],
        body.texts,
        top_n=None,  # all passages
        with_text=False,
    )
    rankings = [{"index": passage.index, "logit": passage.score} for passage in ranked]
    return JSONResponse({"rankings": rankings, "usage": usage_of(outputs)})


async def _rerank(request: Request, default_format: str) -> Response:
    """Rerank the documents of a request, and return the response in the requested format.

    The field `format` of the body selects the format. If the body does not have this field, the
    query parameter `format` selects the format. The default is "tei" if the body has `texts`, and
    `default_format` otherwise.
    """
    body = await _read_body_and_query_parameter(request)
    response_format = body.format or (default_format if body.texts is None else "tei")
    served = await choose_scorer(request, body.model)
    outputs = await _score(request, served, body)
    with_text = body.return_text if response_format == "tei" else body.return_documents
    if with_text is None:  # the default of each format
        with_text = response_format in ("jina", "sglang")
    ranked = embedding_output.ranking(
        outputs.arrays["scores"], body.ranked_documents, body.max_results, with_text=with_text
    )
    response = _response_body(response_format, ranked, outputs, served, request_id_of(request))
    if response_format == "jina" and "top_k" in body.model_fields_set:
        # Voyage's library always sends the field top_k, and reads the results from `data`.
        response |= {"object": "list", "data": response["results"]}
    return JSONResponse(response)


async def _read_body_and_query_parameter(request: Request) -> RerankRequest:
    """Read and validate a request body. A query parameter can also set the field `format`."""
    fields = await read_body(request)
    if fields.get("format") is None and "format" in request.query_params:
        fields["format"] = request.query_params["format"]
    return validate(RerankRequest, fields)


async def _score(request: Request, served: ServedModel, body: RerankRequest) -> PoolingOutputs:
    """Return the score of each document. The model `served` computes the scores."""
    refuse_token_limits_below_model_limit(served, body)
    refuse_instruction_for_embedding_model(served, body)
    options = body.options()
    if uses_late_interaction(served):  # an embedding model with one vector for each token
        truncate = options["truncate"]
        return await late_interaction(request, served, body.model_inputs, truncate=truncate)
    require_kind(served, "score")
    return await call_model(request, served, body.model_inputs, options)


def _response_body(
    response_format: str,
    ranked: list[Ranked],
    outputs: PoolingOutputs,
    served: ServedModel,
    request_id: str,
) -> Any:  # noqa: ANN401 - JSON
    """Return the body of a rerank response.

    In the formats of SGLang and TEI, the body is only the list of results. In the formats of Jina
    and Cohere, the body is an object with the results, the model and the usage.
    """
    if response_format == "sglang":
        return embedding_output.sglang_results(ranked)
    if response_format == "tei":
        return embedding_output.tei_results(ranked)
    usage = usage_of(outputs)
    body: dict[str, Any] = {
        "id": f"rerank-{request_id}",
        "model": served.name,
        "usage": usage,
        "results": embedding_output.jina_results(ranked),
    }
    if response_format == "cohere":
        body["meta"] = {
            "api_version": {"version": "2"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": usage["prompt_tokens"]},
        }
    return body
