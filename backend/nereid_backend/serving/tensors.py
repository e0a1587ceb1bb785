# SPDX-License-Identifier: Apache-2.0
"""How tensors are read and built: the Triton server's Python API stays in this module."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from nereid_backend.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    ModelError,
    NereidError,
    RequestError,
)

log = logging.getLogger("nereid")


def optional_text(request: Any, name: str) -> str | None:  # noqa: ANN401 - the server's own type
    """The string in an optional STRING [1] input.

    Raises:
        RequestError: it is no UTF-8, or not one string.
    """
    value = _single(request, name)
    if value is None:
        return None
    try:
        text: str = value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: is not UTF-8: {error}") from None
    return text


def optional_bool(request: Any, name: str) -> bool | None:  # noqa: ANN401 - the server's own type
    """The value of an optional BOOL [1] input."""
    value = _single(request, name)
    return None if value is None else bool(value)


def optional_ids(request: Any, name: str) -> list[int] | None:  # noqa: ANN401 - the server's own type
    """The token ids in an optional INT32 [-1] input."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    ids: list[int] = tensor.as_numpy().reshape(-1).tolist()
    return ids


def has_input(request: Any, name: str) -> bool:  # noqa: ANN401 - the server's own type
    """Whether an optional input was sent with anything in it."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return tensor is not None and tensor.as_numpy().size > 0


def array(request: Any, name: str) -> npt.NDArray[Any]:  # noqa: ANN401 - the server's own type
    """A required input as a flat array."""
    values: npt.NDArray[Any] = pb_utils.get_input_tensor_by_name(request, name).as_numpy()
    return values.reshape(-1)


def response(tensors: Mapping[str, npt.NDArray[Any]]) -> Any:  # noqa: ANN401 - the server's own type
    """A response with these outputs."""
    return pb_utils.InferenceResponse([pb_utils.Tensor(n, array) for n, array in tensors.items()])


def error_response(error: Exception) -> Any:  # noqa: ANN401 - the server's own type
    """A response that carries an error.

    A stream over gRPC carries an error's message without its code, so the message begins with it.
    """
    name, code = _error_code(error)
    return pb_utils.InferenceResponse(
        error=pb_utils.TritonError(f"[{name}] {_message(error)}", code)
    )


def send(sender: Any, reply: Any = None, *, final: bool = False) -> None:  # noqa: ANN401
    """Send a response, the final flag, or both."""
    flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
    if reply is None:
        sender.send(flags=flags)
    else:
        sender.send(reply, flags=flags)


def strings(*values: str) -> npt.NDArray[np.object_]:
    """A STRING tensor [n] from text."""
    return np.array([value.encode("utf-8") for value in values], dtype=np.object_)


def load_error(error: NereidError) -> Exception:
    """What a model's ``initialize`` raises; the log gets one clear line beside the server's own."""
    progress(f"error: {error}")
    raised: Exception = pb_utils.TritonModelException(str(error))
    return raised


def progress(line: str) -> None:
    """Report a slow step; ``nereid serve`` shows these lines of the server's log."""
    print(f"nereid: {line}", flush=True)  # noqa: T201 - the stub's standard output is the server's log


def _single(request: Any, name: str) -> Any:  # noqa: ANN401 - bytes or a number
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    values = tensor.as_numpy().reshape(-1)
    if values.size != 1:
        raise RequestError(f"{name}: must hold one value, got {values.size}")
    return values[0]


def _error_code(error: Exception) -> tuple[str, Any]:
    """The gRPC status code's name, and the server's own value for it."""
    if isinstance(error, RequestError):
        return "INVALID_ARGUMENT", pb_utils.TritonError.INVALID_ARG
    if isinstance(error, CapacityError):
        return "UNAVAILABLE", pb_utils.TritonError.UNAVAILABLE
    if isinstance(error, DeadlineError):
        # The server has no such code; this one is the nearest that HTTP tells from a failure.
        return "DEADLINE_EXCEEDED", pb_utils.TritonError.UNAVAILABLE
    return "INTERNAL", pb_utils.TritonError.INTERNAL


def _message(error: Exception) -> str:
    if isinstance(error, NereidError) and not isinstance(error, ConfigError | ModelError):
        return str(error)
    return f"{type(error).__name__}: {error}"
