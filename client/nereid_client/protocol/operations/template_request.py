"""The body of `POST /template/inspect`."""

from typing import Annotated

from pydantic import Field

from nereid_client.protocol.request_body import RequestBody


class InspectRequest(RequestBody):
    """The body of `POST /template/inspect`."""

    template: Annotated[str, Field(min_length=1)]
    """The Jinja source of a chat template."""
