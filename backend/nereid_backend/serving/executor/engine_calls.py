# SPDX-License-Identifier: Apache-2.0
"""Sends requests about LoRA adapters, weights or the prefix cache to all engine processes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nereid_backend.errors import CapacityError, NereidError
from nereid_backend.serving.executor.adapter_calls import AdapterCalls, is_adapter_or_weights_call
from nereid_backend.serving.executor.cache_calls import CacheCalls, is_cache_call, is_cache_call_id
from nereid_backend.serving.executor.replica_calls import ReplicaCalls
from nereid_backend.serving.process.supervised_process import SupervisedProcess
from nereid_backend.serving.triton_api import Tensors

Respond = Callable[[Any, Tensors | Exception], None]
"""Sends a final response to a response sender."""


class EngineCalls:
    """Sends requests about adapters, weights and the prefix cache to all running engine processes.

    When the processes have answered, the client gets a response. Any thread may call `put` and read
    `is_replacing_weights`. Only the loop's thread may call the other methods.
    """

    def __init__(
        self,
        processes: Sequence[SupervisedProcess],
        respond: Respond,
        outage: Callable[[], str],
        names_at_start: Sequence[str] = (),
    ) -> None:
        """Create an object that handles requests about adapters, weights and the prefix cache.

        Args:
            processes: the engine processes.
            respond: sends a final response.
            outage: returns the reason why every request is refused. The reason is empty while an
                engine process runs.
            names_at_start: the names of the adapters that each engine process loads at its start.
        """
        self._processes = processes
        self._respond = respond
        self._outage = outage
        self._adapter_calls = AdapterCalls(names_at_start)
        self._cache_calls = CacheCalls()

    @property
    def is_replacing_weights(self) -> bool:
        """Whether an engine process still has to replace the weights of the model."""
        return self._adapter_calls.is_replacing_weights

    def put(self, parameters: Mapping[str, Any], sender: Any) -> bool:  # noqa: ANN401 - the server's own type
        """Queue a request about adapters, weights or the prefix cache for all engine processes.

        Return True if the request was queued. If the parameters belong to a request that generates
        text, do nothing and return False.

        Args:
            parameters: the parameters of the request.
            sender: the server's object that sends the response of the request.

        Raises:
            RequestError: a parameter is missing or wrong.
        """
        if is_adapter_or_weights_call(parameters):
            self._adapter_calls.put(parameters, sender)
            return True
        if is_cache_call(parameters):
            self._cache_calls.put(parameters, sender)
            return True
        return False

    def send_new(self) -> None:
        """Send the queued requests to all running engine processes.

        A request that lists the adapters (its message is None) is answered at once, because the
        executor knows the names.
        """
        for calls in (self._adapter_calls, self._cache_calls):
            for message, sender in calls.take_new():
                if message is None:
                    self._respond(sender, self._adapter_calls.listing())
                else:
                    self._send(calls, message, sender)

    def _send(self, calls: ReplicaCalls, message: list[Any], sender: Any) -> None:  # noqa: ANN401
        """Send a message to all running engine processes. If no process runs, refuse the request.

        `calls` stores the request until all processes have answered.
        """
        running = [process for process in self._processes if process.is_running]
        if not running:
            self._respond(sender, CapacityError(self._outage()))
            return
        message_with_id = calls.add(message, sender, [process.index for process in running])
        for process in running:
            process.child.send(message_with_id)

    def note_answer(self, process: SupervisedProcess, kind: str, call_id: str, answer: Any) -> None:  # noqa: ANN401
        """Record the message [kind, call_id, answer] of an engine process.

        The kind is "adapters" or "cache"; see engine_process.py. If all engine processes have
        answered, answer the client's request.
        """
        calls = self._adapter_calls if kind == "adapters" else self._cache_calls
        if response := calls.record_answer(call_id, process.index, answer):
            self._respond(*response)

    def note_refusal(self, process: SupervisedProcess, call_id: str, error: NereidError) -> None:
        """Record that an engine process has refused the request with the id `call_id`.

        If all engine processes are done now, answer the client's request.
        """
        calls = self._cache_calls if is_cache_call_id(call_id) else self._adapter_calls
        if response := calls.record_refusal(call_id, process.index, error):
            self._respond(*response)

    def on_death(self, process: SupervisedProcess, error: NereidError) -> None:
        """Record that an engine process has died.

        Answer each request that waited only for this process.
        """
        for calls in (self._adapter_calls, self._cache_calls):
            for answer in calls.record_death(process.index, error):
                self._respond(*answer)

    def on_restart(self, process: SupervisedProcess) -> None:
        """Send all earlier changes to a restarted engine process.

        Call this method before the process receives a request. Otherwise, the process would compute
        the request with the weights of the checkpoint, or refuse its adapter.
        """
        for message in self._adapter_calls.messages_for_restart():
            process.child.send(message)

    def end_all(self, error: NereidError) -> None:
        """Answer all requests with `error`."""
        for calls in (self._adapter_calls, self._cache_calls):
            for sender in calls.take_waiting():
                self._respond(sender, error)
