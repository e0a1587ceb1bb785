# SPDX-License-Identifier: Apache-2.0
"""Reads JSON objects and sampling parameters from a request to the model `tokenizer`."""

import json
from typing import Any

from nereid_backend.errors import RequestError
from nereid_backend.request_field_checks import shown
from nereid_backend.serving import tensor_names, triton_api
from nereid_backend.serving.tokenizer.request_fields import refuse_unknown
from nereid_backend.serving.tokenizer.request_limits import RequestLimits
from nereid_backend.serving.tokenizer.surrogate_pairs import refuse_surrogates
from nereid_backend.serving.tracing import TRACEPARENT

_SERVER_PARAMETER_PREFIX = "triton_"


def json_object(
    request: Any,  # noqa: ANN401 - the server's own type
    name: str,
    limits: RequestLimits,
) -> dict[str, Any] | None:
    """Parse the input tensor `name`, and return the JSON object; None if there is no such tensor.

    Raises:
        RequestError: the tensor's text is too long, is not a JSON object, or contains half of a
            surrogate pair.
    """
    text = triton_api.optional_text(request, name)
    if text is None:
        return None
    limits.check_json(name, text)
    try:
        value = json.loads(text)
        # The error below contains the value, and the server cannot send half of a surrogate pair.
        refuse_surrogates(name, text, value)
    except ValueError as error:
        raise RequestError(f"{name}: the text is not valid JSON: {error}") from None
    except RecursionError:
        raise limits.depth_error(name) from None
    if not isinstance(value, dict):
        raise RequestError(
            f"{name}: the text must be a JSON object, but the request has {shown(value)}."
        )
    return value


def sampling_fields(
    request: Any,  # noqa: ANN401 - the server's own type
    body: dict[str, Any] | None,
    limits: RequestLimits,
) -> dict[str, Any]:
    """Return the fields of a request, such as `{"temperature": 0.5, "max_tokens": 100}`.

    The fields come from one of three sources:

        chat                                             the JSON body
        completion with the tensor sampling_parameters   the JSON object in this tensor
        other completion                                 the parameters of the Triton request

    Args:
        request: the server's request.
        body: the body of a chat; None for a completion.
        limits: the limits on the size of the JSON text.

    Raises:
        RequestError: the tensor is not a JSON object, contains an unknown field, or contains a
            field although the request is a chat.
    """
    fields = json_object(request, tensor_names.SAMPLING_PARAMETERS, limits)
    if body is not None:
        if fields:
            raise RequestError(
                f"sampling_parameters: a request with chat_request must have no fields here, but "
                f"has {shown(sorted(fields))}. Put the fields into the JSON object of chat_request."
            )
        return _chat_fields(body)
    if fields is not None:
        # Unknown fields are an error only in the input sampling_parameters. The body of a chat and
        # the parameters of a Triton request may contain other fields, too.
        refuse_unknown(fields)
        return fields
    return _parameter_fields(request)


def _chat_fields(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a chat. If max_completion_tokens is set, max_tokens gets its value."""
    max_tokens = body.get("max_completion_tokens")
    if max_tokens is None:
        max_tokens = body.get("max_tokens")
    return {**body, "max_tokens": max_tokens}


def _parameter_fields(request: Any) -> dict[str, Any]:  # noqa: ANN401 - the server's own type
    """Return a Triton request's parameters, without `traceparent` and without `triton_*`."""
    # The server and its clients add parameters for other purposes. The names of these parameters
    # begin with "triton_".
    return {
        name: value
        for name, value in triton_api.parameters(request).items()
        if not name.startswith(_SERVER_PARAMETER_PREFIX) and name != TRACEPARENT
    }
