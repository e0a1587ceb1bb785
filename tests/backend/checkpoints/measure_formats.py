"""Measures the memory, the speed and the correctness of every format of quantised weights.

    python tests/backend/checkpoints/measure_formats.py            all formats, as a Markdown table
    python tests/backend/checkpoints/measure_formats.py AWQ GGUF   formats whose names begin so

For each format, the program writes two checkpoints with random weights. The tiny checkpoint serves
to count the equal tokens: the program compares the greedy tokens of the engine with the greedy
tokens of transformers, which computes in float32 with the dequantised weights. The large checkpoint
is a Qwen3 model. The program uses it to measure memory and speed in bfloat16 with the default
settings. If the library of a format is not installed, the row of the format stays empty.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3]))

import pytest
import torch
from backend.checkpoints import writers
from backend.checkpoints.ggml_quantise import FLOATS
from backend.checkpoints.gguf_writer import Q4_K_M, WIDE, dequantised_weights, write_gguf
from backend.exactness import equal_tokens, open_engine, reference, run_staggered
from backend.tiny_models import BY_NAME, Family
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from loadtest.bench.contestants import run_contestant
from loadtest.bench.markdown_table import table
from loadtest.bench.random_models import SHAPES, make_checkpoint
from loadtest.peers.workload import Workload

GROUP_SIZE = 32
_INT = {"type": "int", "strategy": "group", "group_size": GROUP_SIZE}
_CHANNEL = {"num_bits": 8, "strategy": "channel"}
_LIMIT_S = 300


@dataclass(frozen=True)
class Format:
    """One row of the table.

    Attributes:
        library: the library that writes the file.
        write: a function that writes a quantised copy of a checkpoint. Its arguments are the folder
            of the checkpoint and a new folder for the copy. The function replaces the weights in
            the first folder with the dequantised weights. It returns the path from which the engine
            loads the copy.
        settings: settings of the engine.
        is_exact: whether the program compares the tokens of the tiny checkpoint.
        family: the architecture of the tiny checkpoint.
    """

    library: str
    write: Callable[[Path, Path], Path]
    settings: dict[str, Any] | None = None
    is_exact: bool = True
    family: Family = BY_NAME["qwen3"]


def _safetensors(make: Callable[[], tuple[dict, writers.Encoder]]) -> Callable[[Path, Path], Path]:
    """Return a function that writes a quantised checkpoint in safetensors files."""
    return lambda plain, folder: writers.quantise_checkpoint(plain, folder, *make())[1]


def _compressed(kind: str, **arguments: Any) -> Format:
    """Return a format of compressed-tensors; see `writers.compressed_tensors` for the arguments."""
    make = lambda: writers.compressed_tensors(kind, **arguments)  # noqa: E731
    return Format("compressed-tensors", _safetensors(make))


def _gguf(kind: str, other_kinds: dict[str, str] | None = None) -> Format:
    """Return the format of a GGUF file; see `write_gguf` for the arguments."""

    def write(plain: Path, folder: Path) -> Path:
        folder.mkdir()
        path = folder / "model.gguf"
        write_gguf(plain, "qwen3", kind, other_kinds=other_kinds, path=path)
        weights = dequantised_weights(plain, path)
        save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
        return path

    return Format("gguf" if kind in FLOATS else "ggml", write, family=WIDE)


def _unchanged(plain: Path, folder: Path) -> Path:
    """Return the path of the checkpoint `plain`, which needs no conversion."""
    del folder
    return plain


FORMATS = {
    "bfloat16 safetensors": Format("transformers", _unchanged),
    "rounded when loaded, int8": Format(
        "transformers", _unchanged, {"weight_dtype": "int8"}, False
    ),
    "rounded when loaded, int4": Format(
        "transformers", _unchanged, {"weight_dtype": "int4"}, False
    ),
    "compressed-tensors W4A16": _compressed("pack-quantized", num_bits=4, **_INT),
    "compressed-tensors W8A8": _compressed("int-quantized", type="int", **_CHANNEL),
    "compressed-tensors FP8": _compressed("float-quantized", type="float", **_CHANNEL),
    "torchao int4": Format(
        "torchao", _safetensors(lambda: writers.torchao("int4", group_size=GROUP_SIZE))
    ),
    "torchao int8": Format("torchao", _safetensors(lambda: writers.torchao("int8"))),
    "torchao float8": Format("torchao", _safetensors(lambda: writers.torchao("float8"))),
    "bitsandbytes nf4": Format("bitsandbytes", _safetensors(lambda: writers.bitsandbytes("nf4"))),
    "bitsandbytes int8": Format("bitsandbytes", _safetensors(lambda: writers.bitsandbytes("int8"))),
    "AWQ": Format("Nereid's tests", _safetensors(lambda: writers.awq(group_size=GROUP_SIZE))),
    "GPTQ, 4 bits": Format(
        "Nereid's tests", _safetensors(lambda: writers.gptq(4, group_size=GROUP_SIZE))
    ),
    "GPTQ, 4 bits, desc_act": Format(
        "Nereid's tests",
        _safetensors(lambda: writers.gptq(4, group_size=GROUP_SIZE, desc_act=True)),
    ),
    "FP8, blocks of 128": Format("Nereid's tests", _safetensors(lambda: writers.fp8(block=128))),
    "GGUF Q4_0": _gguf("Q4_0"),
    "GGUF Q8_0": _gguf("Q8_0"),
    "GGUF BF16": _gguf("BF16"),
    "GGUF Q2_K": _gguf("Q2_K", {"output": "Q6_K", "ffn_down": "Q3_K"}),
    "GGUF Q3_K": _gguf("Q3_K", {"output": "Q6_K", "ffn_down": "Q4_K"}),
    "GGUF Q4_K_M": _gguf("Q4_K", Q4_K_M),
    "GGUF Q5_K": _gguf("Q5_K", {"output": "Q6_K"}),
    "GGUF Q6_K": _gguf("Q6_K"),
    "GGUF IQ4_XS": _gguf("IQ4_XS", {"output": "Q6_K"}),
}


def count_equal_tokens(row: Format, folder: Path) -> str:
    """Return the number of equal tokens and the number of all tokens, such as "95/96".

    The engine computes with dequantised weights (prepack=False), because the kernels for integers
    would also round the inputs of layers.
    """
    plain = row.family.save(folder / "plain")
    path = row.write(plain, folder / "quantised")
    engine = open_engine(path, block_size=16, prepack=False)
    try:
        answers = run_staggered(engine)
    finally:
        engine.close()
    num_equal, num_tokens = equal_tokens(reference(plain), answers)
    return f"{num_equal}/{num_tokens}"


def measure_speed(row: Format, folder: Path, shape: str, answer: int) -> list[str]:
    """Return four cells of the table.

    The cells are the size of the weights and the peak memory in MiB, and the speed with 1 and with
    16 sequences. The speed is the number of tokens for each second of CPU time, because other
    programs may use the machine at the same time.
    """
    make_checkpoint(folder / "plain", shape, "bfloat16")
    if row.write is not _unchanged:
        _to_float32(folder / "plain")
    path = row.write(folder / "plain", folder / "quantised")
    workload = Workload(
        dtype="bfloat16",
        threads=1,
        vocab_size=SHAPES[shape].vocab_size,
        prefill=[],
        decode=[1, 16],
        context=32,
        answer=answer,
        repeat=3,
        has_cpu_clock=True,
    )
    result = run_contestant("nereid", path, workload, _LIMIT_S, row.settings)
    if "error" in result:
        return [result["error"], "", "", ""]
    sizes = [f"{result[name] / 2**20:.0f}" for name in ("weights_bytes", "peak_bytes")]
    return [*sizes, *(f"{result['decode'][batch]:.0f}" for batch in ("1", "16"))]


def _to_float32(folder: Path) -> None:
    """Convert the weights of a checkpoint, because the writers expect float32."""
    file = folder / "model.safetensors"
    weights = {name: weight.float() for name, weight in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="nereid-formats-") as name:
        yield Path(name)


def measure(name: str, shape: str, answer: int) -> list[str]:
    """Measure one format, and return its row of the table."""
    row = FORMATS[name]
    try:
        with _folder() as folder:
            tokens = count_equal_tokens(row, folder) if row.is_exact else ""
        with _folder() as folder:
            cells = measure_speed(row, folder, shape, answer)
    except pytest.skip.Exception:
        return [name, row.library, "not installed", "", "", "", ""]
    return [name, row.library, tokens, *cells]


def main() -> None:
    """Measure the requested formats, and print the table."""
    parser = argparse.ArgumentParser(description="Measure every format of quantised weights.")
    parser.add_argument("formats", nargs="*", default=[""], help="beginnings of names of formats")
    parser.add_argument("--shape", choices=SHAPES, default="0.1b", help="shape of the large model")
    parser.add_argument("--answer", type=int, default=32, help="number of generated tokens")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    getLogger("nereid_backend").setLevel(ERROR)
    torch.set_num_threads(1)
    rows = []
    for name in FORMATS:
        if name.startswith(tuple(arguments.formats)):
            rows.append(measure(name, arguments.shape, arguments.answer))
            sys.stderr.write(f"{rows[-1]}, load average {os.getloadavg()[0]:.1f}\n")
    head = ["format", "library that wrote the file", "equal tokens", "weights, MiB", "peak, MiB"]
    text = table([*head, "tokens/CPU s, batch 1", "tokens/CPU s, batch 16"], rows)
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
