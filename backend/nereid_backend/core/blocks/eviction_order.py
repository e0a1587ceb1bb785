# SPDX-License-Identifier: Apache-2.0
"""The order in which the idle items of a cache are evicted.

An item is a block or a snapshot. An item is idle while no sequence uses the item. A session is
identified by a client and a `prompt_cache_key`. The items of a session are retained for some time
after the last request of the session:

    idle items without a session     evicted first, beginning with the oldest item
    idle items of a session          evicted if no other item is idle. A session loses an item only
                                     if it has at least the mean number of idle items of all
                                     sessions. Among these sessions, the least recently used one
                                     loses the item
    items of an expired session      treated as the oldest items without a session

If the sessions retain more than `max_retained` idle items, the oldest item is evicted first,
whether it has a session or not. A request never has to wait because items are retained.
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
    """Identifies a session.

    Attributes:
        client_id: the client that sent the requests; "" if the client is unknown.
        prompt_cache_key: the `prompt_cache_key` of the requests; "" if the requests have no key.
    """

    client_id: str
    prompt_cache_key: str


class SessionUse(NamedTuple):
    """The number of items of a session, and the time until the session expires.

    Attributes:
        key: identifies the session.
        num_items: the number of items that the session retains.
        expires_in_s: the time in seconds until the session expires.
    """

    key: SessionKey
    num_items: int
    expires_in_s: float


@dataclass(slots=True)
class _Session(Generic[Item]):
    """The retained items of one session.

    Attributes:
        key: identifies the session.
        expires: the time at which the session expires, as a value of the clock.
        last_use: the logical time at which the session was used last.
        idle: the idle items, with the oldest item first. The dict is used as an ordered set.
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


class _Sessions(Generic[Item]):
    """The sessions that retain items, and the choice of the session that loses an item next.

    Attributes:
        by_key: maps the key of a session to the session. The least recently used session is first.
        of_item: maps each item that belongs to a session to this session. The item may be idle or
            used.
        num_idle: the number of idle items of all sessions.
    """

    def __init__(self) -> None:
        self.by_key: OrderedDict[SessionKey, _Session[Item]] = OrderedDict()
        self.of_item: dict[Item, _Session[Item]] = {}
        self.num_idle = 0
        self._next_to_evict: _Session[Item] | None = None  # None until a session is selected

    def use(self, key: SessionKey, min_expires: float, logical_time: int) -> _Session[Item]:
        """Return the session with this key, and mark it as the most recently used session.

        Create the session if it does not exist. The session expires at `min_expires`, or at its
        present expiry time if that time is later. `logical_time` becomes the time of its last use.
        """
        session = self.by_key.get(key)
        if session is None:
            session = _Session(key, min_expires, last_use=logical_time)
            self.by_key[key] = session
            return session
        self.by_key.move_to_end(key)  # The least recently used session comes first.
        session.last_use = logical_time
        session.expires = max(session.expires, min_expires)
        self._deselect(session)
        return session

    def choose_session_to_evict(self) -> _Session[Item]:
        """Choose the session that loses the next item. At least one session must have idle items.

        A session has enough idle items if it has at least the mean number of idle items. With this
        rule, a large session cannot displace the items of small sessions. The previous choice is
        kept while the session has enough idle items, so that one session loses a long part of its
        prefix, and the other sessions lose nothing. Otherwise, the least recently used session with
        enough idle items is chosen.

        Mutates: `_next_to_evict`, which stores the choice for the next call.
        """
        mean_num_idle = self.num_idle / len(self.by_key)
        min_num_idle = max(1.0, mean_num_idle)
        session = self._next_to_evict
        if session is None or len(session.idle) < min_num_idle:
            session = self._least_recently_used(min_num_idle)
            self._next_to_evict = session
        return session

    def _least_recently_used(self, min_num_idle: float) -> _Session[Item]:
        """Return the least recently used session with at least `min_num_idle` idle items."""
        for session in self.by_key.values():
            if len(session.idle) >= min_num_idle:
                return session
        raise AssertionError(f"no session has {min_num_idle} idle items")

    def drop_if_empty(self, session: _Session[Item]) -> None:
        """Remove a session if it has no items left."""
        if session.num_items == 0:
            del self.by_key[session.key]
            self._deselect(session)

    def _deselect(self, session: _Session[Item]) -> None:
        """Let `choose_session_to_evict` choose again if its last choice was `session`."""
        if self._next_to_evict is session:
            self._next_to_evict = None


