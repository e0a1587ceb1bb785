# SPDX-License-Identifier: Apache-2.0
"""Everything to be measured on a GPU, in one command that needs no network.

    python loadtest/bench_gpu.py               checks, kernels, engine; under 8 minutes
    python loadtest/bench_gpu.py --tune        first searches cuts of the kernels, and keeps them
    python loadtest/bench_gpu.py --rehearse    all of it on this machine's processor at tiny sizes

First every kernel is compared with its plain twin at real shapes; one that differs or does not run
is named at the top of the report, and the exit code is 1. Then: decode attention against the rate
of a copy, prefill attention against torch's fused attention, and an 8B-shaped model with random
weights: a decode step against the time that reading the weights takes, 256 sequences against
transformers' generate_batch, the first token of a prompt of 4096 against one forward pass; all that
with captured graphs, without, with steps that overlap, and compiled. Whatever fails, the rest is
measured. Writes JSON and Markdown: each target, and whether it was met, comes first; what failed or
what there was no time for, last. A rehearsal tests this program; its figures mean nothing.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import gc
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
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
from nereid_backend.config import EngineConfig
from transformers import Qwen3ForCausalLM
from transformers.utils import logging

# The command's own limit; what is left of it bounds each contestant. The kernels' checks compile
# each of them, and give up what is left of them at their share; the kernels' figures at theirs.
_LIMIT_S, _CHECKS_S, _FIGURES_S = 465, 150, 230
# To draw a model and save it. Where that fails, as on a slow disk, a smaller one is made.
_MODEL_S = 90
# A contestant that cannot end in less is not begun, and none gets more of the time that is left
# than its share: where one hangs, the others are to be measured still.
_LEAST_S, _SHARE = 10, 0.6
# A program that has printed its result gets so long to end.
_ENDING_S = 5
# An 8B model in bfloat16 with its cache and 256 sequences, and its checkpoint on disk.
_BYTES_8B = 40 * 2**30
_DISK_8B = 18 * 2**30
_PROMPT, _CONTEXT, _ANSWER, _SEQUENCES = 4096, 512, 64, 256
# Our engine as it is, then with other settings, the most telling ones first.
_DEFAULT = "as it is"
_VARIANTS: dict[str, dict[str, Any]] = {
    _DEFAULT: {},
    "async_scheduling": {"async_scheduling": True},
    "no graphs": {"cuda_graphs": False},
    "compiled, async_scheduling": {"compile_forward": True, "async_scheduling": True},
    "compiled": {"compile_forward": True},
    "compiled, no graphs": {"compile_forward": True, "cuda_graphs": False},
}
_LONG = ("1 sequence of 131072", "8 of 32768", "64 of 8192")

# Figures of kernels: a name, the kind of layer, (cached, new) tokens, how these are kept.
Case = tuple[str, LayerSpec, list[tuple[int, int]], type[gpu.GpuKVCache]]
_USUAL = LayerSpec(32, 8, 128, 128)
DECODES: list[Case] = [
    ("1 sequence of 131072", _USUAL, [(131071, 1)], gpu.GpuKVCache),
    ("8 of 32768", _USUAL, [(32767, 1)] * 8, gpu.GpuKVCache),
    ("64 of 8192", _USUAL, [(8191, 1)] * 64, gpu.GpuKVCache),
    ("256 of 2048", _USUAL, [(2047, 1)] * 256, gpu.GpuKVCache),
    ("1 of 65536 and 63 of 1024", _USUAL, [(65535, 1), *[(1023, 1)] * 63], gpu.GpuKVCache),
    (
        "keys 192, values 128, 16 heads: 32 of 8192",
        LayerSpec(16, 16, 192, 128),
        [(8191, 1)] * 32,
        gpu.GpuKVCache,
    ),
    ("64 of 8192 as int8", _USUAL, [(8191, 1)] * 64, gpu.GpuInt8KVCache),
    ("64 of 8192 as float8", _USUAL, [(8191, 1)] * 64, gpu.GpuFloat8KVCache),
]
PREFILLS: list[Case] = [
    ("1 prompt of 4096", _USUAL, [(0, 4096)], gpu.GpuKVCache),
    ("1 of 16384", _USUAL, [(0, 16384)], gpu.GpuKVCache),
    ("16 of 512", _USUAL, [(0, 512)] * 16, gpu.GpuKVCache),
    ("2048 behind 14336 cached", _USUAL, [(14336, 2048)], gpu.GpuKVCache),
    ("heads of 64, 1 of 8192", LayerSpec(64, 8, 64, 64), [(0, 8192)], gpu.GpuKVCache),
]
TINY_CASES: list[Case] = [("tiny", LayerSpec(2, 1, 16, 16), [(40, 1), (0, 20)], gpu.GpuKVCache)]
# A layer with a window, which is compared with the same one without.
WINDOW = LayerSpec(64, 8, 64, 64, Span(window=128), None, True), [(32767, 1)] * 32
TINY_WINDOW = LayerSpec(2, 1, 16, 16, Span(window=21), None, True), [(90, 1)]

Report = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What is to be reached.

    Attributes:
        name: what it is about.
        found: what was measured; None: nothing was.
        wanted: the target.
        is_least: whether more is better.
    """

    name: str
    found: float | None
    wanted: float
    is_least: bool = True

    @property
    def ratio(self) -> float | None:
        """1 and above where it is met."""
        if self.found is None or math.isnan(self.found):
            return None
        return self.found / self.wanted if self.is_least else self.wanted / self.found

    @property
    def verdict(self) -> str:
        """For people."""
        if self.ratio is None:
            return "not measured"
        return f"{'met' if self.ratio >= 1 else 'missed'}, {self.ratio:.2f} of it"


