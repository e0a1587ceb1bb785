"""Runs the three steps of the ensemble in one process, with a scripted engine and without a server.

Triton server's Python API exists only in its stubs. This module replaces it by a small
implementation with the same behaviour.
"""

import json
import sys
import types
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch  # noqa: F401 - load_tokenizer keeps it out of processes that have not loaded it


@dataclass
class Tensor:
    name: str
    values: np.ndarray

    def as_numpy(self):
        return self.values


@dataclass
class TritonError:
    text: str
    code: int = 0

    INVALID_ARG, UNAVAILABLE, INTERNAL = 1, 2, 3


@dataclass
class InferenceResponse:
    tensors: list = field(default_factory=list)
    error: TritonError | None = None


class MetricFamily:
    GAUGE, COUNTER, HISTOGRAM = range(3)

    values: ClassVar = {}

    def __init__(self, name, description, kind):
        self.name = name

    def Metric(self, labels, buckets=None):
        return Metric(self.name, {**labels})


@dataclass
class Metric:
    name: str
    labels: dict

    @property
    def key(self):
        extra = [value for label, value in self.labels.items() if label != "model_name"]
        return "/".join([self.name.removeprefix("nereid:"), *extra])

    def set(self, value):
        MetricFamily.values[self.key] = value

    def increment(self, value):
        assert value > 0
        MetricFamily.values[self.key] = MetricFamily.values.get(self.key, 0) + value

    def observe(self, value):
        MetricFamily.values.setdefault(self.key, []).append(value)


def _install():
    made = types.ModuleType("triton_python_backend_utils")
    made.Tensor, made.InferenceResponse, made.TritonError = Tensor, InferenceResponse, TritonError
    made.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    made.TritonModelException = RuntimeError
    made.MetricFamily = MetricFamily
    made.get_input_tensor_by_name = lambda request, name: request.inputs.get(name)
    sys.modules.setdefault("triton_python_backend_utils", made)


_install()

from nereid_backend import EngineConfig  # noqa: E402
from nereid_backend.errors import EngineError, RequestError  # noqa: E402
from nereid_backend.serving import tensor_names  # noqa: E402
from nereid_backend.serving.executor.scripted_engine import SCRIPT_VARIABLE, ScriptedEngine  # noqa: E402
from nereid_backend.serving.executor.streams import Sequence, Stream  # noqa: E402
from nereid_backend.serving.feedback import FeedbackReader, Signal  # noqa: E402
from nereid_backend.serving.postprocessor.postprocessor_model import PostprocessorModel  # noqa: E402
from nereid_backend.serving.tokenizer.tokenizer_model import TokenizerModel  # noqa: E402
from nereid_backend.serving.wire import Opening, RequestEnvelope, unpack_params  # noqa: E402


class Request:
    """A request to one step. It is its own response sender."""

    def __init__(self, **inputs):
        self.inputs = {name: Tensor(name, values) for name, values in inputs.items()}
        self.replies = []

    def get_response_sender(self):
        return self

    def send(self, reply=None, flags=0):
        self.replies += [] if reply is None else [reply]

    def is_cancelled(self):
        return False

    def parameters(self):
        return "{}"


class Pipeline:
    """The tokenizer, a scripted engine and the postprocessor of one checkpoint."""

    def __init__(self, model, script, folder, monkeypatch, **settings):
        path = folder / "script.json"
        path.write_text(json.dumps(script))
        monkeypatch.setenv(SCRIPT_VARIABLE, str(path))
        values = {"model": str(model), "engine": "scripted", **settings}
        config = {"parameters": {n: {"string_value": v} for n, v in values.items()}}
        args = {"model_config": json.dumps(config), "model_repository": str(folder / "llm")}
        self.tokenizer, self.postprocessor = TokenizerModel(), PostprocessorModel()
        self.tokenizer.initialize(args)
        self.postprocessor.initialize(args)
        self.engine = ScriptedEngine(EngineConfig(model=str(model)), lambda _: None)
        self.feedback = FeedbackReader(64)
        self.params = None
        self.num_steps = 0

    def ask(self, **inputs):
        """Return the responses of a request as dicts of output lists. Raise an error response."""
        (reply,) = self.tokenizer.execute([Request(**inputs)])
        given = _outputs(reply)
        envelope = RequestEnvelope.unpack(given[tensor_names.ENVELOPE])
        self.params = unpack_params(envelope.params)
        slots = self.feedback.acquire(envelope.n)
        opening = Opening(envelope.context, self.feedback.path, slots)
        sequences = [Sequence(index, slot) for index, slot in enumerate(slots)]
        stream = Stream("1", None, 1, sequences, opening, 0.0)
        self.engine.add_request("1", given[tensor_names.PROMPT_TOKEN_IDS].tolist(), self.params)
        replies = []
        while not stream.has_ended:
            for update in self.engine.step():
                if update.error:
                    raise (RequestError if update.is_refused else EngineError)(update.error)
                stream.add(update)
            replies += self._step(stream)
            self.num_steps += 1
        self.feedback.release(slots)
        return replies

    def _step(self, stream):
        token_ids, state = stream.take_step(0.0)
        request = Request(**{tensor_names.TOKEN_IDS: token_ids, tensor_names.STATE: state.pack()})
        self.postprocessor.execute([request])
        for sequence in stream.sequences:
            if self.feedback.signal(sequence.slot, 1) is Signal.STOP_STRING:
                self.engine.abort("1", sequence.index)
        return [_texts(reply) for reply in request.replies]


def chat(content, *, stream=True, **fields):
    """Return the input tensors of a chat request."""
    body = {"messages": [{"role": "user", "content": content}], **fields}
    return {
        "chat_request": np.array([json.dumps(body).encode()], dtype=np.object_),
        "stream": np.array([stream]),
    }


def completion(text, *, stream=True, returns=(), **fields):
    """Return the input tensors of a completion request."""
    return {
        "text_input": np.array([text.encode()], dtype=np.object_),
        "stream": np.array([stream]),
        "sampling_parameters": np.array([json.dumps(fields).encode()], dtype=np.object_),
        **{f"return_{name}": np.array([True]) for name in returns},
    }


def _outputs(reply):
    if reply.error is not None:
        kinds = {TritonError.INVALID_ARG: RequestError}
        raise kinds.get(reply.error.code, EngineError)(reply.error.text)
    return {tensor.name: tensor.as_numpy() for tensor in reply.tensors}


def _texts(reply):
    found = {name: values.tolist() for name, values in _outputs(reply).items()}
    found = {
        name: [value.decode() if isinstance(value, bytes) else value for value in values]
        for name, values in found.items()
    }
    return found | {"delta": [json.loads(text) for text in found["delta"]]}
