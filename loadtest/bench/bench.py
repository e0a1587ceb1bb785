"""Compare the speed of Nereid's engine with transformers, llama.cpp and OpenVINO on this machine.

    python -m loadtest.bench.bench --shapes demo 0.1b --dtype bfloat16 --decode 1 4 16
    python -m loadtest.bench.bench --contestants nereid generate          # without llama.cpp
    python -m loadtest.bench.bench --contestants nereid "int8 weights" "int8 cache" "int8"
    python -m loadtest.bench.bench --contestants nereid --decode 1 4 16 64 --context 32 512 2048
    python -m loadtest.bench.bench --shapes 0.6b --contestants "int4 compiled" "llama.cpp Q4_K_M"

By default, the program compares five engines on the same random weights with the same number of
threads: Nereid, Nereid with compile_forward, `generate` of transformers (static batches),
`generate_batch` of transformers (continuous batching), and llama.cpp. `make bench-peers` installs
llama.cpp and OpenVINO. The contestants "int8 ..." and "int4 ..." are Nereid with weights of 8 or 4
bits, an 8-bit KV cache, or both. "llama.cpp Q4_0" and similar names are llama.cpp with quantized
weights, and "OpenVINO int4" and similar names are OpenVINO.

Each engine runs in a process of its own. The program also measures the limits of the machine, which
are its memory bandwidth and its speed of matrix products. The engines take turns for several
rounds, and the table shows medians, because other work on the machine varies over time.
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

from loadtest import command_line
from loadtest.peers.json_programs import Report, outcome

LOADTEST = Path(__file__).parents[1]
PEERS_PYTHON = LOADTEST.parent / ".venv-peers" / "bin" / "python"
OPENVINO_PYTHON = LOADTEST.parent / ".venv-openvino" / "bin" / "python"
# For each engine: the module in loadtest/peers, the Python that runs the module, and the engine's
# settings.
CONTESTANTS: dict[str, tuple[str, Path, dict[str, Any]]] = {
    "nereid": ("nereid", Path(sys.executable), {}),
    "nereid compiled": ("nereid", Path(sys.executable), {"compile_forward": True}),
    "generate": ("transformers_generate", Path(sys.executable), {}),
    "generate_batch": ("transformers_batching", Path(sys.executable), {}),
    "llama.cpp": ("llama", PEERS_PYTHON, {}),
    "int8 weights": ("nereid", Path(sys.executable), {"weight_dtype": "int8"}),
    "int8 cache": ("nereid", Path(sys.executable), {"kv_cache_dtype": "int8"}),
    "int8": ("nereid", Path(sys.executable), {"weight_dtype": "int8", "kv_cache_dtype": "int8"}),
    "int4 weights": ("nereid", Path(sys.executable), {"weight_dtype": "int4"}),
    **{
        f"{dtype} compiled": (
            "nereid",
            Path(sys.executable),
            {"weight_dtype": dtype, "compile_forward": True},
        )
        for dtype in ("int8", "int4")
    },
    **{
        f"llama.cpp {kind}": ("llama", PEERS_PYTHON, {"gguf_type": kind})
        for kind in ("Q4_0", "Q4_K_M", "Q8_0")
    },
    **{
        f"OpenVINO {kind}": ("openvino_model", OPENVINO_PYTHON, {"weight_format": kind})
        for kind in ("int4", "int8", "fp16")
    },
}
OURS = {name for name, (program, _, _) in CONTESTANTS.items() if program == "nereid"}
_USUAL = list(CONTESTANTS)[:5]
# The sizes of each Qwen3 model, in this order: hidden size, intermediate size, number of layers,
# number of heads, number of key-value heads, head dimension, and vocabulary size.
SHAPES = {
    "demo": (160, 480, 6, 5, 1, 32, 2048),
    "0.1b": (768, 2304, 12, 12, 4, 64, 32000),
    "0.6b": (1024, 3072, 28, 16, 8, 128, 151936),
    "8b": (4096, 12288, 36, 32, 8, 128, 151936),
}
_TIMEOUT_S = 1800


def main() -> int:
    """Measure, print Markdown, and write a JSON file if --json is given."""
    args = arguments().parse_args()
    torch.set_num_threads(args.threads)
    report: dict[str, Any] = {"machine": machine(args), "limits": limits(args), "shapes": {}}
    print(header(report), flush=True)
    with tempfile.TemporaryDirectory(prefix="nereid-bench-") as temporary:
        for shape in args.shapes:
            path = Path(args.folder or temporary) / f"{shape}-{args.dtype}"
            num_parameters = make_checkpoint(path, shape, args.dtype)
            for context in args.context:
                rounds = run_rounds(path, shape, context, args)
                title = f"{shape}, context {context}"
                report["shapes"][title] = {"parameters": num_parameters, "contestants": rounds}
                print(table(title, num_parameters, rounds, report["limits"], args), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    engines = list(CONTESTANTS)
    threads = len(os.sched_getaffinity(0))
    add("--shapes", nargs="+", choices=SHAPES, default=["demo", "0.1b"], help="shapes of the model")
    add("--contestants", nargs="+", choices=engines, default=_USUAL, help="engines to compare")
    add("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="dtype of the weights")
    add("--prefill", type=int, nargs="*", default=[512], help="prompt lengths of the prefill rows")
    add("--decode", type=int, nargs="*", default=[1, 4, 16], help="batch sizes of the decode rows")
    add("--context", type=int, nargs="+", default=[512], help="prompt lengths of the decode rows")
    add("--answer", type=int, default=128, help="number of generated tokens in the decode rows")
    add("--repeat", type=int, default=3, help="number of measurements in each process")
    add("--rounds", type=int, default=2, help="number of processes of each engine")
    add("--threads", type=int, default=threads, help="number of threads (default: %(default)s)")
    add("--folder", help="keep the checkpoints and converted files here for the next run")
    add("--json", metavar="FILE", help="also write all results to this JSON file")
    return parser


def config_of(shape: str) -> Qwen3Config:
    """Return the configuration of a model shape. `shape` is a key of SHAPES."""
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
    """Save a Qwen3 model with random weights, and return its number of parameters.

    If the folder `path` already contains the model, the model is not saved again.
    """
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config_of(shape)).to(getattr(torch, dtype))
    if not (path / "config.json").is_file():
        model.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def run_rounds(path: Path, shape: str, context: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the median results of each engine, or {"error": ...} for an engine that failed.

    Args:
        path: the folder of the checkpoint.
        shape: the shape of the model, a key of SHAPES.
        context: the number of tokens of each prompt in the measurements of decode.
        args: the command line.
    """
    workload = {
        "dtype": args.dtype,
        "threads": args.threads,
        "vocab_size": SHAPES[shape][-1],
        "prefill": args.prefill,
        "decode": args.decode,
        "context": context,
        "answer": args.answer,
        "repeat": args.repeat,
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
    """Run one engine in a process, and return its measurements.

    Args:
        name: the name of the engine, a key of CONTESTANTS.
        path: the folder of the checkpoint.
        workload: the workload that loadtest/peers/workload.py reads.
        limit_s: the time limit in seconds. If the process exceeds the limit, the process is killed.
        settings: further settings of Nereid's engine. They override the settings in CONTESTANTS and
            those in the environment variable BENCH_ENGINE.

    Returns:
        The measurements, or {"error": ...} if the engine failed or exceeded the time limit.
    """
    program, python, own = CONTESTANTS[name]
    if not python.exists():
        return {"error": f"{name} is not installed. Run `make bench-peers` to install it."}
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
    # nereid_backend has set this variable in this process. Each engine uses its own default.
    environment.pop("GOMP_SPINCOUNT", None)
    return outcome(command, limit_s, environment)


def median(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each number. All dictionaries in `results` have the same keys.

    Example: `median([{"load_s": 1}, {"load_s": 3}])` returns `{"load_s": 2}`.
    """
    if "error" in results[0]:
        return results[0]
    merged: dict[str, Any] = {}
    for key, value in results[0].items():
        values = [result[key] for result in results]
        merged[key] = median(values) if isinstance(value, dict) else statistics.median(values)
    return merged


def limits(args: argparse.Namespace) -> dict[str, float]:
    """Return the machine's memory bandwidth (bytes/s) and speed of matrix products (FLOP/s)."""
    dtype = getattr(torch, args.dtype)
    data = torch.ones(2**27)
    # The product of one row with a large weight matrix often reads memory faster than a sum does.
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
    # If the processor cannot multiply numbers of a dtype, torch converts the numbers. Such a
    # product can be slower than a product in float32. The limit is therefore the faster of the two.
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
    """Return the date, the processor, the versions and the command of this run."""
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
    """Return the name of the processor, or "?" if the operating system does not report the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?"
    )


def header(report: dict[str, Any]) -> str:
    """Return the lines above the tables. They describe the machine, its limits, and the tables."""
    facts, limit = report["machine"], report["limits"]
    return (
        f"{facts['date']}, {facts['processor']}, {facts['threads']} threads, {facts['dtype']}, "
        f"torch {facts['torch']}, transformers {facts['transformers']}\n"
        f"Limits of this machine: it reads memory at {limit['read_bytes_per_s'] / 1e9:.0f} GB/s "
        f"and computes matrix products at {limit['matmul_flops'] / 1e9:.0f} GFLOP/s.\n"
        "The last column shows which share of these limits the fastest Nereid engine reaches.\n"
    )


def table(
    title: str,
    num_parameters: int,
    rounds: dict[str, Any],
    limit: dict[str, float],
    args: argparse.Namespace,
) -> str:
    """Return a Markdown table with one row for each measurement and one column for each engine.

    The last two columns contain the speed of the fastest Nereid engine, divided by the speed of the
    fastest other engine and by the limit of the machine.
    """
    names = list(rounds)
    lines = [
        f"### {title}: {num_parameters / 1e6:.0f}M parameters, tokens/s",
        "",
        "| | " + " | ".join(names) + " | fastest Nereid / fastest other | share of the limit |",
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
                # Every step reads all weights once. The keys and values that a step also reads are
                # not counted.
                most = limit["read_bytes_per_s"] / (num_parameters * itemsize) * size
            share = f"{ours / most:.0%}" if ours else "-"
            lines.append(row(label, rates, ours, share))
    for label, key in (
        ("peak memory, MiB", "peak_bytes"),
        ("weights, MiB", "weights_bytes"),
        ("KV cache of 1,000 tokens, MiB", "cache_bytes_per_1000_tokens"),
    ):
        sizes = [rounds[name].get(key) for name in names]
        cells = ["-" if size is None else f"{size / 2**20:.1f}" for size in sizes]
        lines.append(f"| {label} | " + " | ".join(cells) + " | | |")
    lines += [f"\n{name}: {rounds[name]['error']}" for name in names if "error" in rounds[name]]
    return "\n".join(lines) + "\n"


def row(label: str, rates: dict[str, float | None], ours: float, share: str) -> str:
    """Return one row of the table.

    Args:
        label: the first cell.
        rates: the tokens per second of each engine, or None if an engine was not measured.
        ours: the tokens per second of the fastest Nereid engine.
        share: the last cell.
    """
    others = [value for name, value in rates.items() if name not in OURS and value]
    ratio = f"{ours / max(others):.2f}" if ours and others else "-"
    cells = [f"{value:,.0f}" if value else "-" for value in rates.values()]
    return f"| {label} | " + " | ".join(cells) + f" | {ratio} | {share} |"


if __name__ == "__main__":
    # SystemExit runs the code that kills the engine's process. The default action of SIGTERM does
    # not run this code.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
