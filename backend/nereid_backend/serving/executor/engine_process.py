# SPDX-License-Identifier: Apache-2.0
"""The engine process. It runs the code that may crash: torch, drivers and kernels.

The first message contains the settings and the number of the process ("replica").
The following messages are sent in addition to those of every child process (process_entry.py):

    stub -> engine    ["add", id, int32 ids as bytes, packed params, number of sequences]
                          and the packed images as a sixth value if the request has images
                      ["abort", id, index or None]
                      ["load_lora", id, name, path]
                      ["unload_lora", id, name]
                      ["reload_weights", id, path or "", "finish" or "refuse"]
                      ["cache", id, operation, {name: value}], see PrefixSessions.call
    engine -> stub    ["updates", [row, ...]], each row has the fields of RequestUpdate in order
                      ["started", [[id, monotonic time], ...]], requests that left the queue
                      ["compiled", [[id, start, end], ...]], monotonic times of grammar compilations
                      ["adapters", id or "", [name, ...]], the names of all LoRA adapters
                      ["cache", id, {name: value}], the answer to the message "cache"
                      ["stats", {name: number}], every 0.1 s during work and when work ends
"""

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from nereid_backend.config import EngineConfig
from nereid_backend.engine.engine_protocol import StepEngine
from nereid_backend.errors import CapacityError, EngineError, RequestError
from nereid_backend.fast_imports import importing
from nereid_backend.serving.process.process_entry import Send, error_text, serve
from nereid_backend.serving.wire import pack_update, unpack_params

_STATS_INTERVAL_S = 0.1

log = logging.getLogger("nereid")

MakeEngine = Callable[[EngineConfig, Callable[[str], None]], StepEngine]
PrepareReplica = Callable[[EngineConfig, int], EngineConfig]


class _Reload(NamedTuple):
    """The values of a message "reload_weights".

    Attributes:
        call_id: the id of the message.
        path: the folder of the new weights. "" means that the present folder is read again.
        mode: what happens to running requests: "finish" waits until they have ended, and "refuse"
            ends them with an error.
    """

    call_id: str
    path: str
    mode: str


