"""POST /pooling, and the router of everything that is not generation."""

from collections.abc import Iterator

from fastapi import APIRouter, Request, Response

from nereid_client.embeddings.embedding_output import (
    envelope,
    list_response,
    rows_of,
    usage_of,
    vector_writer,
)
from nereid_client.embeddings.model_choice import choose, need_kind, pooling_lifespan, read
from nereid_client.embeddings.pooling_backend import EMBEDDING
from nereid_client.protocol.embedding_requests import VectorsRequest
from nereid_client.request_context import request_id_of
from nereid_client.routes import classify, embeddings, rerank, score

router = APIRouter(lifespan=pooling_lifespan)

_KINDS = {"embed": "dense", "token_embed": "multi_vector"}


@router.post("/pooling", summary="What the embedding model gives, in the shape of vLLM")
async def pooling(request: Request) -> Response:
    """One vector a text, or one a token; the model's usual kind unless `task` says."""
    body = await read(request, VectorsRequest)
    served = await choose(request, body.model, (EMBEDDING,))
    kind = _KINDS[body.task] if body.task else served.info["kinds"][0]
    need_kind(served, kind, "one vector a text" if kind == "dense" else "a vector a token")
    if kind == "sparse":
        kind = "dense"
        need_kind(served, kind, "vectors; ask /embed_sparse for its weights")
    reply = await embeddings.embed(request, served, body, "input", body.input, kind)
    write = vector_writer(body.encoding_format)

    def items() -> Iterator[tuple[str, int]]:
        for index, row in enumerate(rows_of(reply)):
            yield f'{{"index":{index},"object":"pooling","data":{write(row)}}}', row.size

    head = envelope("pool", request_id_of(request), served.name)
    return await list_response({**head, "usage": usage_of(reply)}, "data", items())


for _route in (embeddings, rerank, score, classify):
    router.include_router(_route.router)
