# SPDX-License-Identifier: Apache-2.0
"""The base class of the Triton models `embedding` and `rerank`.

The server's thread sends the job of each request to the worker process. The loop's thread
(supervised_model.py) receives the outcomes, and sends one response for each request.

The models are not decoupled, so clients can call the models with /infer and with unary gRPC calls.
`execute` returns before the responses are complete. The loop sends each response later, through the
response sender of the request.
"""

import dataclasses
import itertools
import json
import os
import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy.typing as npt

from nereid_backend.errors import CapacityError, EngineError, NereidError
from nereid_backend.pooling.inputs.text_size import TRUNCATE_REMEDY, TextLimit, check_num_inputs
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.serving import pooling_tensor_names as names
from nereid_backend.serving import triton_api
from nereid_backend.serving.pooling.decode_request import decode_texts, parse_options
from nereid_backend.serving.pooling.jobs import Job, Outcome
from nereid_backend.serving.pooling.pooling_metrics import PoolingMetrics
from nereid_backend.serving.process.process_handle import ChildProgram, Limit, refusal_error
from nereid_backend.serving.process.supervised_model import SupervisedModel
from nereid_backend.serving.process.supervised_process import SupervisedProcess
from nereid_backend.serving.serving_settings import check_single_instance, read_pooling_settings
from nereid_backend.serving.tracing import Tracing, traceparent_of
from nereid_backend.serving.triton_api import Tensors

