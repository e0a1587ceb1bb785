# SPDX-License-Identifier: Apache-2.0
"""Everything to be measured on a GPU, in one command that needs no network.

    python loadtest/bench_gpu.py               checks, kernels, engine; under 8 minutes
    python loadtest/bench_gpu.py --tune        first searches cuts of the kernels, and keeps them
    python loadtest/bench_gpu.py --rehearse    all of it on this machine's processor at tiny sizes

First every kernel is compared with its plain twin at real shapes; nothing is measured where one
differs. Then: decode attention against the rate of a copy, prefill attention against torch's fused
attention, and an 8B-shaped model with random weights: a decode step against the time that reading
the weights takes, 256 sequences against transformers' generate_batch, the first token of a prompt
of 4096 against one forward pass. Writes JSON and Markdown. A rehearsal tests this program; its
figures mean nothing.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

if "--rehearse" in sys.argv:
    # Before the package triton is imported: its kernels are then interpreted.
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from bench import CONTESTANTS, HERE, SHAPES, config_of
from gpu_kernels import (
    CANDIDATES,
    REAL_SHAPES,
    REAL_SPECS,
    TINY_SHAPES,
    TINY_SPECS,
    TUNED_DIMS,
    KernelError,
    Measured,
    Tuning,
    check,
    copy_rate,
    decode_rate,
    milliseconds,
    prefill_rate,
    tune,
)
from nereid_backend.attention import gpu
from nereid_backend.attention.layers import LayerSpec, Span
from nereid_backend.attention.tuning import FOLDER, table_of, write_table
from transformers import Qwen3ForCausalLM
from transformers.utils import logging

# The command's own limit; what is left of it bounds each contestant.
_LIMIT_S = 480
# An 8B model in bfloat16 with its cache and 256 sequences, and its checkpoint on disk.
_BYTES_8B = 40 * 2**30
_DISK_8B = 18 * 2**30
_PROMPT, _CONTEXT, _ANSWER, _SEQUENCES = 4096, 512, 64, 256

Report = dict[str, Any]


def main() -> int:
    """Check, measure, write. Returns the exit code: 1 a kernel is wrong, 2 there is no GPU."""
    args = arguments().parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        print("bench-gpu: torch sees no CUDA device here; --rehearse runs it without", flush=True)
        return 2
    started = time.monotonic()
    logging.disable_progress_bar()
    device = torch.device("cpu" if args.rehearse else "cuda:0")
    torch.manual_seed(0)
    report: Report = {"machine": machine(device)}
    try:
        report["checks"] = checks(device, args)
    except KernelError as error:
        print(f"bench-gpu: {error}; nothing is measured", flush=True)
        return 1
    if args.tune:
        tune_here(device, args)
    report |= kernels(device, args)
    if not args.no_engine:
        report["engine"] = engine(device, report["copy_bytes_per_s"], args, started)
    report["seconds"] = time.monotonic() - started
    text = markdown(report)
    print(text, flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.out / "gpu.md").write_text(text)
    print(f"written to {args.out}", flush=True)
    return 0


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the report")
    parser.add_argument("--tune", action="store_true", help="search cuts and keep them")
    parser.add_argument("--tables", type=Path, default=FOLDER, help="folder that --tune writes to")
    parser.add_argument("--no-engine", action="store_true", help="the kernels alone")
    parser.add_argument("--shape", choices=SHAPES, help="of the engine's model; default: 8b")
    parser.add_argument("--folder", help="where the model's checkpoint goes meanwhile")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on this processor")
    return parser


def machine(device: torch.device) -> Report:
    """Where and with what it ran."""
    facts: Report = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "device": "rehearsal",
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "triton": version("triton"),
        "command": " ".join(["python", *sys.argv]),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "tuned": bool(table_of(properties.name)),
        }
    return facts


def checks(device: torch.device, args: argparse.Namespace) -> list[Report]:
    """Compare every kernel with its twin; see `check`."""
    specs, shapes = (TINY_SPECS, TINY_SHAPES) if args.rehearse else (REAL_SPECS, REAL_SHAPES)
    found = []
    for name, spec in specs.items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            if args.rehearse and dtype == torch.bfloat16:
                continue  # the interpreter multiplies bfloat16 as if its bits were integers
            difference = check(name, spec, shapes, dtype, device)
            kind = str(dtype).removeprefix("torch.")
            found.append({"name": name, "dtype": kind, "difference": difference})
            print(f"right: {name}, {kind}, within {difference:.2g}", flush=True)
        used = torch.float16 if args.rehearse else torch.bfloat16
        difference = check(name, spec, shapes, used, device, gpu.GpuInt8KVCache)
        found.append({"name": name, "dtype": "int8", "difference": difference})
        print(f"right: {name}, int8, within {difference:.2g}", flush=True)
    return found


def tune_here(device: torch.device, args: argparse.Namespace) -> None:
    """Search cuts of the kernels, keep them on disk, and use them from here on."""
    if args.rehearse:
        small = {name: [Tuning(16, 16, 4, 2)] for name in CANDIDATES}
        shapes = {"decode": [(20, 1)], "prefill": [(0, 9)]}
        table = tune(device, (16,), small, shapes)
    else:
        shapes = {"decode": [(16384, 1)] * 16, "prefill": [(0, 8192)]}
        table = tune(device, TUNED_DIMS, CANDIDATES, shapes)
    facts = machine(device)
    about = {name: str(facts[name]) for name in ("date", "torch", "triton")}
    print(f"written: {write_table(facts['device'], table, about, args.tables)}", flush=True)
    table_of.cache_clear()
    gpu.device_of.cache_clear()


def kernels(device: torch.device, args: argparse.Namespace) -> Report:
    """Rates of the kernels, each beside its limit."""
    if args.rehearse:
        small = LayerSpec(2, 1, 16, 16)
        limit = copy_rate(device, 2**20)
        return {
            "copy_bytes_per_s": limit,
            "decode": [line(decode_rate("tiny", small, [(40, 1)] * 2, device, limit))],
            "prefill": [line(prefill_rate("tiny", small, [(0, 20)], device))],
        }
    limit = copy_rate(device, 2**31)
    integers = gpu.GpuInt8KVCache
    spec = LayerSpec(32, 8, 128, 128)
    window = LayerSpec(64, 8, 64, 64, Span(window=128), None, True)
    decodes = [
        ("1 sequence of 131072", spec, [(131071, 1)]),
        ("8 of 32768", spec, [(32767, 1)] * 8),
        ("64 of 8192", spec, [(8191, 1)] * 64),
        ("256 of 2048", spec, [(2047, 1)] * 256),
        ("1 of 65536 and 63 of 1024", spec, [(65535, 1), *[(1023, 1)] * 63]),
        (
            "keys 192, values 128, 16 heads: 32 of 8192",
            LayerSpec(16, 16, 192, 128),
            [(8191, 1)] * 32,
        ),
    ]
    prefills = [
        ("1 prompt of 4096", spec, [(0, 4096)]),
        ("1 of 16384", spec, [(0, 16384)]),
        ("16 of 512", spec, [(0, 512)] * 16),
        ("2048 behind 14336 cached", spec, [(14336, 2048)]),
        ("heads of 64, 1 of 8192", LayerSpec(64, 8, 64, 64), [(0, 8192)]),
    ]
    report: Report = {
        "copy_bytes_per_s": limit,
        "decode": [
            *[line(decode_rate(*case, device, limit)) for case in decodes],
            line(decode_rate("64 of 8192 as int8", *decodes[2][1:], device, limit, integers)),
        ],
        "prefill": [line(prefill_rate(*case, device)) for case in prefills],
    }
    full = decode_rate("", dataclasses.replace(window, span=Span()), [(32767, 1)] * 32, device, 1.0)
    short = decode_rate("", window, [(32767, 1)] * 32, device, 1.0)
    report["window_speedup"] = full.milliseconds / short.milliseconds
    return report


def line(measured: Measured) -> Report:
    """As JSON, the share included."""
    return {**dataclasses.asdict(measured), "share": measured.share}


def engine(
    device: torch.device, bytes_per_s: float, args: argparse.Namespace, started: float
) -> Report:
    """Figures of the whole engine on a model with random weights."""
    sizes = (64, 16, 4, 3) if args.rehearse else (_PROMPT, _CONTEXT, _ANSWER, _SEQUENCES)
    prompt, context, answer, sequences = sizes
    with tempfile.TemporaryDirectory(prefix="nereid-bench-gpu-", dir=args.folder) as folder:
        shape = args.shape or ("demo" if args.rehearse else shape_for(device, folder))
        dtype = torch.float32 if args.rehearse else torch.bfloat16
        print(f"making a {shape} model", flush=True)
        weights_bytes, forward_ms = make_model(Path(folder), shape, dtype, device, prompt)
        workload = {
            "dtype": str(dtype).removeprefix("torch."),
            "threads": min(8, os.cpu_count() or 1),
            "vocab_size": SHAPES[shape][-1],
            "prefill": [prompt],
            "decode": [1, sequences],
            "context": context,
            "answer": answer,
            "repeat": 2,
            "mixed": None,
        }
        ours = run_contestant("nereid", folder, workload, started)
        theirs = run_contestant(
            "generate_batch", folder, {**workload, "prefill": [], "decode": [sequences]}, started
        )
    report: Report = {
        "shape": shape,
        "weights_bytes": weights_bytes,
        "forward_ms": forward_ms,
        "nereid": ours,
        "generate_batch": theirs,
    }
    if "error" not in ours:
        step_ms = 1e3 / ours["decode"]["1"]
        first_ms = prompt / ours["prefill"][str(prompt)] * 1e3
        limit_ms = weights_bytes / bytes_per_s * 1e3
        report["decode_step"] = {"ms": step_ms, "limit_ms": limit_ms, "share": limit_ms / step_ms}
        report["first_token"] = {"ms": first_ms, "ratio": first_ms / forward_ms}
        if "error" not in theirs:
            ratio = ours["decode"][str(sequences)] / theirs["decode"][str(sequences)]
            report["many"] = {"sequences": sequences, "ratio": ratio}
    return report


def shape_for(device: torch.device, folder: str) -> str:
    """The largest shape for which there is memory, and room on disk."""
    memory = torch.cuda.get_device_properties(device).total_memory
    disk = os.statvfs(folder)
    has_room = disk.f_bavail * disk.f_frsize > _DISK_8B
    return "8b" if memory > _BYTES_8B and has_room else "0.6b"


def make_model(
    folder: Path, shape: str, dtype: torch.dtype, device: torch.device, prompt: int
) -> tuple[int, float]:
    """Save a Qwen3 with random weights; its bytes, and milliseconds of one pass over a prompt."""
    config = config_of(shape)
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:  # weights are drawn there: on a host this takes minutes
            model = Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    ids = torch.randint(3, config.vocab_size, (1, prompt), device=device)
    with torch.inference_mode():
        spent = milliseconds(
            functools.partial(model, input_ids=ids, use_cache=False, logits_to_keep=1),
            device,
            repeat=5,
        )
    model.save_pretrained(folder)
    weights_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return weights_bytes, spent


def run_contestant(name: str, folder: str, workload: Report, started: float) -> Report:
    """One process of a contestant of `bench.py`, in the time that is left."""
    program, python = CONTESTANTS[name]
    left = _LIMIT_S - (time.monotonic() - started)
    print(f"running {name}, {left:.0f} s left", flush=True)
    if left < 10:
        return {"error": f"no time was left of {_LIMIT_S} s"}
    command = [str(python), str(HERE / "contestants" / program), folder, json.dumps(workload)]
    environment = {**os.environ, "TQDM_DISABLE": "1"}
    environment.pop("TRITON_INTERPRET", None)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=left, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {left:.0f} s"}
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"error": lines[-1][:200]}
    found: Report = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def markdown(report: Report) -> str:
    """The report for people."""
    facts = report["machine"]
    worst = max(check["difference"] for check in report["checks"])
    lines = [
        f"# {facts['device']}, {facts['date']}",
        "",
        f"`{facts['command']}`; torch {facts['torch']}, triton {facts['triton']}, transformers "
        f"{facts['transformers']}; {report['seconds']:.0f} s.",
        "",
        f"{len(report['checks'])} comparisons of the kernels with their twins: all equal, within "
        f"{worst:.2g}. A copy runs at {report['copy_bytes_per_s'] / 1e9:.0f} GB/s.",
        "",
        "| decode attention | ms | GB/s | share of the copy |",
        "|---|---|---|---|",
        *[
            f"| {e['name']} | {e['milliseconds']:.3f} | {e['rate'] / 1e9:.0f} | {e['share']:.0%} |"
            for e in report["decode"]
        ],
        "",
        "| prefill attention | ms | TFLOP/s | torch's fused | share |",
        "|---|---|---|---|---|",
        *[
            f"| {e['name']} | {e['milliseconds']:.3f} | {e['rate'] / 1e12:.0f} "
            f"| {e['limit'] / 1e12:.0f} | {e['share']:.0%} |"
            for e in report["prefill"]
        ],
        "",
    ]
    if "window_speedup" in report:
        lines += [
            "A window of 128 at 32768 tokens makes decode attention "
            f"{report['window_speedup']:.0f} times as fast.",
            "",
        ]
    return "\n".join(lines + engine_lines(report.get("engine"))) + "\n"


def engine_lines(found: Report | None) -> list[str]:
    """The part of the report about the engine."""
    if found is None:
        return []
    lines = [
        f"Engine, {found['shape']} shape with random weights, "
        f"{found['weights_bytes'] / 1e9:.1f} GB:",
        "",
    ]
    if "decode_step" in found:
        step, first = found["decode_step"], found["first_token"]
        lines += [
            f"- decode step of one sequence {step['ms']:.2f} ms; reading the weights at the copy's "
            f"rate {step['limit_ms']:.2f} ms: {step['share']:.0%}",
            f"- first token {first['ms']:.1f} ms, one forward pass {found['forward_ms']:.1f} ms: "
            f"{first['ratio']:.2f} times",
        ]
    if "many" in found:
        many = found["many"]
        lines.append(
            f"- {many['sequences']} sequences: {many['ratio']:.2f} times generate_batch's rate"
        )
    lines += [
        f"- {n}: {found[n]['error']}" for n in ("nereid", "generate_batch") if "error" in found[n]
    ]
    return lines


if __name__ == "__main__":
    sys.exit(main())
