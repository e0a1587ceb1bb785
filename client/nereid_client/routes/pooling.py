"""POST /pooling."""

from collections.abc import Iterator

from fastapi import APIRouter, Request, Response

from nereid_client.embeddings.embedding_output import (
    envelope,
    list_response,
    rows_of,
    usage_of,
    vector_writer,
)
from nereid_client.embeddings.model_choice import choose_model, read_request, require_kind
from nereid_client.embeddings.pooling_backend import EMBEDDING
from nereid_client.protocol.embedding_requests import VectorsRequest
from nereid_client.request_context import request_id_of
from nereid_client.routes import embeddings

router = APIRouter(tags=["Embeddings and reranking"])

_KINDS = {"embed": "dense", "token_embed": "multi_vector"}


@router.post("/pooling", summary="Compute vectors (vLLM's format)")
async def pooling(request: Request) -> Response:
    """Return one vector for each text, or one for each token, as vLLM does.

    The field `task` decides which. The default depends on the model.
    """
    body = await read_request(request, VectorsRequest)
    served = await choose_model(request, body.model, (EMBEDDING,))
    kind = _KINDS[body.task] if body.task else served.info["kinds"][0]
    require_kind(served, kind, embeddings.DESCRIPTIONS[kind])
    if kind == "sparse":
        kind = "dense"
        require_kind(served, kind, "dense vectors (/embed_sparse returns its sparse weights)")
    outputs = await embeddings.embed(request, served, body, "input", body.input, kind)
    write = vector_writer(body.encoding_format)

    def items() -> Iterator[tuple[str, int]]:
        for index, row in enumerate(rows_of(outputs)):
            yield f'{{"index":{index},"object":"pooling","data":{write(row)}}}', row.size

    head = envelope("pool", request_id_of(request), served.name)
    return await list_response({**head, "usage": usage_of(outputs)}, "data", items())
