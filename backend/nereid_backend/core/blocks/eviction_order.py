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


class EvictionOrder(Generic[Item]):
    """The idle items of a cache, in the order in which they are evicted."""

    def __init__(self, max_retained: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Create an empty eviction order. An item is a cached block or a cached recurrent state.

        An item is idle while no sequence uses the item. Only idle items are evicted. A session
        consists of the requests of one client with the same cache key. Until the session expires,
        its items are evicted after the items without a session.

        Args:
            max_retained: the largest number of idle items of all sessions that are evicted after
                the items without a session. If the sessions have more idle items, the oldest idle
                item is evicted first, whether it belongs to a session or not.
            clock: returns the time in seconds. The time never decreases.
        """
        self._max_retained = max_retained
        self._clock = clock
        # The time of the next search for expired sessions, as a value of the clock.
        self._expiry_due = clock()
        # The number of changes so far. This number orders the changes, because `clock` can return
        # the same time for two changes.
        self._logical_time = 0

        # Maps each idle item without a session to the logical time at which the item became idle.
        # The oldest item comes first.
        self._idle_without_session: OrderedDict[Item, int] = OrderedDict()

        # The sessions, with the least recently used session first.
        self._sessions: OrderedDict[SessionKey, _Session[Item]] = OrderedDict()
        # Maps each item that belongs to a session to this session. The item may be idle or used.
        self._session_of: dict[Item, _Session[Item]] = {}
        self._num_retained = 0  # the number of idle items of all sessions
        # The session from which items are evicted; None if `_next_evicted_session` must select one.
        self._evicted_session: _Session[Item] | None = None

    def __contains__(self, item: Item) -> bool:
        """Return whether an item is idle, which means that no sequence uses the item."""
        session = self._session_of.get(item)
        return item in (self._idle_without_session if session is None else session.idle)

    def __iter__(self) -> Iterator[Item]:
        """Yield all idle items."""
        yield from self._idle_without_session
        for session in self._sessions.values():
            yield from session.idle

    def __len__(self) -> int:
        """Return the number of idle items."""
        return len(self._idle_without_session) + self._num_retained

    @property
    def num_retained(self) -> int:
        """The number of items that sessions retain. Idle items and used items are counted."""
        self._expire()
        return len(self._session_of)

    def add(self, item: Item) -> None:
        """Add an item that has just become idle."""
        session = self._session_of.get(item)
        if session is None:
            self._logical_time += 1
            self._idle_without_session[item] = self._logical_time
            return
        session.used.discard(item)
        session.idle[item] = None
        self._num_retained += 1

    def remove(self, item: Item) -> None:
        """Remove an item from the idle items, because a sequence has started to use the item."""
        session = self._session_of.get(item)
        if session is None:
            del self._idle_without_session[item]
            return
        del session.idle[item]
        session.used.add(item)
        self._num_retained -= 1

    def pop(self) -> Item:
        """Remove and return the item that must be evicted next. At least one item must be idle."""
        self._expire()
        if self._idle_without_session and not self._prefers_sessions():
            return self._idle_without_session.popitem(last=False)[0]
        session = self._next_evicted_session()
        item = next(iter(session.idle))
        self.forget(item)
        return item

    def forget(self, item: Item) -> None:
        """Remove an item that is no longer in the cache. Do nothing if the item is unknown."""
        session = self._session_of.pop(item, None)
        if session is None:
            self._idle_without_session.pop(item, None)
            return
        if item in session.idle:
            del session.idle[item]
            self._num_retained -= 1
        session.used.discard(item)
        self._drop_if_empty(session)

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
        session = self._mark_used(key, min_expires=self._clock() + seconds)
        for item in items:
            owner = self._session_of.get(item)
            if owner is None or owner.expires < session.expires:
                self._move(item, session)
        self._drop_if_empty(session)  # The session is empty if no item was moved to a new session.

    def _mark_used(self, key: SessionKey, min_expires: float) -> _Session[Item]:
        """Mark a session as the most recently used session, and return the session.

        Create the session if it does not exist. The session expires at `min_expires`, or at its
        present expiry time if that time is later.
        """
        self._logical_time += 1
        session = self._sessions.get(key)
        if session is None:
            session = _Session(key, min_expires, last_use=self._logical_time)
            self._sessions[key] = session
        else:
            self._sessions.move_to_end(key)  # The least recently used session comes first.
            session.last_use = self._logical_time
            session.expires = max(session.expires, min_expires)
        if self._evicted_session is session:
            # The session is no longer the least recently used one, so another one must be selected.
            self._evicted_session = None
        return session

    def _move(self, item: Item, session: _Session[Item]) -> None:
        """Move an item to a session. The item may belong to another session or to no session."""
        is_idle = item in self
        self.forget(item)
        self._session_of[item] = session
        session.used.add(item)
        if is_idle:
            self.add(item)  # moves the item from `used` to `idle`

    def extend(self, key: SessionKey, seconds: float) -> bool:
        """Retain the items of a session for at least the next `seconds` seconds.

        Return False if the session does not exist.
        """
        self._expire()
        session = self._sessions.get(key)
        if session is None:
            return False
        session.expires = max(session.expires, self._clock() + seconds)
        return True

    def idle_items(self, key: SessionKey) -> list[Item]:
        """Return the idle items of a session. If the session does not exist, the list is empty."""
        self._expire()
        session = self._sessions.get(key)
        return [] if session is None else list(session.idle)

    def sessions(self) -> list[SessionUse]:
        """For each session, return the number of retained items and the seconds until expiry."""
        self._expire()
        now = self._clock()
        return [
            SessionUse(key, session.num_items, session.expires - now)
            for key, session in self._sessions.items()
        ]

    def _expire(self) -> None:
        """Remove the sessions that have expired, at most once every `_EXPIRY_INTERVAL_S` seconds.

        The idle items of these sessions become the oldest items without a session, so these items
        are evicted next.
        """
        if not self._sessions:
            return
        now = self._clock()
        # This method is called very often. A search through all sessions in each call would take
        # too much time.
        if now < self._expiry_due:
            return
        self._expiry_due = now + _EXPIRY_INTERVAL_S
        expired_sessions = [s for s in self._sessions.values() if s.expires <= now]
        for session in expired_sessions:
            self._dissolve(session)

    def _dissolve(self, session: _Session[Item]) -> None:
        """Remove a session. Move its idle items to the front of `_idle_without_session`."""
        # Each item is moved to the front, so the oldest item must be moved last.
        for item in reversed(session.idle):
            self._idle_without_session[item] = 0
            self._idle_without_session.move_to_end(item, last=False)
        for item in (*session.idle, *session.used):
            del self._session_of[item]
        self._num_retained -= len(session.idle)
        session.idle.clear()
        session.used.clear()
        self._drop_if_empty(session)

    def _prefers_sessions(self) -> bool:
        """Return whether the next eviction must remove an item that a session retains.

        This is the case if the sessions retain more items than allowed, and the session that loses
        the next item was used before the oldest item without a session became idle.
        """
        if self._num_retained <= self._max_retained:
            return False
        return self._next_evicted_session().last_use < next(
            iter(self._idle_without_session.values())
        )

    def _next_evicted_session(self) -> _Session[Item]:
        """Return the session whose item is evicted next. At least one session must have idle items.

        The session has at least the mean number of idle items. A large session therefore cannot
        displace the items of small sessions. The previous session is selected again as long as it
        has enough idle items, so that one session loses a long part of its prefix, and the other
        sessions lose nothing. Then the least recently used session with enough idle items is
        selected.
        """
        mean = self._num_retained / len(self._sessions)
        min_num_idle = max(1.0, mean)
        if self._evicted_session is None or len(self._evicted_session.idle) < min_num_idle:
            self._evicted_session = self._least_recently_used(min_num_idle)
        return self._evicted_session

    def _least_recently_used(self, min_num_idle: float) -> _Session[Item]:
        """Return the least recently used session with at least `min_num_idle` idle items."""
        for session in self._sessions.values():
            if len(session.idle) >= min_num_idle:
                return session
        raise AssertionError(f"no session has {min_num_idle} idle items")

    def _drop_if_empty(self, session: _Session[Item]) -> None:
        """Remove a session if it has no items left."""
        if session.num_items == 0:
            del self._sessions[session.key]
            if self._evicted_session is session:
                self._evicted_session = None
