# SPDX-License-Identifier: Apache-2.0
"""One table: Nereid's engine against what users would pick instead, on this machine.

    python -m loadtest.bench.bench --shapes demo 0.1b --dtype bfloat16 --decode 1 4 16

Every contestant runs in a process of its own on the same random weights with the same threads:
Nereid, as it is and compiled (`compile_forward`), transformers' `generate` (a static batch),
transformers' `generate_batch` (its continuous batching), and llama.cpp where `make bench-peers` has
installed it. The limits of the machine (memory bandwidth, matrix products) are measured in the same
run. Rounds alternate between the
contestants, and the median counts, because other work on the machine comes and goes.
"""

import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from nereid_backend.linear import native_linear
from transformers import Qwen3Config, Qwen3ForCausalLM

from loadtest.bench.json_programs import Report, outcome

LOADTEST = Path(__file__).parents[1]
PEERS_PYTHON = LOADTEST.parent / ".venv-peers" / "bin" / "python"
# Name: program, Python, settings of our engine.
CONTESTANTS: dict[str, tuple[str, Path, dict[str, Any]]] = {
    "nereid": ("nereid", Path(sys.executable), {}),
    "nereid compiled": ("nereid", Path(sys.executable), {"compile_forward": True}),
    "generate": ("transformers_generate", Path(sys.executable), {}),
    "generate_batch": ("transformers_batching", Path(sys.executable), {}),
    "llama.cpp": ("llama", PEERS_PYTHON, {}),
}
OURS = ("nereid", "nereid compiled")
# Qwen3 shapes: hidden, intermediate, layers, heads, key-value heads, head size, vocabulary.
SHAPES = {
    "demo": (160, 480, 6, 5, 1, 32, 2048),
    "0.1b": (768, 2304, 12, 12, 4, 64, 32000),
    "0.6b": (1024, 3072, 28, 16, 8, 128, 151936),
    "8b": (4096, 12288, 36, 32, 8, 128, 151936),
}
_TIMEOUT_S = 1800


def main() -> int:
    """Measure, print Markdown, and write JSON where asked."""
    args = arguments().parse_args()
    torch.set_num_threads(args.threads)
    report: dict[str, Any] = {"machine": machine(args), "limits": limits(args), "shapes": {}}
    print(header(report), flush=True)
    with tempfile.TemporaryDirectory(prefix="nereid-bench-") as folder:
        for shape in args.shapes:
            path = Path(folder) / shape
            num_parameters = make_checkpoint(path, shape, args.dtype)
            rounds = run_rounds(path, shape, args)
            report["shapes"][shape] = {"parameters": num_parameters, "contestants": rounds}
            print(table(shape, num_parameters, rounds, report["limits"], args), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["demo", "0.1b"])
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512], help="prompt lengths")
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 4, 16], help="batch sizes")
    parser.add_argument("--context", type=int, default=512, help="prompt length of the decode rows")
    parser.add_argument(
        "--answer", type=int, default=128, help="tokens generated in the decode rows"
    )
    parser.add_argument(
        "--mixed", type=int, default=0, metavar="N", help="N requests at random times"
    )
    parser.add_argument("--per-second", type=float, default=4.0, help="arrivals of --mixed")
    parser.add_argument("--repeat", type=int, default=3, help="measurements within a round")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each contestant")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", metavar="FILE", help="write all figures there, too")
    return parser


def config_of(shape: str) -> Qwen3Config:
    """The configuration of one of SHAPES."""
    hidden, intermediate, layers, heads, kv_heads, head_dim, vocab = SHAPES[shape]
    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )


def make_checkpoint(path: Path, shape: str, dtype: str) -> int:
    """Save a Qwen3 with random weights; returns how many parameters it has."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config_of(shape)).to(getattr(torch, dtype))
    model.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def run_rounds(path: Path, shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """The medians over the rounds of each contestant; {"error": ...} for one that failed."""
    workload = {
        "dtype": args.dtype,
        "threads": args.threads,
        "vocab_size": SHAPES[shape][-1],
        "prefill": args.prefill,
        "decode": args.decode,
        "context": args.context,
        "answer": args.answer,
        "repeat": args.repeat,
        "mixed": {"requests": args.mixed, "per_second": args.per_second} if args.mixed else None,
    }
    found: dict[str, list[Report]] = {name: [] for name in args.contestants}
    for number in range(args.rounds):
        for name, results in found.items():
            if results and "error" in results[0]:
                continue
            started = time.perf_counter()
            results.append(run_contestant(name, path, workload))
            spent = time.perf_counter() - started
            print(
                f"{shape}: {name}, round {number + 1}: {spent:.0f} s", file=sys.stderr, flush=True
            )
    return {name: median(results) for name, results in found.items()}


def run_contestant(
    name: str,
    path: Path | str,
    workload: Report,
    limit_s: float = _TIMEOUT_S,
    settings: Report | None = None,
) -> Report:
    """What one process of a contestant measures; {"error": ...} where it does not, or not in time.

    Args:
        name: of CONTESTANTS.
        path: the checkpoint.
        workload: what contestants/workload.py reads.
        limit_s: seconds after which the process is killed.
        settings: of our engine, beside those of the contestant and of BENCH_ENGINE.
    """
    program, python, own = CONTESTANTS[name]
    if not python.exists():
        return {"error": "not installed; `make bench-peers` installs it"}
    command = [str(python), "-m", f"loadtest.peers.{program}", str(path), json.dumps(workload)]
    given = json.loads(os.environ.get("BENCH_ENGINE", "{}"))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(workload["threads"]),
        "TQDM_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(LOADTEST.parent), os.environ.get("PYTHONPATH")])
        ),
        "BENCH_ENGINE": json.dumps({**given, **own, **(settings or {})}),
    }
    environment.pop("TRITON_INTERPRET", None)
    return outcome(command, limit_s, environment)


def median(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Results of the same form, number by number."""
    if "error" in results[0]:
        return results[0]
    merged: dict[str, Any] = {}
    for key, value in results[0].items():
        values = [result[key] for result in results]
        merged[key] = median(values) if isinstance(value, dict) else statistics.median(values)
    return merged