def main() -> int:
    """Check, measure, write.

    Returns:
        The exit code: 1 a kernel is wrong or does not run, 2 there is no GPU.
    """
    args = arguments().parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        print("bench-gpu: torch sees no CUDA device here; --rehearse runs it without", flush=True)
        return 2
    started = time.monotonic()
    logging.disable_progress_bar()
    device = torch.device("cpu" if args.rehearse else "cuda:0")
    torch.manual_seed(0)
    if args.save_model is not None:
        print(json.dumps(save_model(Path(args.folder), args, device)), flush=True)
        return 0
    report: Report = {"machine": machine(device)}
    left_out: list[str] = []
    report["left_out"] = left_out
    report["checks"] = checks(device, args, started, left_out)
    if args.tune:
        attempt("the search of cuts", lambda: tune_here(device, args), left_out)
    report |= kernels(device, args, started, left_out)
    if not args.no_engine:
        attempt("giving memory back", lambda: release(device), left_out)
        report["engine"] = engine(device, report["copy_bytes_per_s"], args, started, left_out)
    report["targets"] = [
        {**dataclasses.asdict(target), "ratio": target.ratio} for target in targets(report)
    ]
    report["seconds"] = time.monotonic() - started
    text = markdown(report)
    print(text, flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.out / "gpu.md").write_text(text)
    print(f"written to {args.out}", flush=True)
    return 1 if any("error" in check for check in report["checks"]) else 0


def attempt(name: str, work: Callable[[], Any], left_out: list[str]) -> Any:  # noqa: ANN401
    """What some work gives; None where it fails, for whatever reason.

    Mutates: left_out gets the reason.
    """
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - compilers, drivers and memory fail in any way
        left_out.append(f"{name}: {reason_of(error)}")
        print(f"failed: {left_out[-1]}", flush=True)
        return None


def reason_of(error: Exception) -> str:
    """An error in a line."""
    text = (str(error).strip() or "-").splitlines()[0][:200]
    return (
        text if isinstance(error, KernelError | ModelError) else f"{type(error).__name__}: {text}"
    )


