"""POST /tokenize and /detokenize."""

from typing import Any

from fastapi import APIRouter, Request

from nereid_client.embeddings.model_choice import select_language_model
from nereid_client.errors import BackendError
from nereid_client.language_model.backend import Generation
from nereid_client.protocol.operations.tokenize_request import DetokenizeRequest, TokenizeRequest
from nereid_client.request_context import (
    check_unicode,
    context_of,
    convert,
    read_prompt_body,
    to_json,
    unique_request_id,
    validate,
)
from nereid_client.streaming.field_names import FieldNames

router = APIRouter(tags=["Language model"])

_DETOKENIZE_FIELD_NAMES = FieldNames({"prompt": "tokens"})
"""In the errors of the backend, the field with the token ids is called `prompt`, not `tokens`."""


@router.post("/tokenize", summary="Tokenize a prompt or a chat")
@router.post("/v1/tokenize", summary="Tokenize a prompt or a chat (SGLang's path)")
async def tokenize(request: Request) -> dict[str, Any]:
    """Return the token ids of the prompt and their number, in vLLM's format.

    If the request contains a chat, the prompt is the chat as rendered by the chat template.
    `token_strs` is null, because the server returns only token ids.
    """
    body = await read_prompt_body(request)
    tokenize_request = await convert(request, lambda: validate(TokenizeRequest, body))
    await select_language_model(request, tokenize_request.model)
    if tokenize_request.prompt is not None:
        check_unicode(tokenize_request.prompt)
    chat = tokenize_request.chat_request(body)
    parameters = tokenize_request.tokenizer_parameters()
    tokens = await context_of(request).backend.tokenize(
        Generation(
            unique_request_id(request),
            text_input=tokenize_request.prompt,
            chat_request=None if chat is None else to_json(chat),
            # The tokenizer reads these parameters from the tensor `sampling_parameters`, although
            # they do not concern sampling.
            sampling_parameters=None if parameters is None else to_json(parameters),
        )
    )
    limits = await context_of(request).limits.get()
    return {
        "count": len(tokens),
        "max_model_len": None if limits is None else limits.max_model_len,
        "tokens": tokens,
        "token_strs": None,
    }


@router.post("/detokenize", summary="Convert token ids to text")
@router.post("/v1/detokenize", summary="Convert token ids to text (SGLang's path)")
async def detokenize(request: Request) -> dict[str, str]:
    """Convert token ids to a text.

    The response has the text in `prompt`, as in vLLM, and in `text`, as in SGLang.
    """
    given = await read_prompt_body(request)
    body = await convert(request, lambda: validate(DetokenizeRequest, given))
    await select_language_model(request, body.model)
    try:
        text = await context_of(request).backend.detokenize(
            unique_request_id(request),
            body.tokens,
            skip_special_tokens=bool(body.skip_special_tokens),
        )
    except BackendError as error:
        # The backend reports an error about the field `prompt`. Rename the field in the error,
        # because the client sent the token ids in the field `tokens`.
        raise _DETOKENIZE_FIELD_NAMES.rename_fields(error) from None
    return {"prompt": text, "text": text}