def limits(args: argparse.Namespace) -> dict[str, float]:
    """What the machine can do: bytes read per second, and floating-point operations in products."""
    dtype = getattr(torch, args.dtype)
    data = torch.ones(2**27)
    # One row through a large layer also reads, in another way, and often faster.
    weight = torch.ones(2**15, 2**12, dtype=dtype)
    vector, packed = torch.ones(1, 2**12, dtype=dtype), None
    if native_linear.can_pack(weight):
        packed = native_linear.pack(weight)

    def best(work: Any, repeat: int = 5) -> float:  # noqa: ANN401 - any callable
        work()
        times = []
        for _ in range(repeat):
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
        return min(times)

    size = 2048
    # A processor without products of a dtype works it out in float32, and torch not always well.
    squares = [torch.ones(size, size, dtype=kind) for kind in {dtype, torch.float32}]
    read = data.numel() * 4 / best(data.sum)
    if packed is not None:
        spent = best(lambda: native_linear.linear(vector, packed, None, 2**15))
        read = max(read, packed.numel() * packed.itemsize / spent)
    return {
        "read_bytes_per_s": read,
        "matmul_flops": 2 * size**3 / min(best(partial(torch.mm, x, x)) for x in squares),
    }


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """Where and with what it ran."""
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "processor": processor(),
        "threads": args.threads,
        "dtype": args.dtype,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "command": " ".join(["python", *sys.argv]),
    }


def processor() -> str:
    """Its name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?"
    )


def header(report: dict[str, Any]) -> str:
    """What stands above the tables."""
    facts, limit = report["machine"], report["limits"]
    return (
        f"{facts['date']}, {facts['processor']}, {facts['threads']} threads, {facts['dtype']}, "
        f"torch {facts['torch']}, transformers {facts['transformers']}\n"
        f"limits: memory read at {limit['read_bytes_per_s'] / 1e9:.0f} GB/s, matrix products at "
        f"{limit['matmul_flops'] / 1e9:.0f} GFLOP/s\n"
    )


def table(
    shape: str,
    num_parameters: int,
    rounds: dict[str, Any],
    limit: dict[str, float],
    args: argparse.Namespace,
) -> str:
    """Markdown: a row a measurement, a column a contestant, our best divided by the best other."""
    names = list(rounds)
    lines = [
        f"### {shape}: {num_parameters / 1e6:.0f}M parameters, tokens/s",
        "",
        "| | " + " | ".join(names) + " | our best / best other | share of the limit |",
        "|---" * (len(names) + 3) + "|",
    ]
    itemsize = 2 if args.dtype == "bfloat16" else 4
    for kind, sizes in (("prefill", args.prefill), ("decode", args.decode)):
        for size in sizes:
            rates = {name: rounds[name].get(kind, {}).get(str(size)) for name in names}
            label = f"prefill {size}" if kind == "prefill" else f"decode, batch {size}"
            ours = max((rates.get(name) or 0 for name in OURS), default=0)
            if kind == "prefill":
                most = limit["matmul_flops"] / (2 * num_parameters)
            else:
                # Every step reads all weights once (and keys and values, which are left out).
                most = limit["read_bytes_per_s"] / (num_parameters * itemsize) * size
            share = f"{ours / most:.0%}" if ours else "-"
            lines.append(row(label, rates, ours, share))
    mixed = {name: rounds[name].get("mixed") for name in names}
    if any(mixed.values()):
        for key in ("tokens_per_s", "ttft_p50_s", "ttft_p95_s"):
            cells = [f"{value[key]:.3g}" if value else "-" for value in mixed.values()]
            lines.append(f"| mixed arrivals, {key} | " + " | ".join(cells) + " | | |")
    cells = [
        f"{rounds[name]['peak_bytes'] / 2**20:.0f}" if "peak_bytes" in rounds[name] else "-"
        for name in names
    ]
    lines.append("| peak memory, MiB | " + " | ".join(cells) + " | | |")
    lines += [f"\n{name}: {rounds[name]['error']}" for name in names if "error" in rounds[name]]
    return "\n".join(lines) + "\n"


def row(label: str, rates: dict[str, float | None], ours: float, share: str) -> str:
    """One line of the table."""
    others = [value for name, value in rates.items() if name not in OURS and value]
    ratio = f"{ours / max(others):.2f}" if ours and others else "-"
    cells = [f"{value:,.0f}" if value else "-" for value in rates.values()]
    return f"| {label} | " + " | ".join(cells) + f" | {ratio} | {share} |"


if __name__ == "__main__":
    # So that the contestant that runs ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