def release(device: torch.device) -> None:
    """Give back the memory that torch keeps for this process: other processes come now."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


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
    # What `make_model` asks a process of its own: the length of the prompt.
    parser.add_argument("--save-model", type=int, help=argparse.SUPPRESS)
    return parser


def machine(device: torch.device) -> Report:
    """Where and with what it ran."""
    facts: Report = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "device": "rehearsal",
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "triton": triton_version(),
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


def triton_version() -> str:
    """Of the Triton language; torch's builds that are no releases name its package otherwise."""
    for name in ("triton", "pytorch-triton"):
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return "none"


def checks(
    device: torch.device, args: argparse.Namespace, started: float, left_out: list[str]
) -> list[Report]:
    """Compare every kernel with its twin, the kinds that serve most models first; see `check`.

    Mutates: left_out gets what there was no time for.
    """
    specs, shapes = (TINY_SPECS, TINY_SHAPES) if args.rehearse else (REAL_SPECS, REAL_SHAPES)
    # The interpreter multiplies bfloat16 as if its bits were integers.
    used = torch.float16 if args.rehearse else torch.bfloat16
    kinds = [
        ("", used, gpu.GpuKVCache),
        ("int8", used, gpu.GpuInt8KVCache),
        ("float8", used, gpu.GpuFloat8KVCache),
        *[("", dtype, gpu.GpuKVCache) for dtype in (torch.float16, torch.float32) if dtype != used],
    ]
    found = []
    for label, dtype, kind in kinds:
        label = label or str(dtype).removeprefix("torch.")
        for name, spec in specs.items():
            if time.monotonic() - started > _CHECKS_S:
                left_out.append(f"the comparison of {name}, {label}, with its twin")
                continue
            about: Report = {"name": name, "dtype": label}
            try:
                difference = check(name, spec, shapes, dtype, device, kind)
            except Exception as error:  # noqa: BLE001 - compilers, drivers and memory, too
                found.append({**about, "error": reason_of(error)})
                print(f"WRONG: {name}, {label}: {reason_of(error)}", flush=True)
            else:
                found.append({**about, "difference": difference})
                print(f"right: {name}, {label}, within {difference:.2g}", flush=True)
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


def kernels(
    device: torch.device, args: argparse.Namespace, started: float, left_out: list[str]
) -> Report:
    """Rates of the kernels, each beside its limit.

    Mutates: left_out gets what failed, and what there was no time for.
    """

    def measured(name: str, work: Callable[[], Measured]) -> list[Measured]:
        if time.monotonic() - started > _FIGURES_S:
            left_out.append(name)
            return []
        found = attempt(name, work, left_out)
        return [] if found is None else [found]

    num_bytes = 2**20 if args.rehearse else 2**31
    limit = attempt("the rate of a copy", lambda: copy_rate(device, num_bytes), left_out)
    limit = math.nan if limit is None else limit
    decodes, prefills = (TINY_CASES, TINY_CASES) if args.rehearse else (DECODES, PREFILLS)
    window, shapes = TINY_WINDOW if args.rehearse else WINDOW
    full, short = (
        measured(
            f"decode attention, {layer.span}",
            functools.partial(decode_rate, "", layer, shapes, device, limit),
        )
        for layer in (dataclasses.replace(window, span=Span()), window)
    )
    report: Report = {
        "copy_bytes_per_s": limit,
        "decode": [
            line(found)
            for name, spec, shapes, kind in decodes
            for found in measured(
                f"decode attention, {name}",
                functools.partial(decode_rate, name, spec, shapes, device, limit, kind),
            )
        ],
        "prefill": [
            line(found)
            for name, spec, shapes, _ in prefills
            for found in measured(
                f"prefill attention, {name}",
                functools.partial(prefill_rate, name, spec, shapes, device),
            )
        ],
    }
    if full and short:
        report["window_speedup"] = full[0].milliseconds / short[0].milliseconds
    return report


