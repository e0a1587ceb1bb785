# SPDX-License-Identifier: Apache-2.0
"""The whole engine on a GPU, for bench_gpu.py: ours and others on a model with random weights."""

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

# To draw a model and save it. Where that fails, as on a slow disk, a smaller one is made.
_MODEL_S = 90
# A contestant that cannot end in less is not begun, and none gets more of the time that is left
# than its share: where one hangs, the others are to be measured still.
_LEAST_S, _SHARE = 10, 0.6
# An 8B model in bfloat16 with its cache and 256 sequences, and its checkpoint on disk.
_BYTES_8B = 40 * 2**30
_DISK_8B = 18 * 2**30
# Of the prompt whose first token is timed; of decodes: context, answer, sequences.
_SIZES = (4096, 512, 64, 256)
_TINY_SIZES = (64, 16, 4, 3)
# Our engine as it is, then with other settings, the most telling ones first.
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
    """Figures of the whole engine; None where no model can be made.

    Args:
        device: for which the shape is chosen.
        bytes_per_s: the rate of a copy, at which weights could be read.
        args: `shape`, `folder` and `rehearse` of the command line.
        end: when all is to be done, by `time.monotonic`.
        left_out: gets what failed, and what there was no time for.
    """
    prompt, context, answer, sequences = _TINY_SIZES if args.rehearse else _SIZES
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
            "mixed": None,
        }
        ours: dict[str, Report] = {}
        theirs: Report = {}
        for name, settings in _VARIANTS.items():
            ours[name] = run("nereid", folder, workload, end, settings)
            if name == DEFAULT:
                batches = {**workload, "prefill": [], "decode": [sequences]}
                theirs = run("generate_batch", folder, batches, end, {})
            # Another variant is about as quick as the last one, compiling left out.
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
    """Of the model."""
    return "float32" if args.rehearse else "bfloat16"


def shapes_for(device: torch.device, folder: str, args: argparse.Namespace) -> list[str]:
    """Shapes to try, the largest first for which there is memory, and room on disk."""
    if args.shape or args.rehearse:
        return [args.shape or "demo"]
    memory = torch.cuda.get_device_properties(device).total_memory
    disk = os.statvfs(folder)
    has_room = disk.f_bavail * disk.f_frsize > _DISK_8B
    return ["8b", "0.6b"] if memory > _BYTES_8B and has_room else ["0.6b"]


def make_model(folder: str, shape: str, prompt: int, args: argparse.Namespace) -> Report:
    """Save a model with random weights; what random_model.py prints about it.

    Raises:
        BenchError: it failed, or took too long.
    """
    command = [sys.executable, "-m", "loadtest.gpu.random_model", folder, "--shape", shape]
    command += ["--prompt", str(prompt), "--dtype", dtype_of(args)]
    command += ["--device", "cpu"] if args.rehearse else []
    found = outcome(command, _MODEL_S, dict(os.environ))
    if "error" in found:
        raise BenchError(found["error"])
    return found


def run(name: str, folder: str, workload: Report, end: float, settings: Report) -> Report:
    """One process of a contestant of bench.py in its share of the time that is left."""
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    if unknown := sorted(set(settings) - known):
        return {"error": f"this engine has no setting {unknown[0]}"}
    left = end - time.monotonic()
    if left < _LEAST_S:
        return {"error": "no time was left"}
    limit_s = max(_LEAST_S, left * _SHARE)
    print(f"running {name} {settings or ''}, for at most {limit_s:.0f} s", flush=True)
    return run_contestant(name, folder, workload, limit_s, settings)
