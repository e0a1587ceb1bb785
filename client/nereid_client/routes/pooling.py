"""POST /pooling."""

from fastapi import APIRouter, Request, Response

from nereid_client.embeddings.embedding_output import (
    WRITERS,
    encode_list,
    envelope,
    json_response,
    rows_of,
    usage_of,
)
from nereid_client.embeddings.model_choice import (
    call_model,
    choose_model,
    read_request,
    require_kind,
)
from nereid_client.embeddings.pooling_backend import EMBEDDING
from nereid_client.protocol.embedding_requests import VectorsRequest
from nereid_client.request_context import request_id_of

router = APIRouter(tags=["Embeddings and reranking"])

_KINDS = {"embed": "dense", "token_embed": "multi_vector"}
"""Maps the field `task` to a kind of output."""


@router.post("/pooling", summary="Compute vectors (vLLM's format)")
async def pooling(request: Request) -> Response:
    """Return the vectors of the texts, as vLLM does.

    With task="embed", each text has one vector. With task="token_embed", each token has one vector.
    The default depends on the model.
    """
    body = await read_request(request, VectorsRequest)
    served = await choose_model(request, body.model, (EMBEDDING,))
    default_kind = served.info["kinds"][0]
    if default_kind == "sparse":  # the route /embed_sparse returns sparse weights
        default_kind = "dense"
    kind = _KINDS[body.task] if body.task else default_kind
    require_kind(served, kind)
    outputs = await call_model(request, served, body.input, body.options() | {"kind": kind})
    write = WRITERS[body.vector_type]
    items = (
        f'{{"index":{index},"object":"pooling","data":{write(row)}}}'
        for index, row in enumerate(rows_of(outputs))
    )
    members = envelope("pool", request_id_of(request), served.name)
    members["usage"] = usage_of(outputs)
    return json_response(members, "data", await encode_list(items))
