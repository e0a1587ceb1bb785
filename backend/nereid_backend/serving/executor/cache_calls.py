# SPDX-License-Identifier: Apache-2.0
"""Requests that read prefix cache statistics, retain a session for longer, or drop blocks.

A client calls the model `executor` with these request parameters:

    cache=statistics                                             read the statistics
    cache=extend prompt_cache_key=KEY seconds=NUMBER             retain a session for a longer time
    cache=drop prompt_cache_key=KEY                              remove the blocks of a session
    cache=drop                                                   remove all cached blocks

The parameter `client_id` limits each call to the sessions of one client. Every engine process
answers each call. The output `state` of the response is JSON text that contains the sum of all
answers.
"""

import contextlib
import itertools
import json
import queue
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nereid_backend.errors import NereidError, RequestError
from nereid_backend.serving import tensor_names
from nereid_backend.serving.tensors import Tensors

_CACHE, _CLIENT, _KEY, _SECONDS = "cache", "client_id", "prompt_cache_key", "seconds"
_OPERATIONS = ("statistics", "extend", "drop")
_SESSIONS = "sessions"
_MAX_SECONDS = 86400

Answer = tuple[Any, Tensors | NereidError]
"""The response sender of a request, and the response to the request."""


@dataclass(slots=True)
class _Call:
    """An unanswered request.

    Attributes:
        sender: the response sender of the request.
        pending_replicas: the numbers of the engine processes that have not answered yet.
        answers: the answers of the other engine processes.
        error: the error of an engine process that has refused the call or has died; None if there
            is no such process.
    """

    sender: Any
    pending_replicas: set[int]
    answers: list[dict[str, Any]] = field(default_factory=list)
    error: NereidError | None = None


class CacheCalls:
    """Stores the unanswered requests about the prefix cache.

    Any thread may call `put`. Only the loop's thread may call the other methods.
    """

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[tuple[list[Any], Any]] = queue.SimpleQueue()
        self._ids = itertools.count(1)
        self._waiting: dict[str, _Call] = {}

    def put(self, parameters: Mapping[str, Any], sender: Any) -> None:  # noqa: ANN401
        """Queue a request. `take_new` will return the request.

        Raises:
            RequestError: a parameter is missing or wrong.
        """
        self._new.put((_read_call(parameters), sender))

    def take_new(self) -> list[tuple[list[Any], Any]]:
        """Remove and return the queued requests as pairs of a message and a response sender.

        The messages have no ids yet. Each message has the form `[operation, {name: value}]`.
        """
        requests = []
        with contextlib.suppress(queue.Empty):
            while True:
                requests.append(self._new.get_nowait())
        return requests

    def add(self, message: list[Any], sender: Any, replicas: Iterable[int]) -> list[Any]:  # noqa: ANN401
        """Store an unanswered request. Return the message for the engine processes.

        Args:
            message: the message without its id, from `take_new`.
            sender: the response sender of the request.
            replicas: the numbers of the engine processes that will get the message.
        """
        call_id = f"cache-{next(self._ids)}"
        self._waiting[call_id] = _Call(sender, set(replicas))
        return [_CACHE, call_id, *message]

    def record_answer(self, call_id: str, replica: int, values: dict[str, Any]) -> Answer | None:
        """Record the answer of an engine process.

        If all engine processes have answered now, return the client's response. Otherwise, return
        None.
        """
        call = self._waiting.get(call_id)
        if call is None:
            return None
        call.answers.append(values)
        return self._answer_if_complete(replica, call_id, call)

    def record_refusal(self, call_id: str, replica: int, error: NereidError) -> Answer | None:
        """Record that an engine process has refused a request about the prefix cache.

        If all engine processes have answered now, return the client's response. Otherwise, return
        None.
        """
        call = self._waiting.get(call_id)
        if call is None:
            return None
        call.error = error
        return self._answer_if_complete(replica, call_id, call)

    def record_death(self, replica: int, error: NereidError) -> list[Answer]:
        """Record that an engine process has died. Return the responses that can be sent now.

        A response can be sent now if its request waited only for the dead process.
        """
        call_ids = [
            call_id for call_id, call in self._waiting.items() if replica in call.pending_replicas
        ]
        answers = [self.record_refusal(call_id, replica, error) for call_id in call_ids]
        return [answer for answer in answers if answer is not None]

    def take_waiting(self) -> list[Any]:
        """Remove all unanswered and all queued requests, and return their response senders."""
        senders = [call.sender for call in self._waiting.values()]
        senders += [sender for _, sender in self.take_new()]
        self._waiting.clear()
        return senders

    def _answer_if_complete(self, replica: int, call_id: str, call: _Call) -> Answer | None:
        """Record that an engine process is done with a request: it answered, refused or died.

        If all engine processes are done now, return the client's response: the combined answers, or
        an error if no process has answered. Return None if other engine processes are not done yet.

        Args:
            replica: the number of the process.
            call_id: the id of the message that contains the request.
            call: the request.
        """
        call.pending_replicas.discard(replica)
        if call.pending_replicas:
            return None
        del self._waiting[call_id]
        if not call.answers:
            assert call.error is not None, "an engine process answers, refuses or dies"
            return call.sender, call.error
        text = json.dumps(_merge(call.answers)).encode()
        return call.sender, {tensor_names.STATE: np.frombuffer(text, np.uint8)}


