"""POST /v1/rerank, /v2/rerank and /rerank, in five shapes. See docs/embeddings.md."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nereid_client.embeddings import embedding_output as answers
from nereid_client.embeddings.embedding_output import Ranked, usage_of
from nereid_client.embeddings.model_choice import choose, infer, need_kind, need_room, read
from nereid_client.embeddings.pooling_backend import RERANK, PoolingReply, Served
from nereid_client.errors import ApiError
from nereid_client.protocol.embedding_requests import RerankRequest
from nereid_client.request_context import request_id_of

router = APIRouter()

FORMATS = ("jina", "cohere", "sglang", "tei")


@router.post("/v1/rerank", summary="Order documents by what they say to a query")
@router.post("/rerank", summary="The same; TEI's shape where the body has `texts`")
async def rerank(request: Request) -> Response:
    """Answers as Jina and vLLM do, unless the request wants another shape."""
    return await _rerank(request, "jina")


@router.post("/v2/rerank", summary="The same, in the shape of Cohere's version 2")
async def rerank_cohere(request: Request) -> Response:
    """Answers as Cohere does, unless the request wants another shape."""
    return await _rerank(request, "cohere")


async def _rerank(request: Request, usual: str) -> Response:
    body = await read(request, RerankRequest)
    shape = _shape(request, body, usual)
    served = await choose(request, body.model, (RERANK,))
    need_kind(served, "score", "scores of pairs")
    _check_length(body, served)
    field = "texts" if body.texts is not None else "documents"
    if not body.items:
        raise ApiError(400, f"{field}: must not be an empty list", param=field)
    tensors = {"query": [body.query], "documents": body.items}
    fields = {"query": "query", "documents": field}
    reply = await infer(request, served, tensors, body.options(), fields)
    ranked = answers.ranking(
        reply.arrays["scores"], body.items, body.top_n, _with_text(body, shape)
    )
    return JSONResponse(_write(shape, ranked, reply, served, request_id_of(request)))


def _shape(request: Request, body: RerankRequest, usual: str) -> str:
    """Whose answer is wanted: what the body or the query string says, else by the body's fields."""
    wanted = body.format or request.query_params.get("format")
    if wanted is not None and wanted not in FORMATS:
        raise ApiError(
            400, f"format: must be one of {', '.join(FORMATS)}, got {wanted!r}", param="format"
        )
    return wanted or ("tei" if body.texts is not None else usual)


def _with_text(body: RerankRequest, shape: str) -> bool:
    """Cohere 2 and TEI leave texts out unless asked; the others send them unless asked not to."""
    asked = body.return_text if shape == "tei" else body.return_documents
    return shape in ("jina", "sglang") if asked is None else asked


def _check_length(body: RerankRequest, served: Served) -> None:
    for name in ("max_tokens_per_doc", "max_tokens_per_query"):
        need_room(served, name, getattr(body, name))


def _write(
    shape: str, ranked: list[Ranked], reply: PoolingReply, served: Served, request_id: str
) -> Any:  # noqa: ANN401 - JSON
    if shape == "sglang":
        return answers.sglang(ranked)
    if shape == "tei":
        return answers.tei(ranked)
    usage = usage_of(reply)
    answer: dict[str, Any] = {"id": f"rerank-{request_id}", "model": served.name}
    answer |= {"usage": usage, "results": answers.jina(ranked)}
    if shape == "cohere":
        answer["meta"] = {
            "api_version": {"version": "2"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": usage["prompt_tokens"]},
        }
    return answer
