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

    Raises: FieldError if a cache_control is wrong.
    """
    ttls: list[Literal["5m", "1h"]] = []
    for path_prefix, cacheable in _cacheable_objects(body):
        if cacheable.get(_FIELD) is not None:
            control = validated(_CacheControl, cacheable[_FIELD], f"{path_prefix}{_FIELD}")
            ttls.append(control.ttl or "5m")
    return max(ttls, key=lambda ttl: _TTL_SECONDS[ttl], default=None)


def _cacheable_objects(body: Json) -> Iterator[tuple[str, Json]]:
    """Yield a pair (path prefix, object) for each object that can have the field cache_control.

    These objects are the body, the tools, and the blocks of the system prompt, of the messages and
    of tool results. The prefix of a tool's fields is "tools[0].", and that of the body's is "".
    """
    yield "", body
    for name in ("tools", "system"):
        yield from _objects_of_list(name, body.get(name))
    for message_prefix, message in _objects_of_list("messages", body.get("messages")):
        blocks = _objects_of_list(f"{message_prefix}content", message.get("content"))
        for block_prefix, block in blocks:
            yield block_prefix, block
            yield from _objects_of_list(f"{block_prefix}content", block.get("content"))


def _objects_of_list(path: str, value: object) -> Iterator[tuple[str, Json]]:
    """Yield a pair (path prefix, object) for each object in a list.

    Yield nothing if the value is no list.

    Example: the path "tools" and the value [{"name": "a"}] yield ("tools[0].", {"name": "a"}).
    """
    for index, item in enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, Mapping):
            yield f"{path}[{index}].", item
