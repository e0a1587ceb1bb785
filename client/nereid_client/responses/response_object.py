"""What a response object repeats of its request."""

from nereid_client.protocol.generation_requests import ONLY_TIER
from nereid_client.protocol.responses_request import Json, ResponsesRequest


def frame_of(
    request: ResponsesRequest, response_id: str, model: str, created: int, *, is_kept: bool
) -> Json:
    """The fields of a response object that stay as they are; null is the model's own default.

    Args:
        request: what was asked for.
        response_id: of the response.
        model: name of the served model.
        created: Unix time in seconds.
        is_kept: whether it can be asked for again.
    """
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "model": model,
        "background": bool(request.background),
        "store": is_kept,
        "instructions": request.instructions,
        "previous_response_id": request.previous_response_id,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": request.effort, "summary": request.summary},
        "service_tier": ONLY_TIER,
        "temperature": request.temperature,
        "text": {"format": request.format},
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }
