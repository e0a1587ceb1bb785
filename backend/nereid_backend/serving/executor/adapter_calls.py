# SPDX-License-Identifier: Apache-2.0
"""Requests that load, unload or list LoRA adapters, or replace the weights of the model.

A client calls the model `executor` with one of these sets of request parameters:

    load_lora=NAME lora_path=FOLDER                 load an adapter
    unload_lora=NAME                                unload an adapter
    list_loras=true                                 change nothing
    reload_weights=FOLDER running_requests=MODE     replace the weights ("finish" or "refuse")

The output `state` of the response is JSON text with the names of all adapters: `{"adapters": ["a",
"b"]}`. Every engine process makes each change. A restarted engine process begins with the
checkpoint and the adapters of the settings, so all changes are sent to the process again.
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
"""The id of the messages that repeat all earlier changes after the restart of an engine process."""

_LOAD, _UNLOAD, _LIST, _PATH = "load_lora", "unload_lora", "list_loras", "lora_path"
# The parameters of a request that replaces the weights of the model.
_RELOAD, _RUNNING = "reload_weights", "running_requests"
# This key stores the message about the weights in a dict whose other keys are names of adapters.
# The names of adapters contain no "=", so no adapter can have this name.
_WEIGHTS_KEY = "=reload"


Answer = tuple[Any, Tensors | NereidError]
"""The response sender of a request, and the response to the request."""


@dataclass(slots=True)
class _Change:
    """An unanswered request to load or unload an adapter, or to replace the weights.

    Attributes:
        sender: the response sender of the request.
        message: the message to the engine processes, without its id.
        pending_replicas: the numbers of the engine processes that have not answered yet.
        is_made: whether at least one engine process has made the change.
        refusal: the error with which an engine process has refused the change; None if no process
            has refused the change.
        death: the reason why an engine process has died before its answer; None if no process has
            died.
    """

    sender: Any
    message: list[str]
    pending_replicas: set[int]
    is_made: bool = False
    refusal: NereidError | None = None
    death: NereidError | None = None

    @property
    def error(self) -> NereidError | None:
        """The error of a completed change; None if the change has succeeded.

        A change is completed when every engine process has answered or died. One refusal is
        sufficient for an error. A death is an error only if no process has made the change.
        """
        if self.refusal is not None or self.is_made:
            return self.refusal
        assert self.death is not None, "an engine process answers, refuses or dies"
        return self.death


class AdapterCalls:
    """Stores the unanswered requests about adapters and weights, and the names of all adapters.

    An engine process is done with a change when it has made the change, has refused the change, or
    has died. A request is answered when every engine process is done. Any thread may call `put` and
    read `is_replacing_weights`. Only the loop's thread may call the other methods.

    Args:
        names_at_start: the names of the adapters that each engine process loads at its start.
    """

    def __init__(self, names_at_start: Iterable[str] = ()) -> None:
        self._names_at_start = frozenset(names_at_start)
        self._new: queue.SimpleQueue[tuple[list[str] | None, Any]] = queue.SimpleQueue()
        self._ids = itertools.count(1)
        # Maps the id of a message to the change that the message requests. A change is removed when
        # it is complete.
        self._waiting: dict[str, _Change] = {}
        # For each adapter, and for the weights of the model, the message that requested the last
        # successful change. The messages are stored without their ids.
        self._history: dict[str, list[str]] = {}
        # The names of the adapters in each engine process.
        self._names: dict[int, list[str]] = {}

    def put(self, parameters: Mapping[str, Any], sender: Any) -> None:  # noqa: ANN401
        """Queue a request. `take_new` will return the request.

        Args:
            parameters: the parameters of the request.
            sender: the response sender of the request.

        Raises:
            RequestError: a parameter is missing or is not a text.
        """
        self._new.put((_read_change(parameters), sender))

    @property
    def is_replacing_weights(self) -> bool:
        """Whether an engine process still has to replace the weights. Any thread may read this."""
        # The loop's thread may change the dict during the iteration. Therefore the iteration uses a
        # copy. No other thread can change the dict while `list` creates the copy.
        return any(change.message[0] == _RELOAD for change in list(self._waiting.values()))

    def take_new(self) -> list[tuple[list[str] | None, Any]]:
        """Remove and return the queued requests.

        Each request is a pair: the message without an id, and the response sender. If a request
        lists the adapters, its message is None.
        """
        requests = []
        with contextlib.suppress(queue.Empty):
            while True:
                requests.append(self._new.get_nowait())
        return requests

    def add(self, message: list[str], sender: Any, replicas: Iterable[int]) -> list[str]:  # noqa: ANN401
        """Store an unanswered request. Return the message for the engine processes.

        Args:
            message: the message without its id, from `take_new`.
            sender: the response sender of the request.
            replicas: the numbers of the engine processes that will get the message.
        """
        call_id = f"adapter-{next(self._ids)}"
        self._waiting[call_id] = _Change(sender, message, set(replicas))
        return _with_id(message, call_id)

    def record_answer(self, call_id: str, replica: int, names: list[str]) -> Answer | None:
        """Record that an engine process has changed its adapters or weights.

        If all engine processes are done now, return the client's response. Return None if other
        processes are not done yet, or if no client waits for the change.

        Args:
            call_id: the id of the message that requested the change. "" means that the process has
                just started.
            replica: the number of the process.
            names: the names of all adapters in the process after the change.
        """
        self._names[replica] = names
        change = self._waiting.get(call_id)
        if change is None:
            return None
        change.is_made = True  # The request succeeds even if all other processes die now.
        return self._answer_if_complete(replica, call_id, change)

    def record_refusal(self, call_id: str, replica: int, error: NereidError) -> Answer | None:
        """Record that an engine process has refused to change its adapters or weights.

        If all engine processes have answered now, return the client's response. Otherwise, return
        None.
        """
        change = self._waiting.get(call_id)
        if change is None:
            return None
        change.refusal = error
        return self._answer_if_complete(replica, call_id, change)

    def record_death(self, replica: int, error: NereidError) -> list[Answer]:
        """Record that an engine process has died. Return the responses that can be sent now.

        A response can be sent if its request waited only for the dead process. If another process
        has made or refused the change, the response says so. Otherwise, the response is `error`.

        Args:
            replica: the number of the dead process.
            error: the reason for its death.
        """
        # If this was the only process left, keep the names of its adapters, so that the adapters
        # can still be listed.
        if len(self._names) > 1:
            self._names.pop(replica, None)
        answers = []
        for call_id, change in list(self._waiting.items()):
            if replica in change.pending_replicas:
                change.death = error
                if answer := self._answer_if_complete(replica, call_id, change):
                    answers.append(answer)
        return answers

    def listing(self) -> Tensors:
        """Return the output tensors of a response that lists the adapters.

        An adapter is included only if every engine process has loaded it.
        """
        first, *others = [*self._names.values()] or [[]]
        names = [name for name in first if all(name in other for other in others)]
        text = json.dumps({"adapters": names}).encode()
        return {tensor_names.STATE: np.frombuffer(text, np.uint8)}

    def messages_for_restart(self) -> list[list[str]]:
        """Return the messages that restore all earlier changes in a restarted engine process.

        Example: after a client has loaded the adapter "a", the result is [["load_lora", "restored",
        "a", "/path"]]. The unanswered changes are included, because they were sent only to the
        other processes.
        """
        loaded_names = set(self._names_at_start)
        unanswered = [change.message for change in self._waiting.values()]
        messages = []
        for message in [*self._history.values(), *unanswered]:
            kind, name_or_folder = message[:2]
            if kind == _LOAD:
                loaded_names.add(name_or_folder)
            elif kind == _UNLOAD:
                if name_or_folder not in loaded_names:
                    continue  # The process would refuse to unload an adapter that is not loaded.
                loaded_names.remove(name_or_folder)
            # No client waits for the answer, so all these messages have the same id.
            messages.append(_with_id(message, RESTORED))
        return messages

    def take_waiting(self) -> list[Any]:
        """Remove all unanswered and all queued requests, and return their response senders."""
        senders = [change.sender for change in self._waiting.values()]
        senders += [sender for _, sender in self.take_new()]
        self._waiting.clear()
        return senders

    def _answer_if_complete(self, replica: int, call_id: str, change: _Change) -> Answer | None:
        """Record that an engine process is done with a change: it answered, refused or died.

        If all engine processes are done now, return the client's response: an error, or the names
        of all adapters. Return None if other engine processes are not done yet.

        Args:
            replica: the number of the process.
            call_id: the id of the message that requested the change.
            change: the change.
        """
        change.pending_replicas.discard(replica)
        if change.pending_replicas:
            return None
        del self._waiting[call_id]
        if change.error is not None:
            return change.sender, change.error
        self._add_to_history(change.message)
        return change.sender, self.listing()

    def _add_to_history(self, message: list[str]) -> None:
        """Store the message of a successful change, so that it can be sent to restarted processes.

        The message replaces the earlier message about the same adapter or about the weights.
        """
        kind, *values = message
        if kind == _RELOAD:
            # A message with an empty `folder` means: read the weights again from the current
            # folder. Such a message is not stored, because a restarted engine process reads the
            # weights from the current folder in any case.
            folder = values[0]
            if folder:
                self._history[_WEIGHTS_KEY] = message
        else:
            adapter_name = values[0]
            self._history[adapter_name] = message


def _read_change(parameters: Mapping[str, Any]) -> list[str] | None:
    """Convert the parameters of a request to a message for the engine processes.

    Examples: the parameters load_lora="a" and lora_path="/path" return `["load_lora", "a",
    "/path"]`, unload_lora="a" returns `["unload_lora", "a"]`, and reload_weights="/new" returns
    `["reload_weights", "/new", "finish"]`. The caller adds an id to the message. If the request
    lists the adapters, return None, because the executor itself knows the names.

    Raises:
        RequestError: a parameter is missing or is not a text.
    """
    if _LIST in parameters:
        return None
    if _RELOAD in parameters:
        # An empty text is allowed. It means that the weights are read again from the folder that is
        # already in use.
        folder = str(parameters[_RELOAD])
        return [_RELOAD, folder, _read_treatment_of_running_requests(parameters)]
    if _LOAD in parameters:
        name = _read_text(parameters, _LOAD)
        path = _read_text(parameters, _PATH)
        return [_LOAD, name, path]
    return [_UNLOAD, _read_text(parameters, _UNLOAD)]


def _read_treatment_of_running_requests(parameters: Mapping[str, Any]) -> str:
    """Return what happens to running requests when weights are replaced: "finish" or "refuse".

    "finish" means that the requests continue until they end. "refuse" means that the requests are
    ended with an error. The default is "finish".

    Raises:
        RequestError: the parameter `running_requests` has another value.
    """
    mode = parameters.get(_RUNNING, "finish")
    if mode not in ("finish", "refuse"):
        raise RequestError(
            f'{_RUNNING}: the value must be "finish" or "refuse", but it is {mode!r}.'
        )
    return str(mode)


def _read_text(parameters: Mapping[str, Any], name: str) -> str:
    """Return the parameter `name`. Raise a RequestError if it is missing, empty or not a text."""
    value = parameters.get(name)
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name}: the parameter must be a text, but it is {value!r}.")
    return value


def is_adapter_or_weights_call(parameters: Mapping[str, Any]) -> bool:
    """Return whether a request with these parameters is about adapters or new weights."""
    return any(name in parameters for name in (_LOAD, _UNLOAD, _LIST, _RELOAD))


def _with_id(message: list[str], call_id: str) -> list[str]:
    """Return a copy of a message with `call_id` as an additional second element.

    Example: `_with_id(["unload_lora", "a"], "adapter-1")` returns `["unload_lora", "adapter-1",
    "a"]`.
    """
    kind, *values = message
    return [kind, call_id, *values]
