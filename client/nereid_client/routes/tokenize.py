"""POST /tokenize: the token ids of a prompt or a chat, as vLLM and SGLang offer it."""

from typing import Any

from fastapi import APIRouter, Request

from nereid_client.protocol.tokenize_request import TokenizeRequest
from nereid_client.request_context import (
    check_unicode,
    context_of,
    dump,
    engine_request_id,
    read_body,
    validate,
)
from nereid_client.triton_backend import Generation

router = APIRouter()


@router.post("/tokenize", summary="Token ids of a prompt or a chat")
@router.post("/v1/tokenize", summary="The same, by SGLang's name")
async def tokenize(request: Request) -> dict[str, Any]:
    """Ids as generation would see them, and their number; `max_model_len` is not known here."""
    context = context_of(request)
    body = await read_body(request)
    wanted = validate(TokenizeRequest, body)
    context.check_model(wanted.model)
    if wanted.prompt is not None:
        check_unicode(wanted.prompt)
    chat = wanted.chat_request(body)
    parameters = wanted.sampling_parameters()
    tokens = await context.backend.tokenize(
        Generation(
            engine_request_id(request),
            text_input=wanted.prompt,
            chat_request=None if chat is None else dump(chat),
            sampling_parameters=None if parameters is None else dump(parameters),
        )
    )
    return {"count": len(tokens), "max_model_len": None, "tokens": tokens, "token_strs": None}
