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

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from nereid_backend.errors import NereidError, RequestError
from nereid_backend.serving import tensor_names, triton_api
from nereid_backend.serving.executor.replica_calls import Answer, Call, ReplicaCalls
from nereid_backend.serving.triton_api import Tensors

# The id of the messages that repeat all earlier changes after the restart of an engine process.
_RESTORED = "restored"

_LOAD, _UNLOAD, _LIST, _PATH = "load_lora", "unload_lora", "list_loras", "lora_path"
# The parameters of a request that replaces the weights of the model.
_RELOAD, _RUNNING = "reload_weights", "running_requests"
# This key stores the message about the weights in a dict whose other keys are names of adapters.
# The names of adapters contain no "=", so no adapter can have this name.
_WEIGHTS_KEY = "=reload"


class AdapterCalls(ReplicaCalls):
    """Stores the unanswered requests about adapters and weights, and the names of all adapters.

    Any thread may call `put` and read `is_replacing_weights`. Only the loop's thread may call the
    other methods.

    Args:
        names_at_start: the names of the adapters that each engine process loads at its start.
    """

    def __init__(self, names_at_start: Iterable[str] = ()) -> None:
        super().__init__()
        self._names_at_start = frozenset(names_at_start)
        # Maps the name of an adapter to the message of the adapter's last successful change, such
        # as {"a": ["load_lora", "a", "/path"]}. The key _WEIGHTS_KEY has the message that last
        # replaced the weights of the model. The messages contain no id.
        self._history: dict[str, list[str]] = {}
        # The names of the adapters in each engine process.
        self._names: dict[int, list[str]] = {}

    @property
    def is_replacing_weights(self) -> bool:
        """Whether an engine process still has to replace the weights. Any thread may read this."""
        # The loop's thread may change the dict during the iteration. Therefore the iteration uses a
        # copy. No other thread can change the dict while `list` creates the copy.
        return any(change.message[0] == _RELOAD for change in list(self._waiting.values()))

    def record_answer(self, call_id: str, replica: int, answer: list[str]) -> Answer | None:
        """Record that an engine process has changed its adapters or weights.

        `answer` contains the names of all adapters in the process after the change. The id "" means
        that the process has just started. See `ReplicaCalls.record_answer`.
        """
        self._names[replica] = answer
        return super().record_answer(call_id, replica, answer)

    def record_refusal(self, call_id: str, replica: int, error: NereidError) -> Answer | None:
        """Record that an engine process has refused a change; see `ReplicaCalls.record_refusal`.

        A restarted process can refuse to repeat an earlier change. No client waits for the repeated
        change, so the refusal is only logged.
        """
        if call_id == _RESTORED:
            triton_api.log.error(
                "after a restart of the engine, a change of its LoRA adapters or of its weights "
                "could not be repeated: %s",
                error,
            )
            return None
        return super().record_refusal(call_id, replica, error)

    def record_death(self, replica: int, error: NereidError) -> list[Answer]:
        """Record that an engine process has died; see `ReplicaCalls.record_death`."""
        # If this was the only process left, keep the names of its adapters, so that the adapters
        # can still be listed.
        if len(self._names) > 1:
            self._names.pop(replica, None)
        return super().record_death(replica, error)

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
        "a", "/path"]]. Changes that some processes have not answered yet are included, because the
        restarted process was not running when these changes were sent.
        """
        unanswered = [call.message for call in self._waiting.values()]
        loaded_names = set(self._names_at_start)
        messages = []
        for message in [*self._history.values(), *unanswered]:
            kind, target, *_ = message  # The target is the name of an adapter, or a folder.
            if kind == _UNLOAD and target not in loaded_names:
                continue  # The process would refuse to unload an adapter that is not loaded.
            if kind == _LOAD:
                loaded_names.add(target)
            elif kind == _UNLOAD:
                loaded_names.remove(target)
            # No client waits for the answer, so all these messages have the same id.
            messages.append(_insert_id(message, _RESTORED))
        return messages

    def _to_message(self, parameters: Mapping[str, Any]) -> list[str] | None:
        """Convert the parameters of a request to a message for the engine processes.

        Examples: the parameters load_lora="a" and lora_path="/path" return `["load_lora", "a",
        "/path"]`, unload_lora="a" returns `["unload_lora", "a"]`, and reload_weights="/new" returns
        `["reload_weights", "/new", "finish"]`. If the request lists the adapters, return None,
        because the executor itself knows the names.
        """
        if _LIST in parameters:
            return None
        if _RELOAD in parameters:
            # The text of the parameter is a folder. If the text is empty, the engine processes read
            # the weights again from their present folder.
            folder = str(parameters[_RELOAD])
            return [_RELOAD, folder, _read_treatment_of_running_requests(parameters)]
        if _LOAD in parameters:
            return [_LOAD, _read_text(parameters, _LOAD), _read_text(parameters, _PATH)]
        return [_UNLOAD, _read_text(parameters, _UNLOAD)]

    def _with_id(self, message: list[str], number: int) -> tuple[str, list[str]]:
        """Return a new id, and a copy of `message` with this id inserted after the first element.

        Example: the message ["unload_lora", "math"] and the number 3 give "adapter-3" and
        ["unload_lora", "adapter-3", "math"].
        """
        call_id = f"adapter-{number}"
        return call_id, _insert_id(message, call_id)

    def _complete(self, call: Call) -> Tensors | NereidError:
        """Return the response to a change: the names of all adapters, or an error.

        If the change has succeeded, add its message to the history, because a restarted engine
        process must repeat the change.
        """
        error = _error_of(call)
        if error is not None:
            return error
        self._add_to_history(call.message)
        return self.listing()

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


def _error_of(call: Call) -> NereidError | None:
    """Return the reason why a change has failed; None if the change has succeeded.

    Each engine process has answered (made the change), has refused the change, or has died. The
    change has failed if a process has refused it, or if no process has answered.
    """
    if call.refusal is not None:
        return call.refusal
    return None if call.answers else call.error


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
    """Return the parameter `name`. Raise a RequestError if the value is no text, or is empty."""
    value = parameters.get(name)
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name}: the parameter must be a text, but it is {value!r}.")
    return value


def is_adapter_or_weights_call(parameters: Mapping[str, Any]) -> bool:
    """Return whether a request with these parameters is about adapters or new weights."""
    return any(name in parameters for name in (_LOAD, _UNLOAD, _LIST, _RELOAD))


def _insert_id(message: list[str], call_id: str) -> list[str]:
    """Return a copy of a message with `call_id` inserted after the first element, the kind."""
    kind, *values = message
    return [kind, call_id, *values]