def is_cache_call(parameters: Mapping[str, Any]) -> bool:
    """Return whether a request with these parameters is about the prefix cache."""
    return _CACHE in parameters


def _read_call(parameters: Mapping[str, Any]) -> list[Any]:
    """Convert the parameters of a request to a message for the engine processes.

    Example: the parameters cache="extend", prompt_cache_key="a" and seconds="60" return `["extend",
    {"prompt_cache_key": "a", "seconds": 60.0}]`. The caller adds an id to the message.

    Raises:
        RequestError: a parameter is missing or wrong.
    """
    operation = parameters[_CACHE]
    if operation not in _OPERATIONS:
        raise RequestError(
            f"{_CACHE}: the value must be statistics, extend or drop, but it is {operation!r}."
        )
    values: dict[str, Any] = {
        name: str(parameters[name]) for name in (_CLIENT, _KEY) if name in parameters
    }
    if operation == "extend":
        if _KEY not in values:
            raise RequestError(f"{_KEY}: the parameter is required if {_CACHE} is extend.")
        values[_SECONDS] = _read_seconds(parameters.get(_SECONDS))
    return [operation, values]


def _read_seconds(value: Any) -> float:  # noqa: ANN401 - the value of a request parameter
    """Return the parameter `seconds` as a number. Raise a RequestError if the value is wrong."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds <= _MAX_SECONDS:
        raise RequestError(
            f"{_SECONDS}: the value must be a number from 0 to {_MAX_SECONDS}, but it is {value!r}."
        )
    return seconds


def _merge(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the answers of all engine processes into one answer.

    Numbers are added. Of the lists of sessions, the entries that describe the same session become
    one entry. Example: `[{"num_blocks": 2}, {"num_blocks": 3}]` returns `{"num_blocks": 5}`.
    """
    merged: dict[str, Any] = {}
    sessions: list[dict[str, Any]] = []
    for answer in answers:
        for name, value in answer.items():
            if name == _SESSIONS:
                sessions += value
            else:
                merged[name] = merged.get(name, 0) + value
    # All answers have the same keys. Only answers to the operation "statistics" contain sessions.
    if _SESSIONS in answers[0]:
        merged[_SESSIONS] = _merge_equal_sessions(sessions)
    return merged


def _merge_equal_sessions(sessions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Combine all entries that describe the same session into one entry.

    A session is identified by its client and its prompt_cache_key. If a session has blocks in
    several engine processes, its combined entry contains the sum of the tokens and the latest time.
    """
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for session in sessions:
        key = (session[_CLIENT], session[_KEY])
        entry = merged.get(key)
        if entry is None:
            merged[key] = dict(session)
        else:
            entry["num_tokens"] += session["num_tokens"]
            entry["expires_in_s"] = max(entry["expires_in_s"], session["expires_in_s"])
    return list(merged.values())
