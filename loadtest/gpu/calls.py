"""The GPU benchmarks. They are divided into four calls, and each call consists of several parts.

A call is one command for a machine with a GPU that is available only for a few minutes. The call
ends within these minutes. Each part is a separate program with a time limit. If a kernel fails or
hangs, only the part with this kernel ends.
"""

import json
from dataclasses import dataclass, field

# The number of processes that compare kernels at the same time. Compiling takes most of their time.
_NUM_COMPARING = 8
_PYTEST = ("pytest", "-q", "-W", "default", "-p", "no:cacheprovider")
_ASYNC = {"async_scheduling": True}
_KERNELS, _ENGINE = "loadtest.gpu.kernel_parts", "loadtest.gpu.engine_part"


@dataclass(frozen=True, slots=True)
class Part:
    """One program of a call.

    Attributes:
        name: the name in the report.
        arguments: the module and its arguments.
        limit_s: seconds after which the program is killed.
        needs_engine: whether the program needs the packages of the engine.
        group: the name of a group. Successive parts with the same group run at the same time.
        prefix: a program that runs Python, such as a profiler. If this program is not on the PATH,
            the part is left out.
        packages: packages that only this part needs. If a package is missing, the part is left out.
    """

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    needs_engine: bool = False
    group: str = ""
    prefix: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """Some parts that run in one command.

    Attributes:
        help: one sentence about the call.
        limit_s: the time limit of the whole call in seconds. A part that does not fit into the
            remaining time is left out.
        parts: the parts, the most important ones first.
    """

    help: str
    limit_s: float
    parts: list[Part] = field(default_factory=list)


def engine_part(name: str, shape: str, limit_s: float, *flags: str, **settings: str | bool) -> Part:
    """Return a part that measures the engine with `settings` and a model with random weights."""
    arguments = (_ENGINE, "--shape", shape, "--settings", json.dumps(settings), *flags)
    return Part(name, arguments, limit_s, needs_engine=True)


def calls() -> dict[str, Call]:
    """Return all calls by name, in the order in which they should be made."""
    compared = "kernels compared with their references"
    comparisons = [
        Part(
            f"{compared}, {number + 1} of {_NUM_COMPARING}",
            (_KERNELS, "compare", "--share", str(number), str(_NUM_COMPARING)),
            limit_s=150,
            group="compare",
        )
        for number in range(_NUM_COMPARING)
    ]
    tests = Part(
        "tests",
        (
            "pytest",
            "-q",
            "-m",
            "gpu",
            "-W",
            "default",
            "-p",
            "no:cacheprovider",
            "tests/backend/gpu",
        ),
        limit_s=150,
        needs_engine=True,
        group="compare",
        packages=("pytest", "pytest-timeout", "hypothesis"),
    )
    sanitizer = ("compute-sanitizer", "--error-exitcode", "9")
    ncu = ("ncu", "--clock-control", "none", "--set", "basic", "-k", "regex:decode|prefill")
    compiled = {**_ASYNC, "compile_forward": True}
    return {
        "checks": Call(
            "Compare all kernels with their references, and run a small model.",
            325,
            [
                Part("machine", ("loadtest.gpu.machine",), 30),
                *comparisons,
                tests,
                engine_part("0.6B", "0.6b", 60),
                engine_part("0.6B, async", "0.6b", 60, **_ASYNC),
                Part("sanitizer", (_KERNELS, "compare", "--tiny"), 60, prefix=sanitizer),
            ],
        ),
        "model": Call(
            "Measure an 8B model with random weights, and show where the time of its steps goes.",
            440,
            [
                engine_part("8B", "8b", 110, "--profile"),
                engine_part("8B, async", "8b", 90, "--profile", **_ASYNC),
                engine_part("8B, async, fused norms", "8b", 90, "--fused-norms", **_ASYNC),
                engine_part("8B, async, fp8 cache", "8b", 90, **_ASYNC, kv_cache_dtype="fp8"),
                engine_part("8B, async, fp8 weights", "8b", 90, **_ASYNC, weight_dtype="fp8"),
                engine_part(
                    "8B, async, attention libraries", "8b", 90, **_ASYNC, measure_attention=True
                ),
                engine_part("8B without graphs", "8b", 90, cuda_graphs=False),
            ],
        ),
        "compiled": Call(
            "Measure the compiled forward pass, requests that arrive at random, and transformers.",
            440,
            [
                engine_part("0.6B, compiled, async", "0.6b", 150, **compiled),
                engine_part("8B, compiled, async", "8b", 220, "--profile", **compiled),
                engine_part("8B, async, arrivals", "8b", 100, "--arrivals", **_ASYNC),
                engine_part("8B, generate_batch", "8b", 100, "--generate-batch"),
            ],
        ),
        "attention": Call(
            "Measure attention alone by graph replay, and search the best tile sizes.",
            330,
            [
                Part("attention", (_KERNELS, "rates"), 90),
                Part("stages, heads of 128", (_KERNELS, "tune", "--dims", "128"), 100),
                Part("stages, heads of 256", (_KERNELS, "tune", "--dims", "256"), 80),
                Part("counters", (_KERNELS, "compare", "--tiny"), 50, prefix=ncu),
            ],
        ),
    }
