"""Stream from the ensemble `llm` over gRPC with the `tritonclient` package.

python client/examples/stream_grpc.py "Once upon a time"          a text to continue
python client/examples/stream_grpc.py --chat "What is 12 + 30?"   a message to answer
"""

import argparse
import json
import os
import queue
import sys

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput


def tensor(name: str, datatype: str, value: object) -> InferInput:
    """One input of one element."""
    dtype = np.bool_ if datatype == "BOOL" else np.object_
    made = InferInput(name, [1], datatype)
    made.set_data_from_numpy(np.array([value], dtype=dtype))
    return made


def main() -> None:
    """Ask once and print the text as it comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="Hello! Who are you?")
    parser.add_argument("--chat", action="store_true", help="use the model's chat template")
    parser.add_argument("--url", default=os.environ.get("NEREID_GRPC_URL", "127.0.0.1:8001"))
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    inputs = [tensor("stream", "BOOL", True)]
    if args.chat:
        message = {"role": "user", "content": args.prompt}
        body = {"messages": [message], "max_tokens": args.max_tokens}
        inputs.append(tensor("chat_request", "BYTES", json.dumps(body).encode()))
    else:
        sampling = {"max_tokens": args.max_tokens, "temperature": 0}
        inputs.append(tensor("text_input", "BYTES", args.prompt.encode()))
        inputs.append(tensor("sampling_parameters", "BYTES", json.dumps(sampling).encode()))

    answers: queue.Queue = queue.Queue()
    with InferenceServerClient(args.url) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        client.async_stream_infer(
            "llm",
            inputs,
            outputs=[InferRequestedOutput("text_output")],
            enable_empty_final_response=True,  # so that the end is a response of its own
        )
        while True:
            result, error = answers.get()
            if error is not None:
                sys.exit(f"the server says: {error}")
            text = result.as_numpy("text_output")
            for piece in text if text is not None else ():
                sys.stdout.write(piece.decode())
                sys.stdout.flush()
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