class EngineService:
    """Passes requests to an engine, and sends the engine's updates to the executor.

    Args:
        engine: the engine.
        send: sends a message to the stub.
    """

    def __init__(self, engine: StepEngine, send: Send) -> None:
        self.info = engine.info
        self._engine = engine
        self._send = send
        self._stats_due = 0.0
        # The number of unfinished sequences of each request, by request id.
        self._num_unfinished_sequences: dict[str, int] = {}
        # A client can request a replacement of the weights. The replacement is stored here until
        # all running requests have ended; otherwise, the value is None. During this time, new
        # messages are added to `_held_messages` as pairs of a kind and a list of values.
        self._pending_reload: _Reload | None = None
        self._held_messages: list[tuple[str, list[Any]]] = []

    def has_work(self) -> bool:
        """Return whether the engine must run a step.

        A step is needed for unfinished requests, and to test or activate a compiled forward pass.
        """
        return self._engine.has_work() or self._engine.is_swapping()

    def start(self) -> None:
        """Load the grammar libraries. Then send the names of the adapters and the statistics."""
        self._engine.warm_up()
        self._send(["adapters", "", self._engine.lora_names])
        self._send(["stats", self._engine.stats()._asdict()])

    def handle(self, kind: str, values: list[Any]) -> None:
        """Handle a message from the stub, the process in which Triton server runs the executor.

        While a replacement of the weights waits until no request runs, store all messages for
        later, except messages that abort a running request.

        Args:
            kind: the kind of the message, such as "add", "abort" or "reload_weights".
            values: the other values of the message. The first value is an id.
        """
        if self._must_hold(kind, values):
            self._held_messages.append((kind, values))
        elif kind == "abort":
            request_id, index = values
            self._engine.abort(request_id, index)
        elif kind == "reload_weights":
            call_id, path, mode = values
            self._begin_reload(_Reload(call_id, path, mode))
        else:
            self._handle_request(kind, values)

    def _must_hold(self, kind: str, values: list[Any]) -> bool:
        """Return whether a message must be stored until the weights have been replaced."""
        if self._pending_reload is None:
            return False
        if kind != "abort":
            return True
        request_id, _ = values
        return request_id not in self._num_unfinished_sequences  # The request is stored, too.

    def _handle_request(self, kind: str, values: list[Any]) -> None:
        """Pass a request to the engine. If an error occurs, refuse only this request."""
        request_id = values[0]
        try:
            self._pass_to_engine(kind, values)
        except (RequestError, CapacityError) as error:
            self._send(["refused", request_id, type(error).__name__, str(error)])
        except Exception as error:
            # Catch every exception, because an error of one request must not end the other
            # requests.
            log.exception("request %s could not be added", request_id)
            self._send(["refused", request_id, EngineError.__name__, error_text(error)])

    def _pass_to_engine(self, kind: str, values: list[Any]) -> None:
        """Call the engine's method for a message of the kind `kind`, and send the result.

        The message "add" has no result, because `advance` sends updates for the new request. A
        message "cache" calls one of the operations "statistics", "extend" and "drop", which report,
        extend or delete the cached prefixes of a client's sessions (conversations).

        Raises:
            RequestError, CapacityError: the engine refuses the request.
        """
        engine = self._engine
        match kind, *values:
            case "add", request_id, token_ids, params, num_sequences, *images:
                self._add(request_id, token_ids, params, num_sequences, *images)
            case "cache", call_id, operation, arguments:
                self._send(["cache", call_id, engine.sessions.call(operation, arguments)])
            case "load_lora", call_id, name, path:
                engine.load_lora(name, path)
                self._send(["adapters", call_id, engine.lora_names])
            case "unload_lora", call_id, name:
                engine.unload_lora(name)
                self._send(["adapters", call_id, engine.lora_names])
            case _:
                raise AssertionError(f"the stub sends no message of the kind {kind!r}")

    def _add(
        self,
        request_id: str,
        token_ids: bytes,
        packed_params: bytes,
        num_sequences: int,
        packed_images: bytes = b"",
    ) -> None:
        """Add a request to the engine; see `Engine.add_request` for the errors.

        Args:
            request_id: the id of the request in the engine.
            token_ids: the prompt's token ids as int32 numbers.
            packed_params: the packed SamplingParams.
            num_sequences: the number of sequences for which the executor has reserved memory.
            packed_images: the packed ImageInputs; b"" if the prompt has no images.
        """
        prompt = memoryview(token_ids).cast("i")
        params = unpack_params(packed_params)
        if params.n != num_sequences:
            raise RequestError(
                f"envelope: the message from the tokenizer to the executor is for "
                f"{num_sequences} sequences, but its sampling parameters have n={params.n}."
            )
        images = None
        if packed_images:
            # `packed_tensors` imports torch. It is imported only for a request with images, because
            # `scripted_engine`, a test tool, uses this module without torch.
            from nereid_backend.vision.packed_tensors import unpack_images

            images = unpack_images(packed_images)
        self._engine.add_request(request_id, prompt, params, images)
        self._num_unfinished_sequences[request_id] = num_sequences

    def _begin_reload(self, reload: _Reload) -> None:
        """Replace the weights as soon as no request runs. Until then, hold back new messages."""
        self._pending_reload = reload
        if reload.mode == "refuse":
            self._refuse_running_requests()
        self._reload_if_idle()

    def _refuse_running_requests(self) -> None:
        """End all running requests with an error, because the weights are replaced."""
        message = "the weights of the model are being replaced. Try again."
        for request_id in self._num_unfinished_sequences:
            self._send(["refused", request_id, CapacityError.__name__, message])
            self._engine.abort(request_id)

    def _reload_if_idle(self) -> None:
        """Replace the weights if a replacement was requested and no request runs any more.

        While the replacement waited, new messages were stored in `_held_messages`. These messages
        are handled after the replacement.
        """
        if self._pending_reload is None or self._engine.has_work():
            return
        reload = self._pending_reload
        self._pending_reload = None
        self._replace_weights(reload)
        # Start a new list before the messages are handled, because a message can request another
        # replacement of the weights. `handle` then stores all later messages in the new list.
        messages = self._held_messages
        self._held_messages = []
        for kind, values in messages:
            self.handle(kind, values)

    def _replace_weights(self, reload: _Reload) -> None:
        """Replace the weights, and send the result: the names of the adapters, or an error."""
        try:
            self._engine.reload(reload.path, lambda line: self._send(["progress", line]))
        except RequestError as error:
            self._send(["refused", reload.call_id, RequestError.__name__, str(error)])
        else:
            self._send(["adapters", reload.call_id, self._engine.lora_names])

    def advance(self) -> None:
        """Let the engine compute the next tokens of its running requests, and send the results.

        If a replacement of the weights waits and the engine has no more work, replace the weights.
        """
        engine = self._engine
        updates = engine.step()
        # `step` has also stored the events of this step in the lists `compiled` (times of grammar
        # compilations) and `started` (requests that have left the queue). Send these lists first,
        # so that the start of a request is reported before the first tokens of the request.
        self._send_items("compiled", engine.compiled)
        self._send_items("started", engine.started)
        self._send_items("updates", [pack_update(update) for update in updates])
        for update in updates:
            if update.finish_reason is not None:  # The sequence of the update has ended.
                self._note_end_of_sequence(update.request_id)
        self._send_stats_if_due()
        self._reload_if_idle()

    def _send_items(self, kind: str, items: Sequence[object]) -> None:
        """Send a message that contains `items`. Do nothing if there are no items."""
        if items:
            self._send([kind, items])

    def _send_stats_if_due(self) -> None:
        """Send the statistics of the engine every 0.1 s, and whenever the engine has no work."""
        now = time.monotonic()
        if now >= self._stats_due or not self._engine.has_work():
            self._send(["stats", self._engine.stats()._asdict()])
            self._stats_due = now + _STATS_INTERVAL_S

    def _note_end_of_sequence(self, request_id: str) -> None:
        """Record that a sequence has ended. A request runs until all its sequences have ended."""
        num_unfinished = self._num_unfinished_sequences.get(request_id, 0) - 1
        if num_unfinished > 0:
            self._num_unfinished_sequences[request_id] = num_unfinished
        else:
            self._num_unfinished_sequences.pop(request_id, None)


