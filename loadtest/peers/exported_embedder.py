"""A program that encodes texts with OpenVINO or onnxruntime, for `bench_pooling`.

The program runs in the Python environment that `make bench-peers` creates. The argument is a `Job`
as JSON. The program loads the model and prints "ready". Each line on the standard input is a batch
size. For each line, the program encodes all texts in batches of this size and prints "done".
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

_CALIBRATION_BATCH_SIZE = 32
_NUM_CALIBRATION_BATCHES = 8
_PRECISIONS = {"OpenVINO float32": "f32", "OpenVINO bfloat16": "bf16"}

Inputs = dict[str, np.ndarray]
Forward = Callable[[Inputs], np.ndarray]


@dataclass(frozen=True)
class Job:
    """The argument of this program."""

    kind: str  # the library and the dtype, such as "OpenVINO int8", or "onnxruntime"
    checkpoint: str  # the folder of the model
    texts: str  # a JSON file with a list of texts
    threads: int


def main() -> None:
    """Load the model, and encode the texts whenever a line arrives on the standard input."""
    job = Job(**json.loads(sys.argv[1]))
    texts: list[str] = json.loads(Path(job.texts).read_text())
    texts.sort(key=len)
    tokenizer = AutoTokenizer.from_pretrained(job.checkpoint)
    model = Encoder(AutoModel.from_pretrained(job.checkpoint, dtype=torch.float32)).eval()

    def batches(size: int) -> list[Inputs]:
        pieces = [texts[start : start + size] for start in range(0, len(texts), size)]
        return [dict(tokenizer(piece, padding=True, return_tensors="np")) for piece in pieces]

    samples = batches(_CALIBRATION_BATCH_SIZE)[:_NUM_CALIBRATION_BATCHES]
    load = load_onnxruntime if job.kind == "onnxruntime" else load_openvino
    forward = load(model, samples, job)
    print("ready", flush=True)
    for line in sys.stdin:
        for inputs in batches(size=int(line)):
            mask = inputs["attention_mask"][..., None]
            (forward(inputs) * mask).sum(1) / mask.sum(1)  # the mean over the tokens of a text
        print("done", flush=True)


class Encoder(torch.nn.Module):
    """A wrapper of a model, which the exporters can trace.

    The wrapper gives the model a mask with four dimensions, because torch cannot trace the code
    with which transformers 5.5 converts a mask with two dimensions.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self._model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        token_type_ids: torch.Tensor,
        attention_mask: torch.Tensor,
    ) -> torch.Tensor:
        """Return the hidden states [batch, length, hidden_size] of the last layer."""
        lowest = torch.finfo(torch.float32).min
        mask = (1.0 - attention_mask[:, None, None, :].float()) * lowest
        mask = mask.expand(-1, 1, input_ids.shape[1], -1)
        outputs = self._model(
            input_ids=input_ids, token_type_ids=token_type_ids, attention_mask=mask
        )
        return outputs.last_hidden_state


def load_openvino(model: Encoder, samples: list[Inputs], job: Job) -> Forward:
    """Convert the model to OpenVINO, and return its forward pass.

    With the kind "OpenVINO int8", weights and activations have 8 bits. The converted model is
    stored in the folder of the checkpoint, and later calls use this file.
    """
    import openvino

    has_8_bits = job.kind == "OpenVINO int8"
    file = Path(job.checkpoint, "openvino-int8.xml" if has_8_bits else "openvino.xml")
    if not file.exists():
        example = {name: torch.from_numpy(values) for name, values in samples[0].items()}
        converted = openvino.convert_model(model, example_input=example)
        if has_8_bits:
            converted = rounded_to_8_bits(converted, samples)
        openvino.save_model(converted, file, compress_to_fp16=False)
    settings = {"INFERENCE_NUM_THREADS": job.threads, "PERFORMANCE_HINT": "LATENCY"}
    if not has_8_bits:
        settings["INFERENCE_PRECISION_HINT"] = _PRECISIONS[job.kind]
    compiled = openvino.Core().compile_model(file, "CPU", settings)
    return lambda inputs: compiled(inputs)[0]


def rounded_to_8_bits(model: object, samples: list[Inputs]) -> object:
    """Return an OpenVINO model with 8-bit weights and activations.

    The range of the activations is measured with the inputs `samples`.
    """
    import nncf

    return nncf.quantize(model, nncf.Dataset(samples), model_type=nncf.ModelType.TRANSFORMER)


def load_onnxruntime(model: Encoder, samples: list[Inputs], job: Job) -> Forward:
    """Export the model to ONNX, and return its forward pass, which onnxruntime computes in float32.

    The exported model is stored in the folder of the checkpoint, and later calls use this file.
    """
    import onnxruntime

    file = Path(job.checkpoint, "model.onnx")
    if not file.exists():
        names = list(samples[0])
        torch.onnx.export(
            model,
            kwargs={name: torch.from_numpy(samples[0][name]) for name in names},
            f=str(file),
            input_names=names,
            output_names=["hidden"],
            dynamic_axes={name: {0: "batch", 1: "length"} for name in [*names, "hidden"]},
            dynamo=False,
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = job.threads
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(["hidden"], inputs)[0]


if __name__ == "__main__":
    main()
