"""The body of `POST /abort_request` (SGLang) and `POST /abort_requests` (vLLM)."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from nereid_client.errors import FieldError
from nereid_client.protocol.request_body import RequestBody

_COMPLETION_PREFIXES = ("chatcmpl-", "cmpl-")
# The largest number of ids in the field request_ids. A frontend never runs so many requests at the
# same time. The limit is needed because the event loop processes the ids. If a client could send
# millions of ids, all other requests would be delayed.
_MAX_IDS = 10_000


class AbortRequest(RequestBody):
    """The body of `POST /abort_request` and `POST /abort_requests`. One field is required."""

    rid: str | None = None
    """The id of one request, as in SGLang: the header X-Request-Id, the field request_id or rid, or
    the id of the completion."""
    request_ids: Annotated[list[str] | None, Field(max_length=_MAX_IDS)] = None
    """The ids of several requests, as in vLLM."""
    abort_all: bool | None = None
    """Whether all requests are aborted. A client with an API key of the key file aborts only its
    own requests."""

    @model_validator(mode="after")
    def _check_ids(self) -> Self:
        if not (self.abort_all or self.rid or self.request_ids):
            raise FieldError("rid", "One of rid, request_ids and abort_all=true is required")
        return self

    @property
    def ids(self) -> set[str] | None:
        """The ids of the requests to abort. None means all requests.

        The id of a completion consists of a prefix, such as "chatcmpl-", and the id of the request.
        The result also contains the ids without these prefixes.

        Example: {"rid": "chatcmpl-a"} returns {"chatcmpl-a", "a"}.
        """
        if self.abort_all:
            return None
        ids = {self.rid or "", *(self.request_ids or ())}
        ids.discard("")
        for prefix in _COMPLETION_PREFIXES:
            ids |= {given_id.removeprefix(prefix) for given_id in ids}
        return ids
