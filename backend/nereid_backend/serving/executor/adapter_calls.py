# SPDX-License-Identifier: Apache-2.0
"""Requests that load, unload or list LoRA adapters.

A client calls the model `executor` with one of these sets of request parameters:

    load_lora=NAME lora_path=FOLDER     load an adapter
    unload_lora=NAME                    unload an adapter
    list_loras=true                     change nothing

The output `state` of the response is JSON text: `{"adapters": ["a", "b"]}`. After
a restart, the changes are repeated, because a new engine process begins with the adapters of the
setting lora_adapters.
"""

import itertools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from nereid_backend.errors import RequestError
from nereid_backend.serving import tensor_names
from nereid_backend.serving.tensors import Tensors

RESTORED = "restored"
"""The id of messages that repeat a change in a new engine process."""

_LOAD, _UNLOAD, _LIST, _PATH = "load_lora", "unload_lora", "list_loras", "lora_path"


class AdapterCalls:
    """Tracks the unanswered requests about LoRA adapters, and the names of all adapters."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        # The response sender of each unanswered request, and the message that was sent to the
        # engine process. The key is the id of the message.
        self._waiting: dict[str, tuple[Any, list[str]]] = {}
        # The last successful message about each adapter.
        self._history: dict[str, list[str]] = {}
        self._names: list[str] = []

    def accept(self, parameters: Mapping[str, Any], sender: Any) -> list[str] | None:  # noqa: ANN401
        """Return the message to the engine process for a request; None for a list request.

        Raises:
            RequestError: a parameter is missing or is not a text.
        """
        if _LIST in parameters:
            return None
        kind = _LOAD if _LOAD in parameters else _UNLOAD
        names = (_LOAD, _PATH) if kind == _LOAD else (_UNLOAD,)
        values = [parameters.get(name) for name in names]
        for name, value in zip(names, values, strict=True):
            if not isinstance(value, str) or not value:
                raise RequestError(f"{name}: the parameter must be a text, but it is {value!r}.")
        call_id = f"adapter-{next(self._ids)}"
        message = [kind, call_id, *map(str, values)]
        self._waiting[call_id] = (sender, message)
        return message

    def answer(self, call_id: str, names: list[str]) -> tuple[Any, Tensors] | None:
        """Record that the engine process has loaded or unloaded an adapter.

        Return the response sender of the request for this change, and the output tensors of the
        response. Return None if no request waits for the change.

        Args:
            call_id: the id of the message to the engine process; "" at the start of the process.
            names: the names of all adapters after the change.
        """
        self._names = names
        sender, message = self._waiting.pop(call_id, (None, None))
        if message is None:
            return None
        self._history[message[2]] = message
        return sender, self.listing()

    def refuse(self, call_id: str) -> Any:  # noqa: ANN401 - the server's own type
        """Remove a refused request, and return its response sender; None if the id is unknown."""
        return self._waiting.pop(call_id, (None,))[0]

    def listing(self) -> Tensors:
        """Return the output tensors with the names of all adapters."""
        text = json.dumps({"adapters": self._names}).encode()
        return {
            tensor_names.TOKEN_IDS: np.zeros(0, np.int32),
            tensor_names.STATE: np.frombuffer(text, np.uint8),
        }

    def history(self) -> list[list[str]]:
        """Return the messages that restore the adapters in a new engine process.

        The messages load and unload adapters. Unloading is unnecessary for an adapter that the new
        process does not have.
        """
        return [
            [kind, RESTORED, *values]
            for kind, _, *values in self._history.values()
            if kind == _LOAD or values[0] in self._names
        ]

    def take_waiting(self) -> list[Any]:
        """Remove all unanswered requests, and return their response senders.

        Call this method after the engine process has died.
        """
        senders = [sender for sender, _ in self._waiting.values()]
        self._waiting.clear()
        return senders


def is_adapter_call(parameters: Mapping[str, Any]) -> bool:
    """Return whether a request with these parameters is about adapters."""
    return any(name in parameters for name in (_LOAD, _UNLOAD, _LIST))