def serve_engine(make: MakeEngine, prepare: PrepareReplica | None = None) -> NoReturn:
    """Run this process as an engine process, then exit.

    Args:
        make: builds the engine. The arguments are the engine's settings and a function that reports
            slow operations.
        prepare: returns the settings of one engine process. The arguments are the settings of the
            server and the number of the process. None means that all processes use the settings of
            the server.
    """
    serve(functools.partial(_load_service, make, prepare))


def _load_service(
    make: MakeEngine,
    prepare: PrepareReplica | None,
    settings: dict[str, Any],
    send: Send,
    progress: Callable[[str], None],
) -> EngineService:
    """Load the model, and return the object that handles the messages to this process.

    Args:
        make: builds the engine from its settings and `progress`.
        prepare: changes the settings for the engine process with a number; None if all engine
            processes have the same settings.
        settings: the first message to this process: the fields of EngineConfig, and the number of
            this process ("replica").
        send: sends a message to the stub.
        progress: reports a slow operation with a line of text.
    """
    config_fields = dict(settings)
    replica = config_fields.pop("replica", 0)
    config = EngineConfig(**config_fields)
    if prepare is not None:
        config = prepare(config, replica)
    return EngineService(make(config, progress), send)


if __name__ == "__main__":
    with importing():
        from nereid_backend import Engine
        from nereid_backend.parallel.replica import prepare_replica
    serve_engine(Engine, prepare_replica)
