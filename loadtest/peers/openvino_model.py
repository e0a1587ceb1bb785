"""A program that measures OpenVINO.

The program converts the checkpoint to OpenVINO's format with optimum-intel. It runs in a Python
environment that `make bench-peers` creates. OpenVINO's default settings determine the precision of
the computation and of the KV cache.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino
from openvino import opset13

from loadtest.peers.workload import Peer, Prompts, Settings, Workload, main

_MODEL_FILE = "openvino_model.xml"


class OpenVino(Peer):
    """A compiled OpenVINO model, whose KV cache is the state of one inference request."""

    def __init__(self, path: str, workload: Workload, settings: Settings) -> None:
        folder = converted(Path(path), settings["weight_format"])
        core = openvino.Core()
        model = core.read_model(folder / _MODEL_FILE)
        keep_last_logits(model)
        options = {"INFERENCE_NUM_THREADS": workload.threads, "PERFORMANCE_HINT": "LATENCY"}
        self._request = core.compile_model(model, "CPU", options).create_infer_request()

    def generate(self, prompts: Prompts, num_tokens: int) -> None:
        """Generate exactly `num_tokens` tokens for each prompt, greedily, in one batch."""
        self._request.reset_state()
        token_ids = np.array(prompts, np.int64)
        batch_size, prompt_length = token_ids.shape
        positions = np.arange(prompt_length, dtype=np.int64)[None].repeat(batch_size, 0)
        for length in range(prompt_length, prompt_length + num_tokens):
            self._request.infer(
                {
                    "input_ids": token_ids,
                    "attention_mask": np.ones((batch_size, length), np.int64),
                    "position_ids": positions,
                    "beam_idx": np.arange(batch_size, dtype=np.int32),
                }
            )
            logits = self._request.get_tensor("logits").data
            token_ids = logits[:, -1].argmax(-1)[:, None]
            positions = np.full((batch_size, 1), length, np.int64)


def converted(checkpoint: Path, weight_format: str) -> Path:
    """Return the folder with the OpenVINO model of a checkpoint, and create it if necessary.

    `weight_format` is an option of `optimum-cli`: "int4", "int8" or "fp16". With "fp16", the CPU
    computes in bfloat16 if it can. Another process converts the model, because the peak memory of
    this process is measured.
    """
    folder = checkpoint / f"openvino-{weight_format}"
    if not (folder / _MODEL_FILE).is_file():
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
        options = ["--task", "text-generation-with-past", "--weight-format", weight_format]
        subprocess.run(
            [*command, "--model", str(checkpoint), *options, str(folder)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return folder


def keep_last_logits(model: openvino.Model) -> None:
    """Change a model so that it computes logits only for the last token of each sequence.

    OpenVINO's pipeline for text generation makes the same change. Without the change, the output
    layer would be computed for all 512 tokens of a prompt with 512 tokens, and not only for one.
    """
    product = model.output("logits").get_node()
    while product.get_type_name() != "MatMul":
        product = product.input_value(0).get_node()
    end = np.iinfo(np.int64).max
    # The hidden states have the axes batch, token and hidden size.
    last = opset13.slice(product.input_value(0), start=[-1], stop=[end], step=[1], axes=[1])
    product.input(0).replace_source_output(last.output(0))
    model.validate_nodes_and_infer_types()


if __name__ == "__main__":
    main(OpenVino)
