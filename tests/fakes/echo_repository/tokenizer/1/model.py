"""The tokenizer of the echo model as a Python model of a Triton server."""

import sys
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.insert(0, str(Path(__file__).parents[4]))
from fakes.echo import tokenize


class TritonPythonModel:
    def execute(self, requests):
        return [answer(request) for request in requests]


def answer(request):
    text, chat = (value_of(request, name) for name in ("text_input", "chat_request"))
    if text is not None and "<fail>" in text:
        message = "[INVALID_ARGUMENT] text_input: cannot be tokenised"
        error = pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG)
        return pb_utils.InferenceResponse(error=error)
    ids = np.array(tokenize(text, chat), dtype=np.int32)
    return pb_utils.InferenceResponse([pb_utils.Tensor("prompt_token_ids", ids)])


def value_of(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()[0].decode()
