# SPDX-License-Identifier: Apache-2.0
"""Lists, extends and removes the sessions of the prefix cache.

All requests with the same client and the same `prompt_cache_key` belong to one session. The cached
prefixes of a session are retained for some time; see core/blocks/eviction_order.py.
"""

from collections.abc import Mapping
from typing import Any

from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.blocks.eviction_order import SessionUse
from nereid_backend.core.blocks.prefix_cache import PrefixCache
from nereid_backend.errors import RequestError

# The largest number of sessions in the statistics. If there are more sessions, the sessions that
# expire first are omitted.
_MAX_LISTED = 1000


class PrefixSessions:
    """Gives operators and clients access to the sessions of a prefix cache.

    Only the engine's thread may call the methods.
    """

    def __init__(self, cache: PrefixCache | None, pool: BlockPool, block_size: int) -> None:
        """Store references to the prefix cache and to the pool of blocks.

        `cache` is None if prefix caching is off.
        """
        self._cache = cache
        self._pool = pool
        self._block_size = block_size

    def statistics(self, client_id: str | None = None) -> dict[str, Any]:
        """Return the counters of the prefix cache and a list of its sessions.

        Example of a session in the list: `{"client_id": "team-a", "prompt_cache_key": "chat-1",
        "num_tokens": 4096, "expires_in_s": 287.5}`.

        Args:
            client_id: the client whose sessions are listed; None lists the sessions of all clients.
        """
        sessions = self._matching(client_id, None)
        last_first = sorted(sessions, key=lambda session: session.expires_in_s, reverse=True)
        listed = last_first[:_MAX_LISTED]
        return {
            "num_blocks": self._pool.num_blocks,
            "num_used_blocks": self._pool.num_used,
            "num_cached_blocks": self._pool.num_cached,
            "num_retained_blocks": self._pool.idle.num_retained,
            **self._cache_counters(),
            "num_sessions": len(sessions),
            "sessions": [self._describe(session) for session in listed],
        }

    def _cache_counters(self) -> dict[str, int]:
        """Return the counters of the prefix cache. All are 0 if prefix caching is off."""
        cache = self._cache
        if cache is None:
            return {"num_snapshots": 0, "num_queried_tokens": 0, "num_hit_tokens": 0}
        return {
            "num_snapshots": 0 if cache.snapshots is None else len(cache.snapshots),
            "num_queried_tokens": cache.num_queried_tokens,
            "num_hit_tokens": cache.num_hit_tokens,
        }

    def _describe(self, session: SessionUse) -> dict[str, Any]:
        """Return a session as a JSON object. The docstring of `statistics` contains an example."""
        return {
            "client_id": session.key.client_id,
            "prompt_cache_key": session.key.prompt_cache_key,
            "num_tokens": session.num_items * self._block_size,
            "expires_in_s": round(session.expires_in_s, 3),
        }

    def extend(self, client_id: str | None, prompt_cache_key: str, seconds: float) -> int:
        """Retain the matching sessions for at least `seconds` seconds, and return their number.

        A session that expires later anyway is not changed.

        Args:
            client_id: the client of the session. None selects the sessions of all clients with
                this key.
            prompt_cache_key: the key of the session.
            seconds: the time in seconds.
        """
        sessions = self._matching(client_id, prompt_cache_key)  # empty if there is no cache
        for session in sessions:
            assert self._cache is not None, "without a cache, there are no sessions"
            self._cache.extend_session(session.key, seconds)
        return len(sessions)

    def drop(self, client_id: str | None, prompt_cache_key: str | None) -> int:
        """Remove the cached blocks of sessions, and return the number of removed tokens.

        A block that a running sequence uses is not removed.

        Args:
            client_id: the client of the sessions; None selects all clients.
            prompt_cache_key: the key of the sessions; None selects all keys. If both arguments are
                None, the blocks that belong to no session are removed, too.
        """
        if self._cache is None:
            return 0
        if client_id is None and prompt_cache_key is None:
            return self._cache.drop_all() * self._block_size
        num_blocks = 0
        for session in self._matching(client_id, prompt_cache_key):
            num_blocks += self._cache.drop_session(session.key)
        return num_blocks * self._block_size

    def call(self, operation: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Execute an operation that an operator or a client has requested, and return its result.

        Example: the operation "drop" with {"client_id": "team-a"} calls `drop("team-a", None)` and
        returns {"num_dropped_tokens": 4096}.

        Args:
            operation: the name of a method: "statistics", "extend" or "drop".
            values: the arguments of the method by their names. "client_id" and "prompt_cache_key"
                may be missing, and are then None. For "extend", the caller has checked that
                "seconds" is a valid number.

        Raises:
            RequestError: if the operation is unknown, or if "extend" has no prompt_cache_key.
        """
        client_id = values.get("client_id")
        key = values.get("prompt_cache_key")
        match operation:
            case "statistics":
                return self.statistics(client_id)
            case "drop":
                return {"num_dropped_tokens": self.drop(client_id, key)}
            case "extend" if key is not None:
                return {"num_sessions": self.extend(client_id, key, values["seconds"])}
        # One message explains both mistakes: an unknown operation, and "extend" without a key.
        raise RequestError(
            "cache: the value must be 'statistics', 'drop' or 'extend' ('extend' requires "
            f"prompt_cache_key), but it is {operation!r}."
        )

    def _matching(self, client_id: str | None, prompt_cache_key: str | None) -> list[SessionUse]:
        """Return the sessions that have this client id and this `prompt_cache_key`.

        The argument None matches every value.
        """
        return [
            session
            for session in self._pool.idle.sessions()
            if client_id in (None, session.key.client_id)
            and prompt_cache_key in (None, session.key.prompt_cache_key)
        ]