def line(measured: Measured) -> Report:
    """As JSON, the share included."""
    return {**dataclasses.asdict(measured), "share": measured.share}


class ModelError(Exception):
    """A model cannot be made here; the message says why."""


def engine(
    device: torch.device,
    bytes_per_s: float,
    args: argparse.Namespace,
    started: float,
    left_out: list[str],
) -> Report | None:
    """Figures of the whole engine on a model with random weights; None where none can be made.

    Mutates: left_out gets what failed, and what there was no time for.
    """
    sizes = (64, 16, 4, 3) if args.rehearse else (_PROMPT, _CONTEXT, _ANSWER, _SEQUENCES)
    prompt, context, answer, sequences = sizes
    with tempfile.TemporaryDirectory(prefix="nereid-bench-gpu-", dir=args.folder) as folder:
        made = None
        for shape in shapes_for(device, folder, args):
            print(f"making a {shape} model", flush=True)
            make = functools.partial(make_model, folder, shape, prompt, args)
            made = attempt(f"a model of the {shape} shape", make, left_out)
            if made is not None:
                break
        if made is None:
            return None
        weights_bytes, forward_ms = made
        workload = {
            "dtype": str(dtype_of(args)).removeprefix("torch."),
            "threads": min(8, os.cpu_count() or 1),
            "vocab_size": SHAPES[shape][-1],
            "prefill": [prompt],
            "decode": [1, sequences],
            "context": context,
            "answer": answer,
            "repeat": 2,
            "warm": True,
            "mixed": None,
        }
        ours: dict[str, Report] = {}
        theirs: Report = {}
        for name, settings in _VARIANTS.items():
            ours[name] = run_contestant("nereid", folder, workload, started, settings)
            if name == _DEFAULT:
                batches = {**workload, "prefill": [], "decode": [sequences]}
                theirs = run_contestant("generate_batch", folder, batches, started)
            # Another variant is about as quick as the last one, compiling left out.
            workload = {**workload, "repeat": 1}
    left_out += [
        f"the engine, {name}: {found['error']}" for name, found in ours.items() if "error" in found
    ]
    if "error" in theirs:
        left_out.append(f"generate_batch: {theirs['error']}")
    return {
        "shape": shape,
        "weights_bytes": weights_bytes,
        "forward_ms": forward_ms,
        "limit_ms": weights_bytes / bytes_per_s * 1e3,
        "prompt": prompt,
        "sequences": sequences,
        "nereid": ours,
        "generate_batch": theirs,
    }


def targets(report: Report) -> list[Target]:
    """What is to be reached, and how far it was."""
    long = [case["share"] for case in report["decode"] if case["name"] in _LONG]
    prefills = [case["share"] for case in report["prefill"]]
    found = report.get("engine") or {}
    ours = found.get("nereid", {}).get(_DEFAULT, {})
    many = str(found.get("sequences", _SEQUENCES))
    theirs = found.get("generate_batch", {}).get("decode", {}).get(many)
    step = first = ratio = None
    if "decode" in ours:
        step = found["limit_ms"] * ours["decode"]["1"] / 1e3
        prompt = found["prompt"]
        first = prompt / ours["prefill"][str(prompt)] * 1e3 / found["forward_ms"]
        ratio = ours["decode"][many] / theirs if theirs else None
    return [
        Target("decode attention, long, share of a copy's rate", min(long, default=None), 0.85),
        Target("prefill attention, share of torch's fused", min(prefills, default=None), 0.7),
        Target("decode step of one sequence, share of reading the weights", step, 0.8),
        Target(f"{many} sequences, times generate_batch", ratio, 3.0),
        Target("first token, times one forward pass", first, 1.5, is_least=False),
    ]


def dtype_of(args: argparse.Namespace) -> torch.dtype:
    """Of the engine's model."""
    return torch.float32 if args.rehearse else torch.bfloat16


