# SPDX-License-Identifier: Apache-2.0
"""Coordinates requests that all engine processes must answer before the client is answered."""

import itertools
import queue
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nereid_backend.errors import NereidError
from nereid_backend.serving.process.supervised_model import drain
from nereid_backend.serving.triton_api import Tensors

Answer = tuple[Any, Tensors | NereidError]
"""The response sender of a request, and the response to the request."""


@dataclass(slots=True)
class Call:
    """An unanswered request.

    Attributes:
        sender: the response sender of the request.
        message: the message to the engine processes, without its id.
        pending_replicas: the numbers of the engine processes that have not answered yet.
        answers: the answers of the other engine processes.
        refusal: the error with which an engine process has refused the request; None if no process
            has refused the request.
        error: the last error of an engine process that has refused the request or has died; None if
            there is no such process.
    """

    sender: Any
    message: list[Any]
    pending_replicas: set[int]
    answers: list[Any] = field(default_factory=list)
    refusal: NereidError | None = None
    error: NereidError | None = None


class ReplicaCalls(ABC):
    """Stores requests until every engine process has answered, has refused, or has died.

    Any thread may call `put`. Only the loop's thread may call the other methods.
    """

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[tuple[list[Any] | None, Any]] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        # Maps the id of a message to the unanswered request.
        self._waiting: dict[str, Call] = {}

    @abstractmethod
    def _to_message(self, parameters: Mapping[str, Any]) -> list[Any] | None:
        """Convert the parameters of a request to a message without an id.

        Raises:
            RequestError: a parameter is missing or wrong.
        """

    @abstractmethod
    def _with_id(self, message: list[Any], number: int) -> tuple[str, list[Any]]:
        """Return a new id, and the message with this id. `number` makes the id unique."""

    @abstractmethod
    def _complete(self, call: Call) -> Tensors | NereidError:
        """Return the response to a request for which every engine process is done."""

    def put(self, parameters: Mapping[str, Any], sender: Any) -> None:  # noqa: ANN401
        """Queue a request. `take_new` will return the request.

        Args:
            parameters: the parameters of the request.
            sender: the response sender of the request.

        Raises:
            RequestError: a parameter is missing or wrong.
        """
        self._new.put((self._to_message(parameters), sender))

    def take_new(self) -> list[tuple[list[Any] | None, Any]]:
        """Remove and return the queued requests as pairs of a message and a response sender.

        The messages have no ids yet. The message is None if no engine process needs to answer.
        """
        return list(drain(self._new))

    def add(self, message: list[Any], sender: Any, replicas: Iterable[int]) -> list[Any]:  # noqa: ANN401
        """Store an unanswered request. Return the message for the engine processes.

        Args:
            message: the message without its id, from `take_new`.
            sender: the response sender of the request.
            replicas: the numbers of the engine processes that will get the message.
        """
        call_id, message_with_id = self._with_id(message, next(self._numbers))
        self._waiting[call_id] = Call(sender, message, set(replicas))
        return message_with_id

    def record_answer(self, call_id: str, replica: int, answer: Any) -> Answer | None:  # noqa: ANN401
        """Record the answer of an engine process to the message with the id `call_id`.

        If all engine processes are done now, return the client's response. Return None if other
        processes are not done yet, or if no client waits for the answer.
        """
        call = self._waiting.get(call_id)
        if call is None:
            return None
        call.answers.append(answer)
        return self._answer_if_complete(replica, call_id, call)

    def record_refusal(self, call_id: str, replica: int, error: NereidError) -> Answer | None:
        """Record that an engine process has refused a request.

        If all engine processes are done now, return the client's response. Otherwise, return None.
        """
        call = self._waiting.get(call_id)
        if call is None:
            return None
        call.refusal = call.error = error
        return self._answer_if_complete(replica, call_id, call)

    def record_death(self, replica: int, error: NereidError) -> list[Answer]:
        """Record that an engine process has died because of `error`.

        Return the responses that can be sent now, because their requests waited only for the dead
        process.
        """
        answers = []
        for call_id, call in list(self._waiting.items()):
            if replica in call.pending_replicas:
                call.error = error
                if answer := self._answer_if_complete(replica, call_id, call):
                    answers.append(answer)
        return answers

    def take_waiting(self) -> list[Any]:
        """Remove all unanswered and all queued requests, and return their response senders."""
        senders = [call.sender for call in self._waiting.values()]
        senders += [sender for _, sender in self.take_new()]
        self._waiting.clear()
        return senders

    def _answer_if_complete(self, replica: int, call_id: str, call: Call) -> Answer | None:
        """Record that an engine process is done. If all processes are done, return the response."""
        call.pending_replicas.discard(replica)
        if call.pending_replicas:
            return None
        del self._waiting[call_id]
        return call.sender, self._complete(call)