_POLL_S = 0.02
# The loop repeatedly checks whether requests have been cancelled. It checks at most
# `_CANCEL_CHECKS` requests at a time, because each check is a round trip to the server.
_CANCEL_CHECKS = 32
# If the outputs have fewer than `_SMALL_BYTES` bytes, the free shared memory is not checked.
_SMALL_BYTES = 64 * 1024
# Triton server enlarges the memory pool of a Python model in steps of `_POOL_STEP_BYTES` bytes.
_POOL_STEP_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request that has not been answered yet.

    Attributes:
        request_id: the id of the request's job in the worker.
        sender: the server's response sender.
        returns_info: whether the response contains the output `info`.
        num_inputs: the number of inputs.
        arrived: the time at which the request arrived, by time.monotonic().
        traceparent: the parent of the request's spans (see tracing.py); "" for none.
    """

    request_id: str
    sender: Any
    returns_info: bool
    num_inputs: int
    arrived: float
    traceparent: str


class PoolingStub(SupervisedModel[PendingRequest]):
    """A Triton model whose computations run in a worker process."""

    kind: str
    """The name of the Triton model: "embedding" or "rerank". It prefixes the setting names."""
    tasks: tuple[str, ...]
    """The tasks of the checkpoints that this model can serve."""
    input_names: tuple[str, ...]
    """The names of the input tensors that contain the inputs of a job."""
    option_types: Mapping[str, type]
    """The names and types of the options in the input tensor `options`."""
    worker_module = "nereid_backend.serving.pooling.pooling_worker"
    """The Python module that the worker process runs."""

    @abstractmethod
    def read_job(self, request: Any, given: list[str], options: dict[str, Any]) -> Job:  # noqa: ANN401 - the server's own type
        """Convert `request` to a job.

        Args:
            request: the server's request.
            given: the names of the input tensors that the request contains, in the order of
                `input_names`.
            options: the options of the request.

        Raises:
            RequestError: an input is missing or wrong.
        """

    def read_array(self, request: Any, name: str) -> npt.NDArray[Any]:  # noqa: ANN401
        """Return the input tensor with the name `name`. Its elements are the inputs of a job.

        Raises:
            RequestError: the tensor is wrong, or has more elements than the queue can contain.
        """
        values = triton_api.array(request, name)
        check_num_inputs(name, values.size, self._max_inputs)
        return values

    def read_texts(self, request: Any, name: str, options: Mapping[str, Any]) -> list[str]:  # noqa: ANN401
        """Decode the elements of the input tensor with the name `name`, and return the texts.

        Refuse a text whose number of bytes shows that the text has too many tokens. If the option
        `truncate` is true, do not check the sizes, because the worker truncates the texts.

        Raises:
            RequestError: there are too many texts, or a text is too long or is not UTF-8.
        """
        values = self.read_array(request, name)  # This call refuses too many texts.
        if not options.get("truncate"):
            for index, value in enumerate(values):
                where = f"{name}: element {index}:" if len(values) > 1 else f"{name}:"
                self.text_limit.check(f"{where} the input", value, TRUNCATE_REMEDY)
        return decode_texts(values, name)

    @property
    def text_limit(self) -> TextLimit:
        """The limit on the size of a text. It depends on numbers that the worker has reported."""
        assert self.child is not None
        return _text_limit(self.child.info)

    @abstractmethod
    def build_outputs(self, outcome: Outcome) -> Tensors:
        """Return the output tensors of a finished job."""

    def __init__(self) -> None:
        self.title = f"model {self.kind}"
        self.log_prefix = f"{self.kind}: "
        super().__init__()
        # The id of each job is the next number of this counter.
        self._ids = itertools.count(1)
        # The names of all environment variables of this model begin with this prefix.
        self._variable_prefix = f"NEREID_{self.kind.upper()}_"

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start the worker process, wait until its model is loaded, and start the model's loop.

        If the settings contain no checkpoint, start only the loop. The loop then answers requests
        for information about the model, and every other request is refused.
        """
        try:
            check_single_instance(args)
            self._settings, config = read_pooling_settings(self.kind, args)
            if config is not None:  # The settings contain a checkpoint.
                self._serve_checkpoint(config)
        except NereidError as error:
            raise triton_api.load_error(error) from error
        self._metrics = PoolingMetrics(args.get("model_name", self.kind))
        self._tracing = Tracing(self.kind)
        self.start_loop()

    def finalize(self) -> None:
        """End all requests, and stop the worker process."""
        super().finalize()
        self._tracing.close()

    def accept(self, request: Any, sender: Any) -> None:  # noqa: ANN401 - the server's own types
        """Accept a request as a job, or respond with information about the model.

        A request can ask for information, have inputs, or both. If no checkpoint is served, the
        inputs of a request for information are ignored.

        Raises:
            RequestError: an input is missing or wrong.
            CapacityError: the model has too many requests, or no checkpoint is served.
        """
        returns_info = bool(triton_api.optional_bool(request, names.RETURN_INFO))
        has_checkpoint = self.child is not None
        if not has_checkpoint and not returns_info:
            raise CapacityError(self._not_served_message())
        self._check_num_requests()
        given = [name for name in self.input_names if triton_api.has_tensor(request, name)]
        has_job = has_checkpoint and bool(given)
        if returns_info and not has_job:
            self.respond_later(sender, self._info())
            return
        # If no input tensor is given, this call raises a RequestError.
        self._accept_job(request, sender, given, returns_info=returns_info)

    def _accept_job(
        self,
        request: Any,  # noqa: ANN401 - the server's own types
        sender: Any,  # noqa: ANN401
        given: list[str],
        *,
        returns_info: bool,
    ) -> None:
        """Send a request as a job to the worker process.

        A job consists of the inputs and the options of one request. If there are no inputs, respond
        without the worker: the output tensors are empty.

        Args:
            request: the request.
            sender: sends the response.
            given: the names of the request's tensors.
            returns_info: whether the response also contains the output `info`, which describes the
                served checkpoint.
        """
        options = parse_options(triton_api.optional_text(request, names.OPTIONS), self.option_types)
        job = self.read_job(request, given, options)
        if job.inputs:
            self._add_job(request, sender, job, returns_info=returns_info)
            return
        outputs = self._empty_outputs(job)
        if returns_info:
            outputs = outputs | self._info()
        self.respond_later(sender, outputs)

    def _check_num_requests(self) -> None:
        """Raise a CapacityError if the number of requests has reached the setting max_requests."""
        limit = self._settings.max_requests
        if self.num_requests >= limit:
            raise CapacityError(
                f"the model has {limit} requests, which is the limit ({self.kind}_max_requests). "
                "Try again later."
            )

    def _empty_outputs(self, job: Job) -> Tensors:
        """Return the output tensors of a job without inputs. The worker does not get this job."""
        assert self.child is not None
        kind = job.options.get("kind") or self.child.info["kinds"][0]
        return self.build_outputs(Outcome.empty(kind))

    def _add_job(self, request: Any, sender: Any, job: Job, *, returns_info: bool) -> None:  # noqa: ANN401
        """Send a job to the worker, and store the data that the response will need."""
        pending = PendingRequest(
            request_id=str(next(self._ids)),
            sender=sender,
            returns_info=returns_info,
            num_inputs=len(job.inputs),
            arrived=time.monotonic(),
            traceparent=traceparent_of(request),
        )
        self.add_request(pending.request_id, pending, ["add", pending.request_id, *job.row()])

    # Only the loop's thread calls the methods below.

    def handle(self, process: SupervisedProcess, kind: str, values: list[Any]) -> None:  # noqa: ARG002
        """Respond to a request after the worker has completed or refused the job of the request.

        Ignore other kinds of messages, and a request that has already ended, for example because of
        an abort.
        """
        match kind, values:
            # `outcome_row` contains the items of `Outcome.row`.
            case "done", [request_id, started, *outcome_row]:
                pending = self.remove(request_id)
                if pending is not None:
                    self._respond_with_outcome(pending, started, outcome_row)
            case "refused", [request_id, error_class, message]:
                pending = self.remove(request_id)
                if pending is not None:
                    self.respond(pending.sender, refusal_error(error_class, message))

    def _respond_with_outcome(
        self, pending: PendingRequest, started: float, outcome_row: list[Any]
    ) -> None:
        """Send the outputs of a complete job to the client, and record the success.

        `started` is the time at which the computation of the first input started.
        """
        try:
            outcome = Outcome.from_row(outcome_row)
            outputs = self.build_outputs(outcome)
        except Exception as error:  # noqa: BLE001 - the request ends here and needs a response
            triton_api.log.exception("the outputs of a request failed in the %s", self.title)
            self.respond(pending.sender, error)
            return
        self._record_success(pending, started, num_tokens=int(outcome.num_tokens.sum()))
        info = self._info() if pending.returns_info else {}
        self.respond(pending.sender, outputs | info)

    def _record_success(self, pending: PendingRequest, started: float, num_tokens: int) -> None:
        """Record the metrics and the spans of a successful request.

        Call this method before the outputs are sent, because the time of the computation ends at
        the call. The time for sending the outputs must not count.

        Args:
            pending: the request.
            started: the time at which the computation of the request's first input started, by
                time.monotonic().
            num_tokens: the number of tokens of all inputs.
        """
        self._metrics.note_success(pending.arrived, started, pending.num_inputs, num_tokens)
        parent = pending.traceparent
        self._tracing.record("nereid.queue", parent, pending.arrived, started)
        self._tracing.record(
            "nereid.compute",
            parent,
            started,
            time.monotonic(),
            {"nereid.inputs": pending.num_inputs, "gen_ai.usage.input_tokens": num_tokens},
        )

    def do_periodic_work(self) -> float:
        """Check some requests for cancellation, and end the cancelled requests."""
        for request_id in list(itertools.islice(self.requests, _CANCEL_CHECKS)):
            pending = self.requests[request_id]
            if pending.sender.is_cancelled():
                self.end(pending, EngineError("the request was cancelled"))
            else:
                # Move the request to the end of the dict, so that other requests are checked next.
                self.requests[request_id] = self.requests.pop(request_id)
        return _POLL_S

    def end(self, request: PendingRequest, error: NereidError) -> None:
        """Remove a request, remove its job from the worker, and send `error` as the response."""
        self.owner(request.request_id).child.send(["abort", request.request_id])
        self.remove(request.request_id)
        self.respond(request.sender, error)

    def respond(self, sender: Any, result: Tensors | Exception) -> None:  # noqa: ANN401
        """Send the response to a request. The response consists of outputs or of an error."""
        if not isinstance(result, Exception) and not _fits_shared_memory(result):
            result = CapacityError(
                "the response is larger than the free part of /dev/shm, the shared memory of the "
                "machine. Try again later."
            )
        self._metrics.note_response(result)
        super().respond(sender, result)

    def publish_metrics(self) -> None:
        """Publish the metrics. Do nothing if the last publication was less than 1 s ago."""
        self._metrics.publish(self.num_requests)

    def restart_message(self) -> str:
        """Return the message that clients get while the worker restarts."""
        return "the worker process is restarting. Try again in a few seconds."

    def failure_message(self, error: NereidError) -> str:
        """Return the message that clients get after all restarts of the worker have failed."""
        return (
            f"the worker process could not be restarted in {self._settings.max_restarts} "
            f"attempts (max_restarts). Restart the server. The last reason was: {error}"
        )

    def on_restart(self, process: SupervisedProcess) -> None:
        """Record that the worker was restarted, and set the number of restart attempts to 0.

        So the setting max_restarts limits the attempts to restart the worker after one death. It
        does not limit the total number of restarts.
        """
        process.num_attempts = 0
        self._metrics.note_restart()

    def _serve_checkpoint(self, config: PoolingConfig) -> None:
        """Start the worker process, and set the limit on the number of inputs.

        Raises:
            EngineError: the worker cannot be started, or the checkpoint has another task.
        """
        worker = self._start_worker(config)
        self._check_task(worker, config.model)
        self.processes = [worker]
        # If the setting max_num_waiting is missing, the limit depends on the model's length limit,
        # which the worker has reported.
        text_limit = _text_limit(worker.child.info)
        self._max_inputs = config.max_num_waiting or text_limit.default_max_num_waiting

    def _start_worker(self, config: PoolingConfig) -> SupervisedProcess:
        """Start the worker process of this model.

        Each kind of model reads its settings from environment variables with its own prefix.
        Therefore, the message of an error names this prefix.
        """
        program = self._worker_program(config)
        try:
            return SupervisedProcess.start(program, log_prefix=self.log_prefix)
        except NereidError as error:
            raise EngineError(
                f"{self.kind}: {error} (The variables of this model begin with "
                f"{self._variable_prefix}.)"
            ) from error

    def _worker_program(self, config: PoolingConfig) -> ChildProgram:
        """Describe the worker process: its module, its settings, and limits on its run."""
        settings = self._settings
        return ChildProgram(
            name="worker",
            title=f"worker of the {self.title}",
            module=self.worker_module,
            settings=dataclasses.asdict(config),
            start_timeout=Limit("start_timeout_s", settings.start_timeout_s),
            hang_timeout=Limit("hang_timeout_s", settings.hang_timeout_s),
            max_restarts=Limit("max_restarts", settings.max_restarts),
        )

    def _check_task(self, worker: SupervisedProcess, checkpoint: str) -> None:
        """Check the checkpoint's task. If it is wrong, stop the worker and raise an EngineError."""
        task = worker.child.info["task"]
        if task not in self.tasks:
            worker.stop()
            raise EngineError(
                f"{self._variable_prefix}MODEL: the checkpoint {checkpoint} has the task "
                f"{task!r}, but the model {self.kind!r} needs a checkpoint for "
                f"{' or '.join(self.tasks)}."
            )

    def _info(self) -> Tensors:
        """Return the output `info`.

        The output contains a JSON text that describes the served checkpoint.
        """
        if self.child is None:
            info = {"task": "none", "reason": self._not_served_message()}
        else:
            info = dict(self.child.info)
            info["name"] = self._settings.served_model_name or PurePath(info["model"]).name
        return {names.INFO: triton_api.strings(json.dumps(info))}

    def _not_served_message(self) -> str:
        """Return the message that clients get if no checkpoint is set."""
        return (
            f"no checkpoint is served as {self.kind!r}. Set {self._variable_prefix}MODEL to the "
            "folder of a checkpoint and restart the server."
        )


def _text_limit(info: Mapping[str, Any]) -> TextLimit:
    """Return the limit on the size of a text. `info` is what a worker reports about its model."""
    return TextLimit(info["max_model_len"], info["max_token_bytes"])


def _fits_shared_memory(outputs: Tensors) -> bool:
    """Return whether output tensors fit into the free shared memory.

    Triton server receives the outputs through shared memory. For small tensors, return True without
    checking the memory.
    """
    num_bytes = 0
    for array in outputs.values():
        # A STRING tensor is an array of byte strings.
        num_bytes += sum(map(len, array)) if array.dtype == object else array.nbytes
    if num_bytes < _SMALL_BYTES:
        return True
    try:
        shared_memory = os.statvfs("/dev/shm")
    except OSError:
        return True
    free_bytes = shared_memory.f_bavail * shared_memory.f_frsize
    # The server may have to enlarge the memory pool of this Python model. While the pool is
    # enlarged, it needs space for both the old content and the new response.
    needed_bytes = 2 * num_bytes + _POOL_STEP_BYTES
    return free_bytes > needed_bytes