def shapes_for(device: torch.device, folder: str, args: argparse.Namespace) -> list[str]:
    """Shapes to try, the largest first for which there is memory, and room on disk."""
    if args.shape or args.rehearse:
        return [args.shape or "demo"]
    memory = torch.cuda.get_device_properties(device).total_memory
    disk = os.statvfs(folder)
    has_room = disk.f_bavail * disk.f_frsize > _DISK_8B
    return ["8b", "0.6b"] if memory > _BYTES_8B and has_room else ["0.6b"]


def make_model(folder: str, shape: str, prompt: int, args: argparse.Namespace) -> tuple[int, float]:
    """Save a Qwen3 with random weights; its bytes, and milliseconds of one pass over a prompt.

    In a process of its own, so that nothing of it stays in memory, and that it does not matter
    whether a kernel has lost the device for this one.

    Raises:
        ModelError: it failed, or took too long.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "--save-model", str(prompt)]
    command += ["--shape", shape, "--folder", folder, *["--rehearse"] * args.rehearse]
    found = outcome(command, _MODEL_S, dict(os.environ))
    if "error" in found:
        raise ModelError(found["error"])
    return found["weights_bytes"], found["forward_ms"]


def save_model(folder: Path, args: argparse.Namespace, device: torch.device) -> Report:
    """What the process does that `make_model` starts."""
    config = config_of(args.shape)
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype_of(args))
    try:
        with device:  # weights are drawn there: on a host this takes minutes
            model = Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    ids = torch.randint(3, config.vocab_size, (1, args.save_model), device=device)
    with torch.inference_mode():
        spent = milliseconds(
            functools.partial(model, input_ids=ids, use_cache=False, logits_to_keep=1),
            device,
            repeat=5,
        )
    model.save_pretrained(folder)
    weights_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"weights_bytes": weights_bytes, "forward_ms": spent}


def run_contestant(
    name: str,
    folder: str,
    workload: Report,
    started: float,
    settings: Report | None = None,
) -> Report:
    """One process of a contestant of `bench.py`, in the time that is left; {"error": ...}."""
    program, python, own = CONTESTANTS[name]
    left = _LIMIT_S - (time.monotonic() - started)
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    if unknown := sorted(set(settings or {}) - known):
        return {"error": f"this engine has no setting {unknown[0]}"}
    if left < _LEAST_S:
        return {"error": f"no time was left of {_LIMIT_S} s"}
    limit = max(_LEAST_S, left * _SHARE)
    print(f"running {name} {settings or ''}, for at most {limit:.0f} s", flush=True)
    command = [str(python), str(HERE / "contestants" / program), folder, json.dumps(workload)]
    environment = {**os.environ, "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    environment["BENCH_ENGINE"] = json.dumps({**own, **(settings or {})})
    environment.pop("TRITON_INTERPRET", None)
    return outcome(command, limit, environment)


def outcome(command: list[str], limit_s: float, environment: dict[str, str]) -> Report:
    """The JSON object that a program prints; {"error": ...} where it prints none in time.

    It counts as soon as it is there: a program may have threads that do not let it end. One that
    does not end is killed, with all that it has started, which could hold its output open.
    """
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            command, stdout=said, stderr=complaints, env=environment, start_new_session=True
        )
        found, code = None, None
        try:
            found = printed(process, said.fileno(), limit_s)
            if found is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_ENDING_S)
            code = process.poll()
        finally:
            # Before it is waited for: until then no other group can have its number.
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if found is not None:
            return found
        last = (text_of(complaints.fileno()).strip().splitlines() or ["-"])[-1][:200]
    if code is None:
        return {"error": f"not done after {limit_s:.0f} s; its last line: {last}"}
    return {"error": f"exit code {code}: {last}"}


def printed(process: "subprocess.Popen[bytes]", said: int, limit_s: float) -> Report | None:
    """Wait until a program has printed its result, has ended, or takes too long."""
    end = time.monotonic() + limit_s
    while True:
        has_ended = process.poll() is not None
        for text in reversed(text_of(said).splitlines(keepends=True)):
            if text.startswith("{") and text.endswith("}\n"):
                found: Report = json.loads(text)
                return found
        if has_ended or time.monotonic() > end:
            return None
        time.sleep(0.1)


def text_of(file: int) -> str:
    """What a program has written, without moving the place where it goes on."""
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")


def markdown(report: Report) -> str:
    """The report for people."""
    facts = report["machine"]
    wrong = [check for check in report["checks"] if "error" in check]
    worst = max((c["difference"] for c in report["checks"] if "error" not in c), default=0.0)
    verdict = f"all equal, within {worst:.2g}"
    if wrong:
        verdict = f"**{len(wrong)} WRONG, whose figures mean nothing**, the others {verdict}"
    lines = [
        f"# {facts['device']}, {facts['date']}",
        "",
        f"`{facts['command']}`; torch {facts['torch']}, triton {facts['triton']}, transformers "
        f"{facts['transformers']}; {report['seconds']:.0f} s.",
        "",
        f"{len(report['checks'])} comparisons of the kernels with their twins: {verdict}. A copy "
        f"runs at {report['copy_bytes_per_s'] / 1e9:.0f} GB/s.",
        "",
        *[f"- WRONG: {check['name']}, {check['dtype']}: {check['error']}" for check in wrong],
        *[""] * bool(wrong),
        "| target | wanted | found | |",
        "|---|---|---|---|",
        *[target_line(target) for target in targets(report)],
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
    lines += engine_lines(report.get("engine"))
    if report["left_out"]:
        lines += ["", "Left out:", "", *[f"- {text}" for text in report["left_out"]]]
    return "\n".join(lines) + "\n"


def target_line(target: Target) -> str:
    """A target's row."""
    sign = "at least" if target.is_least else "at most"
    found = "" if target.found is None else f"{target.found:.2f}"
    return f"| {target.name} | {sign} {target.wanted:g} | {found} | {target.verdict} |"


