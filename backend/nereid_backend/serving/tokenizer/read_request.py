# SPDX-License-Identifier: Apache-2.0
"""Reads JSON objects and sampling parameters from a request to the model `tokenizer`."""

import json
import re
from typing import Any

from nereid_backend.errors import RequestError
from nereid_backend.field_checks import shown
from nereid_backend.serving import tensor_names, tensors
from nereid_backend.serving.tokenizer.request_fields import refuse_unknown
from nereid_backend.serving.tokenizer.request_limits import RequestLimits
from nereid_backend.serving.tracing import TRACEPARENT

_SERVER_PARAMETER_PREFIX = "triton_"
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def json_object(
    request: Any,  # noqa: ANN401 - the server's own type
    name: str,
    limits: RequestLimits,
) -> dict[str, Any] | None:
    """Parse the input tensor `name`, and return the JSON object; None if there is no such tensor.

    Raises:
        RequestError: the tensor's text is too long or is not a JSON object.
    """
    text = tensors.optional_text(request, name)
    if text is None:
        return None
    limits.check_json(name, text)
    try:
        value = json.loads(text)
    except RecursionError:
        raise limits.depth_error(name) from None
    except ValueError as error:
        raise RequestError(f"{name}: the text is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(
            f"{name}: the text must be a JSON object, but the request has {shown(value)}."
        )
    if _ESCAPED_SURROGATE.search(text):
        try:
            _refuse_surrogates(name, value)
        except RecursionError:
            raise limits.depth_error(name) from None
    return value


def _refuse_surrogates(name: str, value: dict[str, Any]) -> None:
    r"""Raise a RequestError if a text in a JSON object contains half of a surrogate pair.

    Such a text, for example "\ud800", cannot be encoded in UTF-8.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError(
            f"{name}: a text contains half of a surrogate pair, which is not a valid character."
        ) from None


def sampling_fields(
    request: Any,  # noqa: ANN401 - the server's own type
    body: dict[str, Any] | None,
    limits: RequestLimits,
) -> dict[str, Any]:
    """Return the fields of a request.

    For a chat, the fields are the body. For a completion, the fields are the sampling parameters.

    The sampling parameters of a completion are in the input sampling_parameters. If a completion
    does not have this input, the sampling parameters are in the parameters of the Triton request.
    """
    if body is not None:
        limit = body.get("max_completion_tokens")
        return {**body, "max_tokens": limit if limit is not None else body.get("max_tokens")}
    fields = json_object(request, tensor_names.SAMPLING_PARAMETERS, limits)
    if fields is not None:
        # Unknown fields are an error only in the input sampling_parameters. The body of a chat and
        # the parameters of a Triton request may contain other fields, too.
        refuse_unknown(fields)
        return fields
    parameters = json.loads(request.parameters() or "{}")
    # The server and its clients add parameters for other purposes. The names of these parameters
    # begin with "triton_".
    return {
        name: value
        for name, value in parameters.items()
        if not name.startswith(_SERVER_PARAMETER_PREFIX) and name != TRACEPARENT
    }
