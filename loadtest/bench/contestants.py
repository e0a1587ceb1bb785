"""The engines that `bench.py` compares. Each engine runs in a process of its own."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from loadtest.peers.json_programs import Report, outcome
from loadtest.peers.workload import Workload

_ROOT = Path(__file__).parents[2]
_PEERS_PYTHON = _ROOT / ".venv-peers" / "bin" / "python"
OPENVINO_PYTHON = _ROOT / ".venv-openvino" / "bin" / "python"
_TIMEOUT_S = 1800


class Contestant(NamedTuple):
    """An engine with certain settings. The Python interpreter `python` runs the module."""

    module: str  # the name of a module in loadtest/peers
    settings: dict[str, Any]
    python: Path = Path(sys.executable)


def _nereid(**settings: object) -> Contestant:
    """Return Nereid's engine with the given fields of `EngineConfig`."""
    return Contestant("nereid", settings)


CONTESTANTS = {
    "nereid": _nereid(),
    "nereid compiled": _nereid(compile_forward=True),
    "generate": Contestant("transformers_generate", {}),
    "generate_batch": Contestant("transformers_batching", {}),
    "llama.cpp": Contestant("llama", {}, _PEERS_PYTHON),
    "int8 weights": _nereid(weight_dtype="int8"),
    "int8 cache": _nereid(kv_cache_dtype="int8"),
    "int8": _nereid(weight_dtype="int8", kv_cache_dtype="int8"),
    "int4 weights": _nereid(weight_dtype="int4"),
    "int8 compiled": _nereid(weight_dtype="int8", compile_forward=True),
    "int4 compiled": _nereid(weight_dtype="int4", compile_forward=True),
    **{
        f"llama.cpp {kind}": Contestant("llama", {"gguf_type": kind}, _PEERS_PYTHON)
        for kind in ("Q4_0", "Q4_K_M", "Q8_0")
    },
    **{
        f"OpenVINO {kind}": Contestant("openvino_model", {"weight_format": kind}, OPENVINO_PYTHON)
        for kind in ("int4", "int8", "fp16")
    },
}


def is_nereid(name: str) -> bool:
    """Return whether the contestant with this name is Nereid's engine."""
    return CONTESTANTS[name].module == "nereid"


def run_contestant(
    name: str,
    path: Path | str,
    workload: Workload,
    limit_s: float = _TIMEOUT_S,
    settings: Report | None = None,
) -> Report:
    """Run one engine in a process of its own, and return its measurements.

    Args:
        name: the name of the engine, a key of CONTESTANTS.
        path: the folder of the checkpoint.
        workload: the work that is measured.
        limit_s: the time limit in seconds. If the process exceeds the limit, the process is killed.
        settings: further settings of the engine. They override the settings in CONTESTANTS.

    Returns:
        The measurements, or {"error": ...} if the engine failed or exceeded the time limit.
    """
    contestant = CONTESTANTS[name]
    if not contestant.python.exists():
        return {"error": f"{name} is not installed. Run `make bench-peers` to install it."}
    program = [str(contestant.python), "-m", f"loadtest.peers.{contestant.module}"]
    all_settings = {**contestant.settings, **(settings or {})}
    return outcome(
        [*program, str(path), json.dumps(asdict(workload)), json.dumps(all_settings)],
        limit_s,
        _environment(workload.threads),
    )


def _environment(num_threads: int) -> dict[str, str]:
    """Return the environment variables of an engine's process."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(num_threads),
        "TQDM_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])),
    }
    environment.pop("TRITON_INTERPRET", None)  # interpreted kernels would be far too slow
    # nereid_backend has set this variable in this process. Each engine should use its own default.
    environment.pop("GOMP_SPINCOUNT", None)
    return environment
