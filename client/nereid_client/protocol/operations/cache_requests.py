"""The body of `POST /v1/cache`, and the times for which cached prefixes are retained."""

from typing import Literal

from nereid_client.protocol.request_body import RequestBody

Retention = Literal["in_memory", "5m", "1h", "24h"]
"""The values of the field `prompt_cache_retention`."""

RETENTION_S: dict[Retention, int] = {"in_memory": 300, "5m": 300, "1h": 3600, "24h": 86400}
"""Maps each value of `Retention` to a time in seconds."""


class ExtendSessionRequest(RequestBody):
    """The body of `POST /v1/cache`."""

    model: str | None = None
    """The name of the language model."""
    prompt_cache_key: str
    """The `prompt_cache_key` of the requests whose cached prefixes are retained longer."""
    prompt_cache_retention: Retention = "1h"
    """The time from now on: `in_memory` or `5m` (5 minutes), `1h` or `24h`."""
