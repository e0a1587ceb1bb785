"""Runs the models of the ensemble in one process, with a scripted engine and without a server."""

import itertools
import json

import numpy as np
import torch  # noqa: F401 - load_tokenizer keeps it out of processes that have not loaded it
from backend.serving.fake_server import Request, TritonError
from nereid_backend import EngineConfig
from nereid_backend.errors import EngineError, RequestError
from nereid_backend.serving import tensor_names
from nereid_backend.serving.executor.scripted.scripted_engine import SCRIPT_VARIABLE, ScriptedEngine
from nereid_backend.serving.executor.streams import Sequence, Stream
from nereid_backend.serving.feedback import FeedbackReader, Signal
from nereid_backend.serving.postprocessor.postprocessor_model import PostprocessorModel
from nereid_backend.serving.tokenizer.tokenizer_model import TokenizerModel
from nereid_backend.serving.wire import Opening, RequestEnvelope, unpack_params

_REQUEST_ID = "1"


class Pipeline:
    """The Triton models of one checkpoint: tokenizer, executor and postprocessor.

    A scripted engine replaces the executor. It gives the answers in `script`.
    """

    def __init__(self, model, script, folder, monkeypatch, **settings):
        path = folder / "script.json"
        path.write_text(json.dumps(script))
        monkeypatch.setenv(SCRIPT_VARIABLE, str(path))
        parameters = {"model": str(model), "engine": "scripted", **settings}
        config = {
            "parameters": {name: {"string_value": value} for name, value in parameters.items()}
        }
        # Triton server passes these arguments to the method `initialize` of each Python model.
        triton_args = {"model_config": json.dumps(config), "model_repository": str(folder / "llm")}
        self.tokenizer, self.postprocessor = TokenizerModel(), PostprocessorModel()
        self.tokenizer.initialize(triton_args)
        self.postprocessor.initialize(triton_args)
        self.engine = ScriptedEngine(EngineConfig(model=str(model)), lambda _: None)
        self.feedback = FeedbackReader(64)
        self.params = None
        self._serials = itertools.count(1)
        self.num_steps = 0

    def ask(self, **inputs):
        """Send a request, and return its responses. Each response is a dict of output lists.

        Raises:
            RequestError: if the response is an error that the client caused.
            EngineError: if the response is another error.
        """
        reply = self.tokenizer.respond(Request(**inputs))
        tokenizer_outputs = _outputs(reply)
        envelope = RequestEnvelope.unpack(tokenizer_outputs[tensor_names.ENVELOPE])
        self.params = unpack_params(envelope.params)
        slots = self.feedback.acquire(envelope.n)
        opening = Opening(envelope.context, slots)
        sequences = [Sequence(index, slot) for index, slot in enumerate(slots)]
        serial = next(self._serials)
        stream = Stream(_REQUEST_ID, None, serial, sequences, opening, last_sent=0.0)
        prompt = tokenizer_outputs[tensor_names.PROMPT_TOKEN_IDS].tolist()
        self.engine.add_request(_REQUEST_ID, prompt, self.params)

        replies = []
        while not stream.has_ended:
            for update in self.engine.step():
                if update.error:
                    raise (RequestError if update.is_refused else EngineError)(update.error)
                stream.add(update)
            replies += self._postprocess(stream)
            self.num_steps += 1
        self.feedback.release(slots)
        return replies

    def _postprocess(self, stream):
        """Send the new tokens of a stream to the postprocessor, and return its responses.

        Abort each sequence in which the postprocessor found a stop string.
        """
        message = self.feedback.sign(stream.take_step(now=0.0).pack())
        request = Request(**{tensor_names.STATE: np.frombuffer(message, dtype=np.uint8)})
        self.postprocessor.execute([request])
        for sequence in stream.sequences:
            if self.feedback.signal(sequence.slot, stream.serial) is Signal.STOP_STRING:
                self.engine.abort(_REQUEST_ID, sequence.index)
        if request.error is not None:
            raise EngineError(request.error)
        return [_texts(outputs) for outputs in request.replies]


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
    """Return the output tensors of a response by name, or raise the error of the response."""
    if reply.error is not None:
        is_clients_fault = reply.error.code == TritonError.INVALID_ARG
        raise (RequestError if is_clients_fault else EngineError)(reply.error.text)
    return {tensor.name: tensor.as_numpy() for tensor in reply.tensors}


def _texts(outputs):
    """Return the output tensors as lists, with decoded texts and JSON objects."""
    lists = {
        name: [value.decode() if isinstance(value, bytes) else value for value in values.tolist()]
        for name, values in outputs.items()
    }
    return lists | {"delta": [json.loads(text) for text in lists["delta"]]}