def engine_lines(found: Report | None) -> list[str]:
    """The part of the report about the engine."""
    if found is None:
        return []
    one, many = "1", str(found["sequences"])
    lines = [
        f"Engine, {found['shape']} shape with random weights, "
        f"{found['weights_bytes'] / 1e9:.1f} GB; reading them at the copy's rate takes "
        f"{found['limit_ms']:.2f} ms, one forward pass over {found['prompt']} tokens "
        f"{found['forward_ms']:.1f} ms. Milliseconds of a step of decodes, by how many sequences: "
        "all of it, what queueing its forward pass takes, and what the host does besides waiting.",
        "",
        f"| settings | load, s | first token, ms | {many}: tokens/s "
        f"| {one}: step | pass | host | {many}: step | pass | host | replays |",
        "|---" * 11 + "|",
    ]
    for name, ours in found["nereid"].items():
        if "error" in ours:
            continue
        first = found["prompt"] / ours["prefill"][str(found["prompt"])] * 1e3
        cells = [f"{ours['load_s']:.0f}", f"{first:.1f}", f"{ours['decode'][many]:.0f}"]
        for batch in (one, many):
            times = ours["steps"].get(batch, {})
            cells += [
                f"{times[key]:.2f}" if times else "" for key in ("step_ms", "forward_ms", "host_ms")
            ]
        lines.append(f"| {name} | " + " | ".join([*cells, str(ours["replays"])]) + " |")
    theirs = found["generate_batch"]
    if "decode" in theirs:
        lines += ["", f"generate_batch: {theirs['decode'][many]:.0f} tokens/s at {many} sequences."]
    return lines


if __name__ == "__main__":
    # So that a program that it has started ends with it, and the model on disk goes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
