"""Measure Nereid's engine and transformers on a GPU, with random weights, for bench_gpu.py."""

import argparse
import dataclasses
import functools
import os
import sys
import tempfile
import time
from typing import Any

import torch
from nereid_backend.config import EngineConfig

from loadtest.bench.bench import SHAPES, run_contestant
from loadtest.bench.json_programs import Report, outcome
from loadtest.gpu.gpu_report import DEFAULT, BenchError, attempt

# Seconds to create and save a model. If that fails, for example on a slow disk, a smaller model is
# tried.
_MODEL_S = 90
# An engine is started only if this many seconds remain. Each engine gets only a share of the
# remaining time, so that the others can still be measured if it hangs.
_LEAST_S, _SHARE = 10, 0.6
# The memory of an 8B model in bfloat16 with the cache of 256 sequences, and its size on disk.
_BYTES_8B = 40 * 2**30
_DISK_8B = 18 * 2**30
# The tokens of the prompt for the time to first token; then the context, the answer and the number
# of sequences for decode.
_SIZES = (4096, 512, 64, 256)
_TINY_SIZES = (64, 16, 4, 3)
# Nereid's engine with its default settings and with other settings, the most important ones first.
_VARIANTS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "async_scheduling": {"async_scheduling": True},
    "no graphs": {"cuda_graphs": False},
    "compiled, async_scheduling": {"compile_forward": True, "async_scheduling": True},
    "compiled": {"compile_forward": True},
    "compiled, no graphs": {"compile_forward": True, "cuda_graphs": False},
}


def engine(
    device: torch.device,
    bytes_per_s: float,
    args: argparse.Namespace,
    end: float,
    left_out: list[str],
) -> Report | None:
    """Measure the whole engine; return None if no model could be created.

    Args:
        device: the GPU, whose memory determines the shape of the model.
        bytes_per_s: the rate of copying memory, which limits how fast weights can be read.
        args: `shape`, `folder` and `rehearse` of the command line.
        end: the time at which everything must be done, from `time.monotonic`.
        left_out: receives measurements that failed or did not fit into the time limit.
    """
    prompt, context, answer, sequences = _TINY_SIZES if args.rehearse else _SIZES
    with tempfile.TemporaryDirectory(prefix="nereid-bench-gpu-", dir=args.folder) as folder:
        made = None
        for shape in shapes_for(device, folder, args):
            print(f"creating a model of the {shape} shape", flush=True)
            make = functools.partial(make_model, folder, shape, prompt, args)
            made = attempt(f"a model of the {shape} shape", make, left_out)
            if made is not None:
                break
        if made is None:
            return None
        workload = {
            "dtype": dtype_of(args),
            "threads": min(8, os.cpu_count() or 1),
            "vocab_size": SHAPES[shape][-1],
            "prefill": [prompt],
            "decode": [1, sequences],
            "context": context,
            "answer": answer,
            "repeat": 2,
            "warm": True,
        }
        ours: dict[str, Report] = {}
        theirs: Report = {}
        for name, settings in _VARIANTS.items():
            ours[name] = run("nereid", folder, workload, end, settings)
            if name == DEFAULT:
                batches = {**workload, "prefill": [], "decode": [sequences]}
                theirs = run("generate_batch", folder, batches, end, {})
            # One measurement of each further variant is enough, because they are about as fast.
            workload = {**workload, "repeat": 1}
    left_out += [
        f"the engine, {name}: {found['error']}" for name, found in ours.items() if "error" in found
    ]
    if "error" in theirs:
        left_out.append(f"generate_batch: {theirs['error']}")
    return {
        "shape": shape,
        "weights_bytes": made["weights_bytes"],
        "forward_ms": made["forward_ms"],
        "limit_ms": made["weights_bytes"] / bytes_per_s * 1e3,
        "prompt": prompt,
        "sequences": sequences,
        "nereid": ours,
        "generate_batch": theirs,
    }


def dtype_of(args: argparse.Namespace) -> str:
    """Return the dtype of the model."""
    return "float32" if args.rehearse else "bfloat16"


def shapes_for(device: torch.device, folder: str, args: argparse.Namespace) -> list[str]:
    """Return the shapes to try, beginning with the largest for which memory and disk suffice."""
    if args.shape or args.rehearse:
        return [args.shape or "demo"]
    memory = torch.cuda.get_device_properties(device).total_memory
    disk = os.statvfs(folder)
    has_room = disk.f_bavail * disk.f_frsize > _DISK_8B
    return ["8b", "0.6b"] if memory > _BYTES_8B and has_room else ["0.6b"]


def make_model(folder: str, shape: str, prompt: int, args: argparse.Namespace) -> Report:
    """Save a model with random weights, and return the output of random_model.py.

    Raises:
        BenchError: random_model.py failed or took too long.
    """
    command = [sys.executable, "-m", "loadtest.gpu.random_model", folder, "--shape", shape]
    command += ["--prompt", str(prompt), "--dtype", dtype_of(args)]
    command += ["--device", "cpu"] if args.rehearse else []
    found = outcome(command, _MODEL_S, dict(os.environ))
    if "error" in found:
        raise BenchError(found["error"])
    return found


def run(name: str, folder: str, workload: Report, end: float, settings: Report) -> Report:
    """Run one engine of bench.py in a process, with a share of the remaining time as its limit."""
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    if unknown := sorted(set(settings) - known):
        return {"error": f"this engine has no setting {unknown[0]}"}
    left = end - time.monotonic()
    if left < _LEAST_S:
        return {"error": "no time was left"}
    limit_s = max(_LEAST_S, left * _SHARE)
    print(f"running {name} {settings or ''}, for at most {limit_s:.0f} s", flush=True)
    return run_contestant(name, folder, workload, limit_s, settings)
