"""Compare the embedder and the reranker with sentence-transformers, in one process.

    python -m loadtest.bench.bench_pooling   # random weights in the shape of MiniLM-L6
    python -m loadtest.bench.bench_pooling --threads 1 --texts 128 --lengths log
    python -m loadtest.bench.bench_pooling --triton   # also send the texts to `nereid serve`
    python -m loadtest.bench.bench_pooling --peers --dtype bfloat16 --threads 2

Nereid and sentence-transformers compute the same texts with the same weights, dtype and threads,
and the program prints how much the results differ. The two take turns --repeat times, and the
program prints the best run of each, so that other work on the machine affects the figures little.
The limit is the speed of the machine for matrix products of the model's shapes. It is measured with
the plain weights of torch and with weights in the packed layout of oneDNN.

With `--peers`, OpenVINO and onnxruntime encode the texts, too, each in a process of its own and in
batches of 1 and of 32 texts (`make bench-peers` installs them). The row "nereid int8" is then
Nereid with 8-bit weights. Converting a large model for the other libraries takes minutes. With
`--folder`, the checkpoints and the converted models are kept for the next run with the same model
and dtype.
"""

import argparse
import json
import random
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch
from nereid_backend import Embedder, Reranker
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BertTokenizer,
)
from transformers.utils import logging

from loadtest import command_line
from loadtest.bench.contestants import OPENVINO_PYTHON
from loadtest.server.served import Served

_PAUSE = 2.0
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def make_checkpoint(folder: Path, args: argparse.Namespace, *, has_head: bool) -> str:
    """Save a BERT model with random weights, and a tokenizer that maps each word to one token.

    The model is saved in a subfolder of `folder`, whose name contains the shape and the dtype. If
    the subfolder already contains the model, the model is not saved again.

    Returns:
        The path of the subfolder.
    """
    shape = f"{args.hidden}x{args.layers}-{args.vocab}"
    path = folder / f"bert-{shape}-{args.dtype}-{'reranker' if has_head else 'embedder'}"
    if (path / "config.json").exists():
        return str(path)
    torch.manual_seed(0)
    words = [*_SPECIAL, *(f"w{i}" for i in range(args.vocab - len(_SPECIAL)))]
    config = BertConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=max(12, args.hidden // 64),  # as MiniLM-L6, BERT base and BERT large
        max_position_embeddings=512,
        num_labels=1,
        initializer_range=0.05,
    )
    model = BertForSequenceClassification(config) if has_head else BertModel(config)
    model.to(getattr(torch, args.dtype)).save_pretrained(path)
    vocabulary = {word: token_id for token_id, word in enumerate(words)}
    BertTokenizer(vocab=vocabulary, model_max_length=512).save_pretrained(path)
    return str(path)


def make_lengths(args: argparse.Namespace) -> list[int]:
    """Return the number of tokens of each text, from 8 to 512.

    With `--lengths uniform`, all lengths are equally likely. With `--lengths log`, short ones are
    more likely: the logarithm of the length is distributed uniformly.
    """
    rng = random.Random(0)
    if args.lengths == "uniform":
        return [rng.randint(8, 512) for _ in range(args.texts)]
    return [round(8 * 64 ** rng.random()) for _ in range(args.texts)]


