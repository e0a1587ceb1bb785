"""Compare the embedder and the reranker with sentence-transformers, in one process.

    python -m loadtest.bench.bench_pooling   # random weights in the shape of MiniLM-L6
    python -m loadtest.bench.bench_pooling --threads 1 --texts 128 --lengths log
    python -m loadtest.bench.bench_pooling --peers --dtype bfloat16 --threads 2

Nereid and sentence-transformers process the same texts with the same weights, dtype and number of
threads, and the program prints how much the results differ. The program runs one library after the
other, --repeat times, and prints the fastest run of each library, so that other work on the machine
affects the results little. The program compares these speeds with a limit, the speed at which the
machine computes matrix products with the model's shapes. The limit is measured with torch's plain
weights and with weights in the packed layout of oneDNN.

With `--peers`, OpenVINO and onnxruntime also encode the texts, each in a process of its own and in
batches of 1 and of 32 texts. `make bench-peers` installs the two libraries. The additional row
"nereid int8" is Nereid with 8-bit weights. The conversion of a large model takes minutes. With
`--folder`, the checkpoints and the converted models are kept for the next run with the same model
and dtype.
"""

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nereid_backend import Embedder, Reranker
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers.utils import logging

from loadtest.bench.contestants import OPENVINO_PYTHON
from loadtest.bench.random_bert import BertShape, random_lengths, random_pairs, random_texts
from loadtest.bench.timing import seconds_of
from loadtest.command_line import Option, parse_command_line
from loadtest.peers.exported_embedder import Job

_PAUSE_S = 2.0
# The limit is the speed of a matrix product with this number of rows.
_LIMIT_ROWS = 512
# The number of matrix products in one measurement of the limit.
_NUM_PRODUCTS = 60

Array = np.ndarray[Any, Any]
# Maps the name of each compared program to a function that runs the program on all texts.
Contestants = dict[str, Callable[[], object]]

_OPTIONS = {
    "--hidden": Option(384, "hidden size of the model"),
    "--layers": Option(6, "number of layers of the model"),
    "--texts": Option(96, "number of texts"),
    "--lengths": Option("uniform", "distribution of the text lengths", ["uniform", "log"]),
    "--dtype": Option("float32", "dtype of the weights", ["float32", "bfloat16"]),
    "--threads": Option(1, "number of threads"),
    "--repeat": Option(3, "number of runs, of which the best one counts"),
    "--peers": Option(False, "also measure OpenVINO and onnxruntime"),
    "--folder": Option(None, "keep the checkpoints and the converted models here for the next run"),
}


def best_times(contestants: Contestants, repeat: int) -> dict[str, float]:
    """Run all programs one after the other, `repeat` times. Return the best time of each program.

    Before each run, the program pauses, because the threads of some libraries wait in a loop for
    more work after a run and occupy the CPU.
    """
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(repeat):
        for name, work in contestants.items():
            time.sleep(_PAUSE_S)
            best[name] = min(best[name], seconds_of(work))
    return best


def measure_limits(model: BertShape, repeat: int) -> dict[str, float]:
    """Return the FLOP/s of the model's largest matrix product, for each layout of the weights."""
    dtype = getattr(torch, model.dtype)
    num_inputs, num_outputs = model.hidden_size, 4 * model.hidden_size
    x = torch.randn(_LIMIT_ROWS, num_inputs).to(dtype)
    weight = torch.randn(num_outputs, num_inputs).to(dtype)
    bias = torch.randn(num_outputs).to(dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _LIMIT_ROWS)

    def use_plain() -> None:
        for _ in range(_NUM_PRODUCTS):
            torch.nn.functional.linear(x, weight, bias)

    def use_packed() -> None:
        for _ in range(_NUM_PRODUCTS):
            torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    with torch.inference_mode():
        best = best_times({"plain": use_plain, "packed": use_packed}, repeat)
    flops = _NUM_PRODUCTS * 2 * _LIMIT_ROWS * num_inputs * num_outputs
    return {layout: flops / seconds for layout, seconds in best.items()}


def print_speeds(
    noun: str, best: dict[str, float], lengths: list[int], flops: float, limit: float
) -> None:
    """Print the speed of each compared program.

    Args:
        noun: the name of the inputs, "texts" or "pairs".
        best: the seconds of the fastest run of each program.
        lengths: the number of tokens of each text or pair.
        flops: the number of floating-point operations for all texts or pairs.
        limit: the highest speed of the machine in FLOP/s.
    """
    count, num_tokens = len(lengths), sum(lengths)
    print(
        f"\n{count} {noun} with {num_tokens} tokens; the shortest has {min(lengths)} tokens and "
        f"the longest {max(lengths)}"
    )
    for name, seconds in best.items():
        rate = flops / seconds
        ratio = best["sentence-transformers"] / seconds
        print(
            f"  {name:<30} {count / seconds:8.1f} /s  {num_tokens / seconds:9.0f} tokens/s  "
            f"{rate / 1e9:6.1f} GFLOP/s = {rate / limit:.0%} of the limit, "
            f"{ratio:.2f} times the speed of sentence-transformers"
        )