class EvictionOrder(Generic[Item]):
    """The idle items of a cache, in the order in which they are evicted."""

    def __init__(self, max_retained: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Create an empty eviction order. An item is a cached block or a cached recurrent state.

        An item is idle while no sequence uses the item, and only idle items are evicted. A session
        consists of the requests of one client with the same cache key. The items of a session are
        evicted after the items without a session.

        Args:
            max_retained: the largest number of idle items of all sessions for which this order
                applies. If the sessions have more idle items, the oldest idle item is evicted
                first, whether it belongs to a session or not.
            clock: returns the time in seconds. The time never decreases.
        """
        self._max_retained = max_retained
        self._clock = clock
        # Maps each idle item without a session to the logical time at which the item became idle.
        # The oldest item comes first.
        self._idle_without_session: OrderedDict[Item, int] = OrderedDict()
        self._sessions: _Sessions[Item] = _Sessions()
        # The number of changes so far, which orders the changes. `clock` cannot order them, because
        # it can return the same time for two changes.
        self._logical_time = 0
        # When `clock` reaches this time, the next search for expired sessions takes place.
        self._next_expiry_search = clock()

    def __contains__(self, item: Item) -> bool:
        """Return whether an item is idle, which means that no sequence uses the item."""
        session = self._sessions.of_item.get(item)
        return item in (self._idle_without_session if session is None else session.idle)

    def __iter__(self) -> Iterator[Item]:
        """Yield all idle items."""
        yield from self._idle_without_session
        for session in self._sessions.by_key.values():
            yield from session.idle

    def __len__(self) -> int:
        """Return the number of idle items."""
        return len(self._idle_without_session) + self._sessions.num_idle

    @property
    def num_retained(self) -> int:
        """The number of items that sessions retain. Idle items and used items are counted."""
        self._expire()
        return len(self._sessions.of_item)

    def add(self, item: Item) -> None:
        """Add an item that has just become idle."""
        session = self._sessions.of_item.get(item)
        if session is None:
            self._logical_time += 1
            self._idle_without_session[item] = self._logical_time
            return
        session.used.discard(item)
        session.idle[item] = None
        self._sessions.num_idle += 1

    def remove(self, item: Item) -> None:
        """Remove an item from the idle items, because a sequence has started to use the item."""
        session = self._sessions.of_item.get(item)
        if session is None:
            del self._idle_without_session[item]
            return
        del session.idle[item]
        session.used.add(item)
        self._sessions.num_idle -= 1

    def pop(self) -> Item:
        """Remove and return the item that must be evicted next. At least one item must be idle."""
        self._expire()
        if self._idle_without_session and not self._prefers_sessions():
            return self._idle_without_session.popitem(last=False)[0]
        session = self._sessions.choose_session_to_evict()
        item = next(iter(session.idle))
        self.forget(item)
        return item

    def forget(self, item: Item) -> None:
        """Remove an item that is no longer in the cache. Do nothing if the item is unknown."""
        session = self._sessions.of_item.pop(item, None)
        if session is None:
            self._idle_without_session.pop(item, None)
            return
        if item in session.idle:
            del session.idle[item]
            self._sessions.num_idle -= 1
        session.used.discard(item)
        self._sessions.drop_if_empty(session)

    def retain(self, items: Iterable[Item], key: SessionKey, seconds: float) -> None:
        """Add items to a session, and retain the session for at least `seconds` seconds.

        The session is created if it does not exist. An item that another session retains at least
        as long stays in the other session.

        Args:
            items: idle or used items of the cache, in the order in which they are evicted when they
                are idle.
            key: identifies the session.
            seconds: the smallest time until the session expires.
        """
        self._logical_time += 1
        session = self._sessions.use(key, self._clock() + seconds, self._logical_time)
        for item in items:
            owner = self._sessions.of_item.get(item)
            if owner is None or owner.expires < session.expires:
                self._move(item, session)
        # A new session is empty if no item was moved to this session.
        self._sessions.drop_if_empty(session)

    def _move(self, item: Item, session: _Session[Item]) -> None:
        """Move an item to a session. The item may belong to another session or to no session."""
        is_idle = item in self
        self.forget(item)
        self._sessions.of_item[item] = session
        session.used.add(item)
        if is_idle:
            self.add(item)  # moves the item from `used` to `idle`

    def extend(self, key: SessionKey, seconds: float) -> bool:
        """Retain the items of a session for at least the next `seconds` seconds.

        Return False if the session does not exist.
        """
        self._expire()
        session = self._sessions.by_key.get(key)
        if session is None:
            return False
        session.expires = max(session.expires, self._clock() + seconds)
        return True

    def idle_items(self, key: SessionKey) -> list[Item]:
        """Return the idle items of a session. If the session does not exist, the list is empty."""
        self._expire()
        session = self._sessions.by_key.get(key)
        return [] if session is None else list(session.idle)

    def sessions(self) -> list[SessionUse]:
        """For each session, return the number of retained items and the seconds until expiry."""
        self._expire()
        now = self._clock()
        return [
            SessionUse(key, session.num_items, session.expires - now)
            for key, session in self._sessions.by_key.items()
        ]

    def _expire(self) -> None:
        """Remove the sessions that have expired, at most once every `_EXPIRY_INTERVAL_S` seconds.

        The idle items of these sessions become the oldest items without a session, so these items
        are evicted next.
        """
        if not self._sessions.by_key:
            return
        now = self._clock()
        # This method is called very often. A search through all sessions in each call would take
        # too much time.
        if now < self._next_expiry_search:
            return
        self._next_expiry_search = now + _EXPIRY_INTERVAL_S
        expired_sessions = [s for s in self._sessions.by_key.values() if s.expires <= now]
        for session in expired_sessions:
            self._dissolve(session)

    def _dissolve(self, session: _Session[Item]) -> None:
        """Remove a session. Move its idle items to the front of `_idle_without_session`."""
        # Each item is moved to the front, so the oldest item must be moved last.
        for item in reversed(session.idle):
            self._idle_without_session[item] = 0
            self._idle_without_session.move_to_end(item, last=False)
        for item in (*session.idle, *session.used):
            del self._sessions.of_item[item]
        self._sessions.num_idle -= len(session.idle)
        session.idle.clear()
        session.used.clear()
        self._sessions.drop_if_empty(session)

    def _prefers_sessions(self) -> bool:
        """Return whether the next eviction must remove an item that a session retains.

        This is the case if the sessions retain more items than allowed, and the session that loses
        the next item was used before the oldest item without a session became idle.
        """
        if self._sessions.num_idle <= self._max_retained:
            return False
        oldest_idle_time = next(iter(self._idle_without_session.values()))
        return self._sessions.choose_session_to_evict().last_use < oldest_idle_time