def compare(
    works: dict[str, Callable[[], object]], repeat: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Run all functions in turns, `repeat` times. Return the shortest time of each function.

    Before each run, the program waits for _PAUSE seconds, because the threads of some libraries
    wait in a loop for more work after a run and occupy the CPU.
    """
    best = dict.fromkeys(works, float("inf"))
    for _ in range(repeat):
        for name, work in works.items():
            time.sleep(_PAUSE)
            started = clock()
            work()
            best[name] = min(best[name], clock() - started)
    return best


def flops_of(lens: list[int], args: argparse.Namespace) -> float:
    """Return the floating-point operations of all matrix products for texts of these lengths."""
    hidden = args.hidden
    linear = sum(lens) * 2 * 12 * hidden**2
    attention = sum(4 * n * n * hidden for n in lens)
    return float(args.layers * (linear + attention))


def measure_limits(args: argparse.Namespace, clock: Callable[[], float]) -> dict[str, float]:
    """Return the FLOP/s of the model's largest matrix product, for each layout of the weights."""
    dtype = getattr(torch, args.dtype)
    rows, size = 512, args.hidden
    x, weight = torch.randn(rows, size).to(dtype), torch.randn(4 * size, size).to(dtype)
    bias = torch.randn(4 * size).to(dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    count = 60

    def plain() -> None:
        for _ in range(count):
            torch.nn.functional.linear(x, weight, bias)

    def use_packed() -> None:
        for _ in range(count):
            torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    with torch.inference_mode():
        best = compare({"plain": plain, "packed": use_packed}, 2 * args.repeat, clock)
    return {name: count * 2 * rows * 4 * size**2 / seconds for name, seconds in best.items()}


def report(
    what: str, best: dict[str, float], lens: list[int], limits: dict[str, float], flops: float
) -> None:
    """Print the results of one comparison."""
    theirs = best["sentence-transformers"]
    print(
        f"\n{len(lens)} {what} with {sum(lens)} tokens; the shortest has {min(lens)} tokens and "
        f"the longest {max(lens)}"
    )
    for name, seconds in best.items():
        share = flops / seconds / limits["packed"]
        print(
            f"  {name:<30} {len(lens) / seconds:8.1f} /s  {sum(lens) / seconds:9.0f} tokens/s  "
            f"{flops / seconds / 1e9:6.1f} GFLOP/s = {share:.0%} of the limit, "
            f"{theirs / seconds:.2f} times the speed of sentence-transformers"
        )


def embed_through(server: Served, texts: list[str]) -> np.ndarray:
    """Return the embeddings of all texts, computed by a server in one HTTP request."""
    request = urllib.request.Request(
        f"{server.openai_url}/embeddings",
        json.dumps({"input": texts}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return np.array([each["embedding"] for each in json.load(response)["data"]])


class Peer:
    """An embedder of another library, in a process of its own.

    Args:
        kind: the library and the dtype, such as "OpenVINO int8".
        checkpoint: the folder of the model.
        texts: a JSON file with a list of texts.
        threads: the number of threads.
    """

    def __init__(self, kind: str, checkpoint: str, texts: Path, threads: int) -> None:
        job = {"kind": kind, "checkpoint": checkpoint, "texts": str(texts), "threads": threads}
        self._process = subprocess.Popen(
            [OPENVINO_PYTHON, "-m", "loadtest.peers.exported_embedder", json.dumps(job)],
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
        """Read lines until the process prints `word`. Libraries print other lines before it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == word:
                return
        raise RuntimeError("A compared embedder ended. Its error message is above.")


def peer_works(
    stack: ExitStack, checkpoint: str, texts: list[str], args: argparse.Namespace
) -> dict[str, Callable[[], object]]:
    """For Nereid with 8-bit weights and each other library, return a function that encodes texts.

    Each function encodes all texts. The processes of the other libraries run until `stack` is
    closed.
    """
    file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "texts.json"
    file.write_text(json.dumps(texts))
    int8 = Embedder(checkpoint, num_threads=args.threads, weight_dtype="int8")
    works: dict[str, Callable[[], object]] = {"nereid int8": lambda: int8.encode(texts)}
    for kind in (f"OpenVINO {args.dtype}", "OpenVINO int8", "onnxruntime"):
        peer = Peer(kind, checkpoint, file, args.threads)
        stack.callback(peer.close)
        for batch_size in (1, 32):
            works[f"{kind}, batches of {batch_size}"] = partial(peer.encode, batch_size)
    return works


def serve(path: str, args: argparse.Namespace) -> Served:
    """Create a server of one embedding model with `args.threads` threads, but do not start it."""
    settings = {
        "NEREID_EMBEDDING_MODEL": path,
        "NEREID_EMBEDDING_NUM_THREADS": str(args.threads),
    }
    return Served(environment=settings)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    add("--hidden", type=int, default=384, help="hidden size of the model")
    add("--layers", type=int, default=6, help="number of layers of the model")
    add("--vocab", type=int, default=30_522, help="vocabulary size of the model")
    add("--texts", type=int, default=96, help="number of texts")
    add(
        "--lengths",
        choices=["uniform", "log"],
        default="uniform",
        help="distribution of the text lengths; with `log`, short texts are more frequent",
    )
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of the weights")
    add("--threads", type=int, default=1, help="number of threads")
    add("--repeat", type=int, default=3, help="number of runs, of which the best one counts")
    add(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="`cpu` measures the CPU time of this process, for one thread on a busy machine",
    )
    add("--peers", action="store_true", help="also measure OpenVINO and onnxruntime")
    add("--folder", help="keep the checkpoints and the converted models here for the next run")
    add("--triton", action="store_true", help="also send the texts to a server")
    args = parser.parse_args()
    if (args.triton or args.peers) and args.clock == "cpu":
        parser.error(
            "--triton and --peers require --clock wall, because --clock cpu does not include the "
            "CPU time of other processes"
        )
    return args


def main() -> None:
    """Measure embeddings and reranking, and print the results."""
    args = arguments()
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    logging.disable_progress_bar()
    rng = random.Random(1)
    lens = make_lengths(args)

    def words(count: int) -> str:
        return " ".join(f"w{rng.randrange(args.vocab - len(_SPECIAL))}" for _ in range(count))

    with ExitStack() as stack:
        folder = Path(args.folder or stack.enter_context(tempfile.TemporaryDirectory()))
        embedder_path = make_checkpoint(folder, args, has_head=False)
        reranker_path = make_checkpoint(folder, args, has_head=True)
        embedder = Embedder(embedder_path, num_threads=args.threads)
        reranker = Reranker(reranker_path, num_threads=args.threads)
        sentences = SentenceTransformer(embedder_path, device="cpu")
        cross = CrossEncoder(reranker_path, device="cpu")
        print(
            f"BERT {args.hidden} x {args.layers}, {args.dtype}, {torch.get_num_threads()} threads, "
            f"{args.lengths} lengths, {args.clock} time, best of {args.repeat} runs"
        )
        limits = measure_limits(args, clock)
        for name, rate in limits.items():
            print(f"matrix products with {name} weights: {rate / 1e9:.0f} GFLOP/s")

        texts = [words(n - 2) for n in lens]
        found, wanted = embedder.encode(texts), sentences.encode(texts, show_progress_bar=False)
        cosine = (found * wanted).sum(1) / np.linalg.norm(found, axis=1)
        least = (cosine / np.linalg.norm(wanted, axis=1)).min()
        print(f"lowest cosine similarity to sentence-transformers: {least:.7f}")
        works: dict[str, Callable[[], object]] = {
            "nereid": lambda: embedder.encode(texts),
            "sentence-transformers": lambda: sentences.encode(texts, show_progress_bar=False),
        }
        if args.peers:
            works |= peer_works(stack, embedder_path, texts, args)
        if args.triton:
            server = stack.enter_context(serve(embedder_path, args))
            served = embed_through(server, texts)
            difference = np.abs(served - found).max()
            print(f"largest difference between the server and the engine: {difference:.1e}")
            works["nereid serve"] = lambda: embed_through(server, texts)
        best = compare(works, args.repeat, clock)
        report("texts", best, lens, limits, flops_of(lens, args))

        pairs = [(words(min(8, n - 4)), words(max(1, n - 3 - min(8, n - 4)))) for n in lens]
        differences = np.abs(reranker.score(pairs) - cross.predict(pairs, show_progress_bar=False))
        print(f"\nlargest difference of scores: {differences.max():.1e}")
        works = {
            "nereid": lambda: reranker.score(pairs),
            "sentence-transformers": lambda: cross.predict(pairs, show_progress_bar=False),
        }
        best = compare(works, args.repeat, clock)
        report("pairs", best, lens, limits, flops_of(lens, args))


if __name__ == "__main__":
    main()
