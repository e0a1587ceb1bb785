"""The echo model as a Python model of a Triton server."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.insert(0, str(Path(__file__).parents[4]))
from fakes.echo import Failure, Pause, echo

# Hold this lock while calling a function of the stub process.
# In Triton server 2.51, threads that call `send` or `is_cancelled` at the same time corrupt the
# memory of the stub process. With 32 streams, the stub died within seconds, even if only one of
# these two functions was locked.
STUB = threading.Lock()


class TritonPythonModel:
    def initialize(self, args):
        # This child process of the stub stands for the engine process. The tests check that
        # `nereid serve` ends it.
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        log(f"echo model loaded for {os.environ.get('NEREID_MODEL')}")

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,), daemon=True).start()

    def answer(self, request):
        """Send the responses of the echo model until the request ends, fails or is cancelled."""
        sender = request.get_response_sender()
        for step in echo(**inputs_of(request)):
            with STUB:
                is_cancelled = request.is_cancelled()
            if is_cancelled:
                log(f"{request.request_id()} was cancelled")
                break
            if isinstance(step, Pause):
                time.sleep(step.seconds)
            elif isinstance(step, Failure):
                error = pb_utils.TritonError(f"[{step.code}] {step.message}", code_of(step))
                with STUB:
                    sender.send(
                        pb_utils.InferenceResponse(error=error),
                        flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
                    )
                return
            else:
                response = response_of(step)
                with STUB:
                    sender.send(response)
        with STUB:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self):
        self.child.kill()
        self.child.wait()


def log(line):
    sys.stdout.write(f"nereid: {line}\n")
    sys.stdout.flush()


def code_of(failure):
    name = failure.code.replace("INVALID_ARGUMENT", "INVALID_ARG")
    return getattr(pb_utils.TritonError, name)


def inputs_of(request):
    """Return the arguments of `echo`: the value of each tensor in the request."""
    values = {}
    for name in ("text_input", "input_ids", "chat_request", "sampling_parameters"):
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        if tensor is None:
            continue
        array = tensor.as_numpy()
        values[name] = array.tolist() if name == "input_ids" else array[0].decode()
    return values


def response_of(deltas):
    texts = [delta.pop("text", "").encode() for delta in deltas]
    json_texts = [json.dumps(delta).encode() for delta in deltas]
    outputs = {"text_output": texts, "delta": json_texts}
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor(name, np.array(outputs[name], dtype=object)) for name in outputs]
    )
