# SPDX-License-Identifier: Apache-2.0
"""The message of an error that a client receives."""

from nereid_backend.errors import ConfigError, ModelError, NereidError

# If a gRPC client does not use a stream, the client receives an error message in the metadata of
# the response. The client accepts at most 8 KiB of metadata. In the metadata, each byte of a
# character outside ASCII is encoded as three bytes.
_HALF_MESSAGE_BYTES = 1024


def client_message(error: Exception) -> str:
    """Return the message that a client gets for an error.

    The message of an unexpected error begins with the class of the error. Example: the message of a
    KeyError begins with "KeyError: ". The middle of a very long message is replaced by an ellipsis.
    The end is kept, because it often contains the remedy.
    """
    message = str(error)
    # The server raises ConfigError and ModelError when it starts. In the response to a request,
    # these errors are unexpected, like the errors of other packages.
    if not isinstance(error, NereidError) or isinstance(error, ConfigError | ModelError):
        message = f"{type(error).__name__}: {message}"
    encoded = message.encode("utf-8", "backslashreplace")
    if len(encoded) <= 2 * _HALF_MESSAGE_BYTES:
        return encoded.decode()
    beginning = encoded[:_HALF_MESSAGE_BYTES].decode("utf-8", "ignore")
    end = encoded[-_HALF_MESSAGE_BYTES:].decode("utf-8", "ignore")
    return f"{beginning}...{end}"
