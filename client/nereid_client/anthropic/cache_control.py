"""Read the field `cache_control` of Anthropic's API.

The field marks the end of a prompt prefix that the server should cache. Nereid caches all prompts,
so the position of the field has no effect. The member `ttl` of the field is a duration. During this
time, the server evicts other cached blocks before it evicts the prefix of the request.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from nereid_client.protocol.request_body import RequestBody, validated

Json = Mapping[str, Any]

_FIELD = "cache_control"
_TTL_SECONDS: dict[Literal["5m", "1h"], int] = {"5m": 300, "1h": 3600}


class _CacheControl(RequestBody):
    """The field `cache_control` of a request, a tool or a content block."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


def cache_retention(body: Json) -> Literal["5m", "1h"] | None:
    """Return the longest `ttl` of a request, or None if the request contains no cache_control.

    The `ttl` is the duration for which the client wants the prompt to stay in the cache. A
    cache_control without a `ttl` has the `ttl` "5m".

    Example: {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi",
    "cache_control": {"type": "ephemeral"}}]}]} returns "5m".

    Args:
        body: the request body as the client sent it.

    Raises: FieldError if a cache_control is wrong.
    """
    ttls: list[Literal["5m", "1h"]] = []
    for place, part in _parts(body):
        if part.get(_FIELD) is not None:
            control = validated(_CacheControl, part[_FIELD], f"{place}{_FIELD}")
            ttls.append(control.ttl or "5m")
    return max(ttls, key=lambda ttl: _TTL_SECONDS[ttl], default=None)


def _parts(body: Json) -> Iterator[tuple[str, Json]]:
    """Yield the path and the value of each object that can have the field cache_control."""
    yield "", body
    for name in ("tools", "system"):
        yield from _items(name, body.get(name))
    for place, message in _items("messages", body.get("messages")):
        for inner, block in _items(f"{place}content", message.get("content")):
            yield inner, block
            yield from _items(f"{inner}content", block.get("content"))


def _items(name: str, value: object) -> Iterator[tuple[str, Json]]:
    """Yield the path of each object in a list, such as "tools[0].", and the object."""
    for index, item in enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, Mapping):
            yield f"{name}[{index}].", item
