"""Stream from the Triton model `llm` over gRPC with the `tritonclient` package.

.venv/bin/python client/examples/stream_grpc.py "Once upon a time"          continue a text
.venv/bin/python client/examples/stream_grpc.py --chat "What is 12 + 30?"   answer a message

The example needs the packages `tritonclient[grpc]` and `numpy`, which the environment `.venv` of
this repository has.
"""

import argparse
import json
import os
import queue
import sys
from collections.abc import Iterator

try:
    import numpy as np
    from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput
    from tritonclient.utils import InferenceServerException
except ImportError as error:
    sys.exit(f"{error}. Run this with .venv/bin/python, or: pip install 'tritonclient[grpc]'")


def tensor(name: str, datatype: str, value: object) -> InferInput:
    """Return an input tensor of shape [1] that contains `value`."""
    dtype = np.bool_ if datatype == "BOOL" else np.object_
    infer_input = InferInput(name, [1], datatype)
    infer_input.set_data_from_numpy(np.array([value], dtype=dtype))
    return infer_input


def parse_arguments() -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(description="Stream text over gRPC.")
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a chat message")
    parser.add_argument("--url", default=os.environ.get("NEREID_GRPC_URL", "127.0.0.1:8001"))
    parser.add_argument("--max-tokens", type=int, default=256)
    return parser.parse_args()


def main() -> None:
    """Send one request and print the text while it is written."""
    args = parse_arguments()
    inputs = request_inputs(args.prompt, args.max_tokens, is_chat=args.chat)
    with InferenceServerClient(args.url) as client:
        for text in stream(client, inputs):
            sys.stdout.write(text)
            sys.stdout.flush()
    sys.stdout.write("\n")


def stream(client: InferenceServerClient, inputs: list[InferInput]) -> Iterator[str]:
    """Send a request to the model `llm`, and yield the pieces of the text as they arrive."""
    # A thread of the client calls the callback for each response.
    responses: queue.Queue = queue.Queue()
    client.start_stream(callback=lambda result, error: responses.put((result, error)))
    client.async_stream_infer(
        "llm",
        inputs,
        outputs=[InferRequestedOutput("text_output")],
        enable_empty_final_response=True,  # the last response marks the end
    )
    is_final = False
    while not is_final:
        result, error = responses.get()
        if error is not None:
            sys.exit(f"The server returned an error: {error}")
        pieces = result.as_numpy("text_output")
        if pieces is not None:
            yield from (piece.decode() for piece in pieces)
        is_final = result.get_response().parameters["triton_final_response"].bool_param
    client.stop_stream()


def request_inputs(prompt: str, max_tokens: int, *, is_chat: bool) -> list[InferInput]:
    """Return the input tensors of the model `llm`.

    If `is_chat` is true, `prompt` is the message of a user. Otherwise, the model continues the text
    `prompt`.
    """
    stream = tensor("stream", "BOOL", True)
    if is_chat:
        message = {"role": "user", "content": prompt}
        body = {"messages": [message], "max_tokens": max_tokens}
        return [stream, tensor("chat_request", "BYTES", json.dumps(body).encode())]
    sampling = {"max_tokens": max_tokens, "temperature": 0}
    return [
        stream,
        tensor("text_input", "BYTES", prompt.encode()),
        tensor("sampling_parameters", "BYTES", json.dumps(sampling).encode()),
    ]


if __name__ == "__main__":
    try:
        main()
    except InferenceServerException as error:  # example: the connection has ended already
        sys.exit(f"The server cannot be reached ({error}). Start it, or pass its --url.")
