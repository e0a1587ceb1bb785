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

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from nereid_backend.errors import NereidError, RequestError
from nereid_backend.serving import tensor_names
from nereid_backend.serving.executor.replica_calls import Call, ReplicaCalls
from nereid_backend.serving.triton_api import Tensors

_CACHE, _CLIENT, _KEY, _SECONDS = "cache", "client_id", "prompt_cache_key", "seconds"
_STATISTICS, _EXTEND, _DROP = "statistics", "extend", "drop"
_SESSIONS = "sessions"
_MAX_SECONDS = 86400
_ID_PREFIX = "cache-"


class CacheCalls(ReplicaCalls):
    """Stores the unanswered requests about the prefix cache."""

    def _to_message(self, parameters: Mapping[str, Any]) -> list[Any]:
        """Convert the parameters of a request to a message for the engine processes.

        Example: the parameters cache="extend", prompt_cache_key="a" and seconds="60" return
        `["extend", {"prompt_cache_key": "a", "seconds": 60.0}]`.
        """
        operation = parameters[_CACHE]
        if operation not in (_STATISTICS, _EXTEND, _DROP):
            raise RequestError(
                f"{_CACHE}: the value must be {_STATISTICS}, {_EXTEND} or {_DROP}, but it is "
                f"{operation!r}."
            )
        values: dict[str, Any] = {
            name: str(parameters[name]) for name in (_CLIENT, _KEY) if name in parameters
        }
        if operation == _EXTEND:
            if _KEY not in values:
                raise RequestError(f"{_KEY}: the parameter is required if {_CACHE} is {_EXTEND}.")
            values[_SECONDS] = _read_seconds(parameters.get(_SECONDS))
        return [operation, values]

    def _with_id(self, message: list[Any], number: int) -> tuple[str, list[Any]]:
        """Return a new id, and the message ["cache", id, operation, values]."""
        call_id = f"{_ID_PREFIX}{number}"
        return call_id, [_CACHE, call_id, *message]

    def _complete(self, call: Call) -> Tensors | NereidError:
        """Return the combined answers, or an error if no engine process has answered."""
        if not call.answers:
            assert call.error is not None, "an engine process answers, refuses or dies"
            return call.error
        text = json.dumps(_merge(call.answers)).encode()
        return {tensor_names.STATE: np.frombuffer(text, np.uint8)}


def is_cache_call(parameters: Mapping[str, Any]) -> bool:
    """Return whether a request with these parameters is about the prefix cache."""
    return _CACHE in parameters


def is_cache_call_id(call_id: str) -> bool:
    """Return whether a message with the id `call_id` is about the prefix cache."""
    return call_id.startswith(_ID_PREFIX)


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

    If a session has blocks in several engine processes, the entry contains the sum of the tokens
    and the latest time.
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
