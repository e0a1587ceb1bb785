# SPDX-License-Identifier: Apache-2.0
"""Start `nereid serve` with damaged checkpoints and show its errors, for engine_faults.py."""

import tempfile
import time
from pathlib import Path

from loadtest.bench.markdown_table import short, table
from loadtest.faults import broken_checkpoints
from loadtest.server.served import Served

_DEMO = Path(__file__).resolve().parents[2] / "demo"


def load(model: Path, *, is_pooler: bool = False) -> tuple[int, float, str]:
    """Start `nereid serve` with a damaged checkpoint.

    Returns:
        The exit code, the seconds until the end, and the error message. The exit code is 0 if the
        server became ready.
    """
    arguments = ["--log-level=warning"]
    arguments += [f"--embedding-model={model}"] if is_pooler else ["--embedding-model=none"]
    environment = {"NEREID_RERANK_MODEL": "none"}
    served = Served(None if is_pooler else model, environment, arguments)
    started = time.monotonic()
    try:
        with served:
            return 0, time.monotonic() - started, "the server became ready"
    except RuntimeError as error:
        took_s = time.monotonic() - started
        said = [line for line in str(error).splitlines() if line.startswith("nereid serve: ")]
        assert served.process is not None
        return served.process.returncode, took_s, (said or ["nereid serve: -"])[0][14:]


def run_checkpoints(only: str) -> tuple[str, bool]:
    """Return the table of damaged checkpoints, and whether an exit code differed from 2."""
    rows, is_broken = [], False
    kinds = [("chat", name) for name in broken_checkpoints.BREAKS]
    kinds += [("embed", name) for name in list(broken_checkpoints.BREAKS)[::4]]
    for demo, name in kinds:
        title = f"{'embedding model' if demo == 'embed' else 'language model'}: {name}"
        if only not in title:
            continue
        with tempfile.TemporaryDirectory() as folder:
            model = broken_checkpoints.make(_DEMO / demo, Path(folder) / "model", name)
            code, took_s, said = load(model, is_pooler=demo == "embed")
            said = said.replace(str(model), "MODEL")
        rows.append([title, str(code), f"{took_s:.1f} s", short(said)])
        is_broken |= code != 2
        print(" | ".join(rows[-1]), flush=True)
    head = ["Damage", "Exit code", "Time", "Error message"]
    return table(head, rows) if rows else "", is_broken