class Peer:
    """An embedder of another library, which runs in a process of its own."""

    def __init__(self, job: Job) -> None:
        """Start the process, and wait until it has loaded the model."""
        self._process = subprocess.Popen(
            [OPENVINO_PYTHON, "-m", "loadtest.peers.exported_embedder", json.dumps(asdict(job))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._wait_for("ready")

    def encode(self, batch_size: int) -> None:
        """Encode all texts in batches of `batch_size` texts of similar length."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batch_size}\n")
        self._process.stdin.flush()
        self._wait_for("done")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _wait_for(self, word: str) -> None:
        """Read lines until the process prints `word`. Other lines come from libraries."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == word:
                return
        raise RuntimeError("A compared embedder ended. Its error message is above.")


@contextmanager
def peer_contestants(
    checkpoint: str, texts: list[str], args: argparse.Namespace
) -> Iterator[Contestants]:
    """Yield functions that encode `texts` with Nereid's 8-bit weights and with other libraries.

    The processes of the other libraries run until the end of the context.
    """
    int8 = Embedder(checkpoint, num_threads=args.threads, weight_dtype="int8")
    contestants: Contestants = {"nereid int8": partial(int8.encode, texts)}
    with ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "texts.json"
        file.write_text(json.dumps(texts))
        for kind in (f"OpenVINO {args.dtype}", "OpenVINO int8", "onnxruntime"):
            peer = Peer(Job(kind, checkpoint, str(file), args.threads))
            stack.callback(peer.close)
            for batch_size in (1, 32):
                contestants[f"{kind}, batches of {batch_size}"] = partial(peer.encode, batch_size)
        yield contestants


def main() -> None:
    """Measure embeddings and reranking, and print the results."""
    args = parse_command_line(__doc__, _OPTIONS)
    logging.disable_progress_bar()
    model = BertShape(args.hidden, args.layers, args.dtype)
    lengths = random_lengths(args.texts, args.lengths)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        embedder_path = model.save(folder, has_head=False)
        reranker_path = model.save(folder, has_head=True)
        # The engines set the number of threads of this process.
        embedder = Embedder(embedder_path, num_threads=args.threads)
        reranker = Reranker(reranker_path, num_threads=args.threads)
        print(
            f"BERT {args.hidden} x {args.layers}, {args.dtype}, {torch.get_num_threads()} threads, "
            f"{args.lengths} lengths, best of {args.repeat} runs"
        )
        limits = measure_limits(model, 2 * args.repeat)
        for layout, rate in limits.items():
            print(f"matrix products with {layout} weights: {rate / 1e9:.0f} GFLOP/s")
        flops = model.flops(lengths)
        best = compare_embedders(embedder, embedder_path, random_texts(lengths), args)
        print_speeds("texts", best, lengths, flops, limits["packed"])
        best = compare_rerankers(reranker, reranker_path, random_pairs(lengths), args)
        print_speeds("pairs", best, lengths, flops, limits["packed"])


def compare_embedders(
    embedder: Embedder, path: str, texts: list[str], args: argparse.Namespace
) -> dict[str, float]:
    """Print the similarity to sentence-transformers. Return the best time of each embedder."""
    reference = SentenceTransformer(path, device="cpu")
    encode_reference = partial(reference.encode, texts, show_progress_bar=False)
    least = lowest_cosine(embedder.encode(texts), encode_reference())
    print(f"lowest cosine similarity to sentence-transformers: {least:.7f}")
    contestants: Contestants = {
        "nereid": partial(embedder.encode, texts),
        "sentence-transformers": encode_reference,
    }
    with ExitStack() as stack:
        if args.peers:
            contestants |= stack.enter_context(peer_contestants(path, texts, args))
        return best_times(contestants, args.repeat)


def lowest_cosine(a: Array, b: Array) -> float:
    """Return the lowest cosine similarity between a row of `a` and the same row of `b`."""
    products = (a * b).sum(1)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float((products / norms).min())


def compare_rerankers(
    reranker: Reranker,
    path: str,
    pairs: list[tuple[str, str]],
    args: argparse.Namespace,
) -> dict[str, float]:
    """Print the difference from sentence-transformers. Return the best time of each reranker."""
    reference = CrossEncoder(path, device="cpu")
    score_reference = partial(reference.predict, pairs, show_progress_bar=False)
    difference = np.abs(reranker.score(pairs) - score_reference()).max()
    print(f"\nlargest difference of scores: {difference:.1e}")
    contestants: Contestants = {
        "nereid": partial(reranker.score, pairs),
        "sentence-transformers": score_reference,
    }
    return best_times(contestants, args.repeat)


if __name__ == "__main__":
    main()
