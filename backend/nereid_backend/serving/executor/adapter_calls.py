# SPDX-License-Identifier: Apache-2.0
"""Requests that load, unload or list LoRA adapters.

A client calls the model `executor` with one of these sets of request parameters:

    load_lora=NAME lora_path=FOLDER     load an adapter
    unload_lora=NAME                    unload an adapter
    list_loras=true                     change nothing

The output `state` of the response is JSON text: `{"adapters": ["a", "b"]}`. Every engine process
makes each change. After a restart, the changes are repeated, because a new engine process begins
with the adapters of the setting lora_adapters.
"""

import contextlib
import itertools
import json
import queue
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nereid_backend.errors import NereidError, RequestError
from nereid_backend.serving import tensor_names
from nereid_backend.serving.tensors import Tensors

RESTORED = "restored"
"""The id of messages that repeat a change in a new engine process."""

_LOAD, _UNLOAD, _LIST, _PATH = "load_lora", "unload_lora", "list_loras", "lora_path"
# A request with these parameters replaces the weights of the model. All engine processes must make
# the change, and restarted processes must repeat it, as for an adapter.
_RELOAD, _RUNNING = "reload_weights", "running_requests"


Answer = tuple[Any, Tensors | NereidError]
"""The response sender of a request, and its response."""


@dataclass(slots=True)
class _Change:
    """A request to load or unload an adapter that has no response yet.

    Attributes:
        sender: the response sender of the request.
        message: the message that was sent to the engine processes, without its id.
        missing: the engine processes that have not answered.
        is_made: whether an engine process has made the change.
        refusal: the error of an engine process that has refused the change.
    """

    sender: Any
    message: list[str]
    missing: set[int]
    is_made: bool = False
    refusal: NereidError | None = None


