# SPDX-License-Identifier: Apache-2.0
"""Reads requests and builds responses with the Python API of Triton server.

Only this module imports this API.
"""

import json
import logging
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils
from pydantic_core import to_json

from nereid_backend.errors import CapacityError, DeadlineError, NereidError, RequestError
from nereid_backend.serving.error_message import client_message

log = logging.getLogger("nereid")

Tensors = dict[str, npt.NDArray[Any]]
"""Output tensors by name."""


def optional_text(request: Any, name: str) -> str | None:
    """Return the text of an optional STRING input of shape [1]; None if the input is missing.

    Raises:
        RequestError: the input is not UTF-8, or does not have exactly one element.
    """
    value = _single(request, name)
    if value is None:
        return None
    try:
        text: str = value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: the text is not valid UTF-8: {error}") from None
    return text


def optional_bool(request: Any, name: str) -> bool | None:
    """Return the value of an optional BOOL input of shape [1]; None if the input is missing."""
    value = _single(request, name)
    return None if value is None else bool(value)


def has_input(request: Any, name: str) -> bool:
    """Return whether the input with the name `name` is present and has at least one element."""
    values = optional_array(request, name)
    return values is not None and values.size > 0


def array(request: Any, name: str) -> npt.NDArray[Any]:
    """Return a required input as a one-dimensional array."""
    values = optional_array(request, name)
    assert values is not None, "Triton server refuses requests without a required input"
    return values


def has_tensor(request: Any, name: str) -> bool:
    """Return whether the request has an input with the name `name`. The input may be empty."""
    return pb_utils.get_input_tensor_by_name(request, name) is not None


def optional_array(request: Any, name: str) -> npt.NDArray[Any] | None:
    """Return an optional input as a one-dimensional array; None if the input is missing."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().reshape(-1)


def parameters(request: Any) -> dict[str, Any]:
    """Return the parameters of a request.

    Raises:
        RequestError: a parameter is not UTF-8. Triton server's HTTP endpoint does not check this.
    """
    try:
        text = request.parameters()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"parameters: the parameters of the request are not valid UTF-8: {error}. Send UTF-8."
        ) from None
    values: dict[str, Any] = json.loads(text or "{}")
    return values


def response(tensors: Tensors) -> Any:
    """Return a response with the output tensors `tensors`."""
    return pb_utils.InferenceResponse([pb_utils.Tensor(*item) for item in tensors.items()])


def error_response(error: Exception) -> Any:
    """Return a response with an error.

    A gRPC stream transports only the message of an error, not its code. The message therefore
    begins with the code. Example: "[INVALID_ARGUMENT] top_p: the value must be ...".
    """
    name, code = _error_code(error)
    return pb_utils.InferenceResponse(
        error=pb_utils.TritonError(f"[{name}] {client_message(error)}", code)
    )


def send(sender: Any, reply: Any = None, *, final: bool = False) -> None:
    """Send a response, the final flag, or a response together with the final flag.

    The final flag means that no further response follows.

    Args:
        sender: the server's response sender.
        reply: the response; None to send only the flag.
        final: whether to set the flag.
    """
    flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
    if reply is None:
        sender.send(flags=flags)
    else:
        sender.send(reply, flags=flags)


def strings(*values: str) -> npt.NDArray[np.object_]:
    """Return a STRING tensor of shape [n] that contains the texts `values`."""
    return np.array([value.encode("utf-8") for value in values], dtype=np.object_)


def json_strings(*values: object) -> npt.NDArray[np.object_]:
    """Convert each value to JSON, and return a STRING tensor of shape [n] with the JSON texts."""
    return np.array([to_json(value) for value in values], dtype=np.object_)


def load_error(error: NereidError) -> Exception:
    """Log an error of `initialize` as one line, and return an exception for Triton server.

    `initialize` must raise the returned exception.
    """
    progress(f"error: {error}")
    raised: Exception = pb_utils.TritonModelException(str(error))
    return raised


def progress(line: str) -> None:
    """Write one line about a slow operation to the server log. `nereid serve` shows such lines."""
    # In a stub, the encoding of `sys.stdout` is ASCII, but `line` can contain other characters,
    # such as those of a folder's name.
    sys.stdout.buffer.write(f"nereid: {line}\n".encode("utf-8", "backslashreplace"))
    sys.stdout.flush()


def _single(request: Any, name: str) -> Any:
    """Return the only element of an optional input; None if the input is missing."""
    values = optional_array(request, name)
    if values is None:
        return None
    if values.size != 1:
        raise RequestError(
            f"{name}: the input must have exactly one element, but it has {values.size}."
        )
    return values[0]


def _error_code(error: Exception) -> tuple[str, Any]:
    """Return two codes for `error`: the name of the gRPC status code, and Triton server's code."""
    if isinstance(error, RequestError):
        return "INVALID_ARGUMENT", pb_utils.TritonError.INVALID_ARG
    if isinstance(error, CapacityError):
        return "UNAVAILABLE", pb_utils.TritonError.UNAVAILABLE
    if isinstance(error, DeadlineError):
        # Triton server has no error code for an exceeded time limit. UNAVAILABLE is used instead,
        # so that the server's HTTP endpoint does not return the HTTP status of an internal error.
        return "DEADLINE_EXCEEDED", pb_utils.TritonError.UNAVAILABLE
    return "INTERNAL", pb_utils.TritonError.INTERNAL
