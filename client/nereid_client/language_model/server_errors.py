"""Converts error messages of the Triton server to `BackendError` objects."""

import re

from nereid_client.errors import BackendError

# Each of these texts occurs in an error message of the Triton server.
_STUB_DIED = "is not healthy"  # the process of a model has died, and the server must be restarted
_STOPPING = "Server is stopping"
# Matches the prefixes that the Triton server adds to the messages of models. Example: "[request id:
# a] in ensemble 'llm', [INVALID_ARGUMENT] seed: must be an integer".
_PLACE_PREFIX = re.compile(r"^(\[request id: [^\]]*\] )?(in ensemble '[^']*', )?")
_CODE_PREFIX = re.compile(r"^\[([A-Z_]+)\] ")


def unreachable_message(url: str) -> str:
    """Return the error message for a Triton server that does not accept connections."""
    return (
        f"The frontend cannot connect to the Triton server at {url} (grpc_url). Check that the "
        "server is running."
    )


def read_error(text: str) -> BackendError:
    """Convert an error message of the Triton server to a BackendError. Remove the prefixes.

    A model puts the code of its error before the message. If the message has no code, the server
    itself has raised the error. docs/reference/tensors.md describes the format.

    Example: "in ensemble 'llm', [INVALID_ARGUMENT] seed: must be an integer" returns
    BackendError("INVALID_ARGUMENT", "seed: must be an integer").
    """
    text = _PLACE_PREFIX.sub("", text)
    match = _CODE_PREFIX.match(text)
    if match is not None:
        return BackendError(match[1], text[match.end() :])
    # The frontend calls only models of the model repository. If the server reports an unknown
    # model, this model is not loaded at the moment, and the client can try again later.
    is_model_unloaded = text.startswith("Request for unknown model")
    if is_model_unloaded or means_outage(text):
        return BackendError("UNAVAILABLE", text)
    return BackendError("INTERNAL", text)


def means_outage(text: str) -> bool:
    """Return whether a message means that the Triton server is stopping or must be restarted."""
    return means_dead_model(text) or _STOPPING in text


def means_dead_model(text: str) -> bool:
    """Return whether a message means that the process of a model has died."""
    return _STUB_DIED in text