class AdapterCalls:
    """Tracks the unanswered requests about LoRA adapters, and the names of all adapters.

    A request is answered when every engine process has made the change, has refused the change, or
    has died. Any thread may call `put`. Only the loop's thread may call the other methods.
    """

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[tuple[list[str] | None, Any]] = queue.SimpleQueue()
        self._ids = itertools.count(1)
        # The key is the id of the message to the engine processes.
        self._waiting: dict[str, _Change] = {}
        # The last successful message about each adapter, without its id.
        self._history: dict[str, list[str]] = {}
        # The names of the adapters in each engine process.
        self._names: dict[int, list[str]] = {}

    def put(self, parameters: Mapping[str, Any], sender: Any) -> None:  # noqa: ANN401
        """Queue a request for `take_new`.

        Args:
            parameters: the parameters of the request.
            sender: the response sender of the request.

        Raises:
            RequestError: a parameter is missing or is not a text.
        """
        self._new.put((_read_change(parameters), sender))

    def take_new(self) -> list[tuple[list[str] | None, Any]]:
        """Return the queued requests: the message without its id, and the response sender.

        The message of a list request is None.
        """
        requests = []
        with contextlib.suppress(queue.Empty):
            while True:
                requests.append(self._new.get_nowait())
        return requests

    def add(self, message: list[str], sender: Any, replicas: Iterable[int]) -> list[str]:  # noqa: ANN401
        """Add a request, and return the message to the engine processes.

        Args:
            message: the message without its id, from `take_new`.
            sender: the response sender of the request.
            replicas: the engine processes that run.
        """
        call_id = f"adapter-{next(self._ids)}"
        self._waiting[call_id] = _Change(sender, message, set(replicas))
        return _with_id(message, call_id)

    def answer(self, call_id: str, replica: int, names: list[str]) -> Answer | None:
        """Record that an engine process has loaded or unloaded an adapter.

        Return the response if this was the last engine process to answer, else None.

        Args:
            call_id: the id of the message to the process; "" at the start of the process.
            replica: the number of the process.
            names: the names of all adapters in the process after the change.
        """
        self._names[replica] = names
        change = self._waiting.get(call_id)
        if change is None:
            return None
        change.is_made = True
        return self._note_answer(call_id, change, replica)

    def refuse(self, call_id: str, replica: int, error: NereidError) -> Answer | None:
        """Record that an engine process has refused a change; see `answer` for the result."""
        change = self._waiting.get(call_id)
        if change is None:
            return None
        change.refusal = error
        return self._note_answer(call_id, change, replica)

    def drop(self, replica: int, error: NereidError) -> list[Answer]:
        """Record that an engine process has died, and return the responses that are now complete.

        If no other engine process has made a change, the response is `error`.
        """
        if len(self._names) > 1:
            self._names.pop(replica, None)
        answers = []
        for call_id, change in list(self._waiting.items()):
            if replica in change.missing:
                if change.missing == {replica} and not change.is_made and not change.refusal:
                    change.refusal = error
                answers.append(self._note_answer(call_id, change, replica))
        return [answer for answer in answers if answer is not None]

    def listing(self) -> Tensors:
        """Return the output tensors with the names of the adapters that every process has."""
        first, *others = [*self._names.values()] or [[]]
        names = [name for name in first if all(name in other for other in others)]
        text = json.dumps({"adapters": names}).encode()
        return {
            tensor_names.TOKEN_IDS: np.zeros(0, np.int32),
            tensor_names.STATE: np.frombuffer(text, np.uint8),
        }

    def history(self, replica: int) -> list[list[str]]:
        """Return the messages that restore the adapters in a new engine process.

        The messages load and unload adapters. Unloading is unnecessary for an adapter that the new
        process does not have. The unanswered changes are included, because they were sent only to
        the other processes.

        Args:
            replica: the number of the process.
        """
        names = self._names[replica]
        unanswered = [change.message for change in self._waiting.values()]
        return [
            _with_id(message, RESTORED)
            for message in [*self._history.values(), *unanswered]
            if message[0] in (_LOAD, _RELOAD) or message[1] in names
        ]

    def take_waiting(self) -> list[Any]:
        """Remove all requests, and return their response senders."""
        senders = [change.sender for change in self._waiting.values()]
        senders += [sender for _, sender in self.take_new()]
        self._waiting.clear()
        return senders

    def _note_answer(self, call_id: str, change: _Change, replica: int) -> Answer | None:
        """Record the answer of an engine process. Return the response after the last answer."""
        change.missing.discard(replica)
        if change.missing:
            return None
        del self._waiting[call_id]
        if change.refusal is not None:
            return change.sender, change.refusal
        kind, name = change.message[:2]
        if kind != _RELOAD:
            self._history[name] = change.message
        elif name:
            # The key is no name of an adapter, because these names contain no "=".
            self._history["=reload"] = change.message
        return change.sender, self.listing()


def _read_change(parameters: Mapping[str, Any]) -> list[str] | None:
    """Return the message to the engine processes for a request; None for a list request.

    The id of the message is still missing. Example: `["load_lora", "name", "/path"]`.

    Raises:
        RequestError: a parameter is missing or is not a text.
    """
    if _LIST in parameters:
        return None
    if _RELOAD in parameters:
        mode = parameters.get(_RUNNING, "finish")
        if mode not in ("finish", "refuse"):
            raise RequestError(
                f'{_RUNNING}: the value must be "finish" or "refuse", but it is {mode!r}.'
            )
        return [_RELOAD, str(parameters[_RELOAD]), str(mode)]
    kind = _LOAD if _LOAD in parameters else _UNLOAD
    names = (_LOAD, _PATH) if kind == _LOAD else (_UNLOAD,)
    values = [parameters.get(name) for name in names]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, str) or not value:
            raise RequestError(f"{name}: the parameter must be a text, but it is {value!r}.")
    return [kind, *map(str, values)]


def is_adapter_call(parameters: Mapping[str, Any]) -> bool:
    """Return whether a request with these parameters is about adapters or new weights."""
    return any(name in parameters for name in (_LOAD, _UNLOAD, _LIST, _RELOAD))


def _with_id(message: list[str], call_id: str) -> list[str]:
    """Insert the id of a message after its kind."""
    kind, *values = message
    return [kind, call_id, *values]
