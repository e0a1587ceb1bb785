"""The fields of a response object that are copied from the request."""

from nereid_client.protocol.common_fields import SERVICE_TIER
from nereid_client.protocol.responses_request import ResponsesRequest
from nereid_client.protocol.responses_tools import Json


def request_fields(
    request: ResponsesRequest, response_id: str, model: str, created: int, *, is_stored: bool
) -> Json:
    """Return the fields of a response object that do not change while the response is generated.

    If the request does not have a sampling parameter, the parameter is null in the response object.
    The default of the model then applies.

    Args:
        request: the request.
        response_id: the id of the response.
        model: the name of the served model.
        created: the Unix time in seconds.
        is_stored: whether the response will be stored.
    """
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "model": model,
        "background": bool(request.background),
        "store": is_stored,
        "frequency_penalty": request.frequency_penalty,
        "instructions": request.instructions,
        "previous_response_id": request.previous_response_id,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "presence_penalty": request.presence_penalty,
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": request.prompt_cache_retention,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": request.effort, "summary": request.summary},
        "service_tier": SERVICE_TIER,
        "temperature": request.temperature,
        "text": {"format": request.format},
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }
