# SPDX-License-Identifier: Apache-2.0
"""The order in which the idle items of a cache are evicted.

An item is a block or a snapshot. An item is idle while no sequence uses it. A session is a client
with a `prompt_cache_key`. The items of a session are retained for some time after its last request:

    idle items without a session     evicted first, the oldest first
    idle items of a session          evicted if no other item is idle. A session loses items only if
                                     it has at least the mean number of items of all sessions. Of
                                     these sessions, the one that was used longest ago comes first
    expired sessions                 their items count as the oldest items without a session

If the sessions retain more than `max_retained` idle items, age alone decides between the items with
and without a session. Retention is therefore a preference. A request never waits for it.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item", bound=Hashable)

# The smallest number of seconds between two searches for expired sessions.
_EXPIRY_INTERVAL_S = 1.0


class SessionKey(NamedTuple):
    """The name of a session.

    Attributes:
        client_id: the client that sent the requests; "" if unknown.
        prompt_cache_key: the key in the requests; "" for requests that are retained without a key.
    """

    client_id: str
    prompt_cache_key: str


class SessionUse(NamedTuple):
    """The number of items that a session retains, and the time until the session expires.

    Attributes:
        key: the name of the session.
        num_items: the number of items that the session retains.
        expires_in_s: the seconds until the items are no longer retained.
    """

    key: SessionKey
    num_items: int
    expires_in_s: float


@dataclass(slots=True)
class _Session(Generic[Item]):
    """The retained items of one session.

    Attributes:
        key: the name of the session.
        expires: the time by the clock at which the items are no longer retained.
        last_use: the number of the last change of the order that added items to the session.
        idle: the idle items, from the oldest on. The dict is used as an ordered set.
        used: the items that sequences use.
    """

    key: SessionKey
    expires: float
    last_use: int
    idle: OrderedDict[Item, None] = field(default_factory=OrderedDict)
    used: set[Item] = field(default_factory=set)

    @property
    def num_items(self) -> int:
        return len(self.idle) + len(self.used)


class EvictionOrder(Generic[Item]):
    """The cached items that no sequence uses, in the order in which they are evicted."""

    def __init__(self, max_retained: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Create an order without items.

        Args:
            max_retained: the number of retained idle items above which age decides between the
                items with and without a session.
            clock: returns a time in seconds that never goes back.
        """
        self._max_retained = max_retained
        self._clock = clock
        # A mapping from each idle item that no session retains to the number of the change that
        # made the item idle. The oldest item comes first.
        self._plain: OrderedDict[Item, int] = OrderedDict()
        # The session that was used longest ago comes first.
        self._sessions: OrderedDict[SessionKey, _Session[Item]] = OrderedDict()
        # A mapping from each retained item to its session.
        self._session_of: dict[Item, _Session[Item]] = {}
        self._num_retained = 0  # idle items of all sessions
        self._num_changes = 0
        # The session that has lost the last item. The same session loses the next items, until it
        # has fewer items than the mean. Most evictions therefore need no search.
        self._victim: _Session[Item] | None = None
        self._expiry_due = clock()

    def __contains__(self, item: Item) -> bool:
        """Return whether an item is idle. An item is idle if no sequence uses the item."""
        session = self._session_of.get(item)
        return item in (self._plain if session is None else session.idle)

    def __iter__(self) -> Iterator[Item]:
        """Yield all idle items."""
        yield from self._plain
        for session in self._sessions.values():
            yield from session.idle

    def __len__(self) -> int:
        """Return the number of idle items."""
        return len(self._plain) + self._num_retained

    @property
    def num_retained(self) -> int:
        """The number of items that sessions retain, whether the items are idle or used."""
        self._expire()
        return len(self._session_of)

    def add(self, item: Item) -> None:
        """Add an item that has just become idle."""
        session = self._session_of.get(item)
        if session is None:
            self._num_changes += 1
            self._plain[item] = self._num_changes
            return
        session.used.discard(item)
        session.idle[item] = None
        self._num_retained += 1

    def remove(self, item: Item) -> None:
        """Remove an item that a sequence has started to use from the idle items."""
        session = self._session_of.get(item)
        if session is None:
            del self._plain[item]
            return
        del session.idle[item]
        session.used.add(item)
        self._num_retained -= 1

    def pop(self) -> Item:
        """Remove and return the item that must be evicted next. At least one item must be idle."""
        self._expire()
        if self._plain and not self._prefers_sessions():
            return self._plain.popitem(last=False)[0]
        session = self._next_victim()
        item = next(iter(session.idle))
        self.forget(item)
        return item

    def forget(self, item: Item) -> None:
        """Remove an item that is deleted from the cache. Do nothing if the item is unknown."""
        session = self._session_of.pop(item, None)
        if session is None:
            self._plain.pop(item, None)
            return
        if item in session.idle:
            del session.idle[item]
            self._num_retained -= 1
        session.used.discard(item)
        self._drop_if_empty(session)

    def retain(self, items: Iterable[Item], key: SessionKey, seconds: float) -> None:
        """Retain items for a session for the next `seconds` seconds.

        The time of all items of the session is extended. An item that another session retains for
        a longer time stays with the other session.

        Args:
            items: items of the cache, which may be idle. Of several idle items, the first is
                evicted first.
            key: the name of the session.
            seconds: the time for which the items are retained.
        """
        expires = self._clock() + seconds
        session = self._sessions.get(key)
        self._num_changes += 1
        if session is None:
            session = self._sessions[key] = _Session(key, expires, self._num_changes)
        self._sessions.move_to_end(key)
        if self._victim is session:
            self._victim = None
        session.last_use = self._num_changes
        session.expires = max(session.expires, expires)
        for item in items:
            owner = self._session_of.get(item)
            if owner is session or (owner is not None and owner.expires >= session.expires):
                continue
            # Move the item from its present session, if it has one, to this session.
            is_idle = item in self
            self.forget(item)
            self._session_of[item] = session
            session.used.add(item)
            if is_idle:
                self.add(item)
        self._drop_if_empty(session)

    def extend(self, key: SessionKey, seconds: float) -> bool:
        """Extend the retention of a session, so that it lasts for at least `seconds` more seconds.

        Return False if the session does not exist.
        """
        self._expire()
        session = self._sessions.get(key)
        if session is None:
            return False
        session.expires = max(session.expires, self._clock() + seconds)
        return True

    def idle_items(self, key: SessionKey) -> list[Item]:
        """Return the idle items of a session; none if the session does not exist."""
        self._expire()
        session = self._sessions.get(key)
        return [] if session is None else list(session.idle)

    def sessions(self) -> list[SessionUse]:
        """Return the sessions that have not expired."""
        self._expire()
        now = self._clock()
        return [
            SessionUse(key, session.num_items, session.expires - now)
            for key, session in self._sessions.items()
        ]

    def _expire(self) -> None:
        """Remove the sessions whose retention has expired.

        Their idle items become the oldest items without a session, so they are evicted next.
        """
        if not self._sessions:
            return
        now = self._clock()
        if now < self._expiry_due:
            return
        self._expiry_due = now + _EXPIRY_INTERVAL_S
        for session in [one for one in self._sessions.values() if one.expires <= now]:
            # `move_to_end(last=False)` moves an item to the front, so the items are moved in
            # reverse order.
            for item in reversed(session.idle):
                self._plain[item] = 0
                self._plain.move_to_end(item, last=False)
            for item in (*session.idle, *session.used):
                del self._session_of[item]
            self._num_retained -= len(session.idle)
            session.idle.clear()
            session.used.clear()
            self._drop_if_empty(session)

    def _prefers_sessions(self) -> bool:
        """Return whether retained items must be evicted before items without a session."""
        if self._num_retained <= self._max_retained:
            return False
        return self._next_victim().last_use < next(iter(self._plain.values()))

    def _next_victim(self) -> _Session[Item]:
        """Return the session that loses the next item. At least one session must have idle items.

        The session has at least the mean number of idle items, so a large session cannot evict the
        items of small sessions.
        """
        mean = self._num_retained / len(self._sessions)
        if self._victim is None or len(self._victim.idle) < mean or not self._victim.idle:
            self._victim = next(
                session
                for session in self._sessions.values()
                if session.idle and len(session.idle) >= mean
            )
        return self._victim

    def _drop_if_empty(self, session: _Session[Item]) -> None:
        """Remove a session that has no items left."""
        if session.num_items == 0:
            del self._sessions[session.key]
            if self._victim is session:
                self._victim = None
