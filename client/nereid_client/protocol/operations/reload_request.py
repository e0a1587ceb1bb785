"""The body of `POST /v1/reload`."""

from typing import Literal

from nereid_client.protocol.request_body import RequestBody


class ReloadRequest(RequestBody):
    """The body of `POST /v1/reload`. All fields are optional."""

    model: str | None = None
    """The name of the language model whose weights are replaced."""
    path: str | None = None
    """The folder of the new checkpoint on the server. By default, the present folder is read
    again. The new checkpoint must have the same tensors as the present checkpoint."""
    running_requests: Literal["finish", "refuse"] = "finish"
    """`finish`: running requests finish with the old weights. `refuse`: running requests end with
    an error that tells the client to try again."""
