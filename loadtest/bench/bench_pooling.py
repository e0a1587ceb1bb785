"""Texts and pairs a second of the pooling engine beside sentence-transformers, in one process.

    python -m loadtest.bench.bench_pooling   # random weights, the shape of MiniLM-L6
    python -m loadtest.bench.bench_pooling --threads 1 --texts 128 --lengths log
    python -m loadtest.bench.bench_pooling --triton   # the texts through `nereid serve`, too

Both compute the same texts with the same weights, dtype and threads, and must agree. Figures are
the best of --repeat runs, which alternate between the two, so that what else runs on the machine
counts little. The limit is how fast the machine multiplies matrices of the model's shapes: as torch
does it by itself, and laid out for oneDNN.
"""

import argparse
import json
import random
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from nereid_backend import Embedder, Reranker
from sentence_transformers import CrossEncoder, SentenceTransformer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from loadtest.server.served import Served

_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def make_checkpoint(folder: Path, args: argparse.Namespace, *, has_head: bool) -> str:
    """Save random weights of a BERT with a tokenizer of one token a word."""
    torch.manual_seed(0)
    words = [*_SPECIAL, *(f"w{i}" for i in range(args.vocab - len(_SPECIAL)))]
    config = BertConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        max_position_embeddings=512,
        num_labels=1,
        initializer_range=0.05,
    )
    model = BertForSequenceClassification(config) if has_head else BertModel(config)
    model.to(getattr(torch, args.dtype)).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=512,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)
    return str(folder)


def make_lengths(args: argparse.Namespace) -> list[int]:
    """Tokens of each text, 8 to 512: every length as likely, or every doubling."""
    rng = random.Random(0)
    if args.lengths == "uniform":
        return [rng.randint(8, 512) for _ in range(args.texts)]
    return [round(8 * 64 ** rng.random()) for _ in range(args.texts)]


def compare(
    works: dict[str, Callable[[], object]], repeat: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Seconds that each takes at best."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(repeat):
        for name, work in works.items():
            started = clock()
            work()
            best[name] = min(best[name], clock() - started)
    return best


def flops_of(lens: list[int], args: argparse.Namespace) -> float:
    """Floating point operations of the matrix products of so long texts."""
    hidden = args.hidden
    linear = sum(lens) * 2 * 12 * hidden**2
    attention = sum(4 * n * n * hidden for n in lens)
    return float(args.layers * (linear + attention))


def measure_limits(args: argparse.Namespace, clock: Callable[[], float]) -> dict[str, float]:
    """FLOP a second of the model's largest product over 512 rows, by how it is done."""
    dtype = getattr(torch, args.dtype)
    rows, size = 512, args.hidden
    x, weight = torch.randn(rows, size).to(dtype), torch.randn(4 * size, size).to(dtype)
    bias = torch.randn(4 * size).to(dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    count = 60

    def plain() -> None:
        for _ in range(count):
            torch.nn.functional.linear(x, weight, bias)

    def laid_out() -> None:
        for _ in range(count):
            torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    with torch.inference_mode():
        best = compare({"torch's own": plain, "laid out": laid_out}, 2 * args.repeat, clock)
    return {name: count * 2 * rows * 4 * size**2 / seconds for name, seconds in best.items()}


def report(
    what: str, best: dict[str, float], lens: list[int], limits: dict[str, float], flops: float
) -> None:
    """Print one comparison."""
    theirs = best["sentence-transformers"]
    print(f"\n{what}: {len(lens)}, {sum(lens)} tokens, {min(lens)} to {max(lens)}")
    for name, seconds in best.items():
        share = flops / seconds / limits["laid out"]
        print(
            f"  {name:<22} {len(lens) / seconds:8.1f} /s  {sum(lens) / seconds:9.0f} tokens/s  "
            f"{flops / seconds / 1e9:6.1f} GFLOP/s = {share:.0%} of the limit, "
            f"ratio {theirs / seconds:.2f}"
        )


def embed_through(server: Served, texts: list[str]) -> np.ndarray:
    """Embeddings of all texts by one HTTP request."""
    request = urllib.request.Request(
        f"{server.openai_url}/embeddings",
        json.dumps({"input": texts}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return np.array([each["embedding"] for each in json.load(response)["data"]])


def serve(path: str, args: argparse.Namespace) -> Served:
    """A server of one embedding model, with as many threads as the others get."""
    settings = {
        "NEREID_EMBEDDING_MODEL": path,
        "NEREID_EMBEDDING_NUM_THREADS": str(args.threads),
    }
    return Served(environment=settings)


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=30_522)
    parser.add_argument("--texts", type=int, default=96)
    parser.add_argument("--lengths", choices=["uniform", "log"], default="uniform")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu counts this process's CPU time: for one thread on a busy machine",
    )
    parser.add_argument("--triton", action="store_true", help="the texts through a server, too")
    args = parser.parse_args()
    if args.triton and args.clock == "cpu":
        parser.error("--triton: the server's CPU time is not this process's; use --clock wall")
    return args


def main() -> None:
    """Measure and print."""
    args = arguments()
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    logging.disable_progress_bar()
    rng = random.Random(1)
    lens = make_lengths(args)

    def words(count: int) -> str:
        return " ".join(f"w{rng.randrange(args.vocab - len(_SPECIAL))}" for _ in range(count))

    with ExitStack() as stack:
        first, second = (stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2))
        embedder_path = make_checkpoint(Path(first), args, has_head=False)
        reranker_path = make_checkpoint(Path(second), args, has_head=True)
        embedder = Embedder(embedder_path, num_threads=args.threads)
        reranker = Reranker(reranker_path, num_threads=args.threads)
        sentences = SentenceTransformer(embedder_path, device="cpu")
        cross = CrossEncoder(reranker_path, device="cpu")
        print(
            f"BERT {args.hidden} x {args.layers}, {args.dtype}, {torch.get_num_threads()} threads, "
            f"lengths {args.lengths}, {args.clock} time, best of {args.repeat}"
        )
        limits = measure_limits(args, clock)
        for name, rate in limits.items():
            print(f"matrix products, {name}: {rate / 1e9:.0f} GFLOP/s")

        texts = [words(n - 2) for n in lens]
        found, wanted = embedder.encode(texts), sentences.encode(texts, show_progress_bar=False)
        cosine = (found * wanted).sum(1) / np.linalg.norm(found, axis=1)
        print(f"least cosine {(cosine / np.linalg.norm(wanted, axis=1)).min():.7f}")
        works: dict[str, Callable[[], object]] = {
            "nereid": lambda: embedder.encode(texts),
            "sentence-transformers": lambda: sentences.encode(texts, show_progress_bar=False),
        }
        if args.triton:
            server = stack.enter_context(serve(embedder_path, args))
            served = embed_through(server, texts)
            print(f"largest difference through the server {np.abs(served - found).max():.1e}")
            works["nereid, served"] = lambda: embed_through(server, texts)
        best = compare(works, args.repeat, clock)
        report("texts", best, lens, limits, flops_of(lens, args))

        pairs = [(words(min(8, n - 4)), words(max(1, n - 3 - min(8, n - 4)))) for n in lens]
        differences = np.abs(reranker.score(pairs) - cross.predict(pairs, show_progress_bar=False))
        print(f"\nlargest difference of scores {differences.max():.1e}")
        best = compare(
            {
                "nereid": lambda: reranker.score(pairs),
                "sentence-transformers": lambda: cross.predict(pairs, show_progress_bar=False),
            },
            args.repeat,
            clock,
        )
        report("pairs", best, lens, limits, flops_of(lens, args))


if __name__ == "__main__":
    main()
