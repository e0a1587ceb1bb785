# SPDX-License-Identifier: Apache-2.0
"""Faults inside the engine and around it that are no kill: what clients see, and for how long.

    python -m loadtest.faults.engine_faults [--only WORD] [--markdown PATH]

Three tables: forward passes that fail or hang in a serving process, checkpoints that are broken,
and disks that are full. The faults reach the real processes from outside: see faulty_python, and
broken_checkpoints.py; full disks are small tmpfs in a mount namespace of this program's own, for
which it must be root (without that, the third table is left out).
"""

import argparse
import asyncio
import collections
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from loadtest.bench.markdown_table import short, table
from loadtest.faults.checkpoint_faults import run_checkpoints
from loadtest.faults.full_disks import run_disks
from loadtest.server import processes
from loadtest.server.served import Served

HANG_TIMEOUT_S = 3
_HERE = Path(__file__).resolve().parent
_DEMO = _HERE.parents[1] / "demo"
_FAULTY = str(_HERE / "faulty_python")
_CLIENT_TIMEOUT_S = 60.0
_RECOVERY_LIMIT_S = 90.0
_BEFORE_S = 0.7
_LATE_S = 5.0
_MOUNTED = "--in-own-mounts"
_SHM_MIB = 256

Json = dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        kind: for the report.
        path: of the OpenAI API, or of the Triton server's HTTP door.
        body: JSON.
        is_direct: whether it goes to the Triton server's door.
    """

    kind: str
    path: str
    body: Json
    is_direct: bool = False


@dataclass
class Outcome:
    """What became of it: `problem` is empty for an answer in full; `ended` by time.monotonic."""

    ask: Ask
    problem: str = ""
    message: str = ""
    ended: float = 0.0


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong in a server that works.

    Attributes:
        name: for the report.
        role: whose forward pass it hits: "engine" or "worker".
        order: what faulty_python is told.
        victim: a request that is sent with it; the others then run already.
        happen, undo: does it in place of an order, and mends it behind the measurement.
        limit_s: the last error comes within so long.
    """

    name: str
    role: str
    order: str = ""
    victim: Ask | None = None
    happen: "Callable[[Served], Awaitable[None]] | None" = None
    undo: Callable[[Served], None] | None = None
    limit_s: float = _LATE_S


@dataclass
class Row:
    """What one fault did; times in seconds after it. `was_obeyed`: it happened at all."""

    fault: Fault
    outcomes: list[Outcome]
    happened: float
    recovery_s: float | None
    replaced: list[str] = field(default_factory=list)
    was_obeyed: bool = True

    @property
    def hurt(self) -> list[Outcome]:
        """Requests that were not answered in full."""
        return [outcome for outcome in self.outcomes if outcome.problem]

    def cells(self) -> list[str]:
        """As a line of the table."""
        seen = collections.Counter(f"{o.ask.kind}: {o.problem}" for o in self.hurt)
        told = "; ".join(f"{n} x {what}" for what, n in seen.most_common())
        well = len(self.outcomes) - len(self.hurt)
        told = "; ".join(filter(None, (told, f"{well} answered in full" if well else "")))
        ends = [outcome.ended - self.happened for outcome in self.hurt]
        times = (min(ends, default=None), max(ends, default=None), self.recovery_s)
        messages = collections.Counter(short(outcome.message) for outcome in self.hurt)
        said = messages.most_common(1)[0][0] if messages else "-"
        lost = "those requests" if self.hurt else "nothing"
        if self.replaced:
            lost += f"; {' and '.join(self.replaced)} started again"
        shown = ["-" if t is None else f"{t:.1f} s" for t in times]
        return [self.fault.name, told, said, *shown, lost]

    @property
    def is_broken(self) -> bool:
        """Whether it did what no fault may do."""
        late = any(o.ended - self.happened > self.fault.limit_s for o in self.hurt)
        hung = any(outcome.problem == "hung" for outcome in self.outcomes)
        return late or hung or self.recovery_s is None or not self.was_obeyed


HEAD = ["Fault", "Clients saw", "The error", "First", "Last error", "Service again", "Lost"]


def _chat(kind: str, question: str, **fields: Any) -> Ask:  # noqa: ANN401 - JSON
    messages = [{"role": "user", "content": question}]
    body = {"model": "chat", "messages": messages, "temperature": 0}
    return Ask(kind, "/v1/chat/completions", body | fields)


def _schema() -> Json:
    items = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "array", "items": items, "minItems": 300, "maxItems": 300}
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}


def generating() -> list[Ask]:
    """Requests to the language model that run for a few seconds on the demo, and what is beside."""
    long = {"max_tokens": 700, "ignore_eos": True}
    fields = json.dumps({"temperature": 0, **long})
    direct = {"text_input": "Once", "stream": True, "sampling_parameters": fields}
    return [
        *(_chat("stream", f"What is {n} + 4?", stream=True, **long) for n in range(3)),
        _chat("whole answer", "Hello!", **long),
        _chat("structured stream", "Numbers!", stream=True, response_format=_schema()),
        Ask("generate_stream", "/v2/models/llm/generate_stream", direct, is_direct=True),
        Ask("embedding", "/v1/embeddings", {"model": "embed", "input": ["Hugo", "Pinemark"]}),
    ]


def embedding() -> list[Ask]:
    """Requests to the embedding model that run for a few seconds, and a stream beside."""
    words = "Hugo lives in Pinemark and has a turtle, which is older than he is. " * 6
    long = {"model": "embed", "input": [f"{n} {words}" for n in range(1200)]}
    return [
        *(Ask("embedding", "/v1/embeddings", long) for _ in range(3)),
        _chat("stream", "Hello!", stream=True, max_tokens=300, ignore_eos=True),
    ]


def _last_id(name: str) -> int:
    """A token that nothing else has in it: the last one of the vocabulary."""
    return int(json.loads((_DEMO / name / "config.json").read_text())["vocab_size"]) - 1


async def _no_memory(served: Served) -> None:
    """Let the kernel refuse the engine every further page of address space."""
    engine = processes.roles(served)["engine"]
    size = engine.memory_info().vms
    engine.rlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))


def _memory_again(served: Served) -> None:
    no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    processes.roles(served)["engine"].rlimit(resource.RLIMIT_AS, no_limit)


def faults() -> list[Fault]:
    """Everything that can go wrong in a forward pass."""
    last, last_embed = _last_id("chat"), _last_id("embed")
    odd = {"model": "chat", "prompt": [last, last, last], "max_tokens": 5}
    odd_ids = {"model": "embed", "input": [[last_embed, last_embed]]}
    long = _chat("long prompt", "Hello! " * 400, max_tokens=4)
    hang_s = HANG_TIMEOUT_S + _LATE_S
    nan = Ask("completion with it", "/v1/completions", odd)
    nan_embedding = Ask("embedding with it", "/v1/embeddings", odd_ids)
    return [
        Fault("engine: out of memory in one step", "engine", "oom 1"),
        Fault("engine: out of memory in 3 steps in a row", "engine", "oom 3"),
        Fault("engine: no page of memory left", "engine", victim=long, happen=_no_memory,
              undo=_memory_again),
        Fault("engine: a CUDA error", "engine", "cuda 1"),
        Fault("engine: a NaN in one request's logits", "engine", f"nan {last}", nan),
        Fault("engine: an exception in a grammar's mask", "engine", "mask 1"),
        Fault("engine: an exception in a grammar's step", "engine", "grammar 1"),
        Fault(f"engine: hangs (limit {HANG_TIMEOUT_S} s)", "engine", "hang 1", limit_s=hang_s),
        Fault("pooling worker: out of memory once", "worker", "oom 1"),
        Fault("pooling worker: a CUDA error", "worker", "cuda 1"),
        Fault("pooling worker: a NaN in one vector", "worker", f"nan {last_embed}", nan_embedding),
        Fault(f"pooling worker: hangs (limit {HANG_TIMEOUT_S} s)", "worker", "hang 1",
              limit_s=hang_s),
    ]  # fmt: skip


class Stage:
    """A server whose forward passes can be made to fail."""

    def __init__(self, served: Served, orders: Path) -> None:
        self._served = served
        self._orders = orders
        # A connection that was kept may be closed by the time it is used again.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=_CLIENT_TIMEOUT_S, limits=limits, trust_env=False)

    async def measure(self, fault: Fault) -> Row:
        """Let one fault happen to requests that run."""
        asks = generating() if fault.role == "engine" else embedding()
        before = self._pids()
        tasks = [asyncio.create_task(self._ask(ask)) for ask in asks]
        await asyncio.sleep(_BEFORE_S)
        happened = time.monotonic()
        if fault.order:
            self._order(fault)
        if fault.happen is not None:
            await fault.happen(self._served)
        if fault.victim is not None:
            tasks.append(asyncio.create_task(self._ask(fault.victim)))
        # Whoever comes from now on is asked as often as it takes.
        recovery = asyncio.create_task(self._recovered(fault, happened))
        outcomes = list(await asyncio.gather(*tasks))
        recovery_s = await recovery
        was_obeyed = True
        with contextlib.suppress(FileNotFoundError):
            (self._orders / fault.role).unlink()
            was_obeyed = fault.order.startswith("nan")
        if fault.undo is not None:
            fault.undo(self._served)
        after = self._pids()
        replaced = [role for role in before if after.get(role) != before[role]]
        return Row(fault, outcomes, happened, recovery_s, replaced, was_obeyed)

    async def close(self) -> None:
        """Give up the connections."""
        await self._client.aclose()

    def _order(self, fault: Fault) -> None:
        draft = self._orders / "draft"
        draft.write_text(fault.order)
        draft.rename(self._orders / fault.role)

    def _pids(self) -> dict[str, int]:
        return {role: process.pid for role, process in processes.roles(self._served).items()}

    async def _recovered(self, fault: Fault, since: float) -> float | None:
        """Seconds until an answer behind which nothing failed any more."""
        probe = {"engine": _chat("probe", "Hello!", max_tokens=2)}.get(
            fault.role, Ask("probe", "/v1/embeddings", {"model": "embed", "input": ["x"]})
        )
        again: float | None = None
        while (passed_s := time.monotonic() - since) < _RECOVERY_LIMIT_S:
            outcome = await self._ask(probe)
            if outcome.problem:
                again = None
            else:
                again = again or outcome.ended - since
                if passed_s > fault.limit_s:
                    return again
            await asyncio.sleep(0.1)
        return None

    async def _ask(self, ask: Ask) -> Outcome:
        outcome = Outcome(ask)
        url = f"http://127.0.0.1:{self._served.openai_port}" + ask.path
        if ask.is_direct:
            url = self._served.http_url + ask.path
        try:
            async with (
                asyncio.timeout(_CLIENT_TIMEOUT_S),
                self._client.stream("POST", url, json=ask.body) as answer,
            ):
                await answer.aread()
                _judge(outcome, answer)
        except TimeoutError:
            outcome.problem = "hung"
        except httpx.HTTPError as error:
            outcome.problem, outcome.message = "connection lost", repr(error)
        outcome.ended = time.monotonic()
        return outcome


def _judge(outcome: Outcome, answer: httpx.Response) -> None:
    if answer.status_code != 200:
        outcome.problem = str(answer.status_code)
        with contextlib.suppress(ValueError, KeyError, TypeError):
            outcome.message = answer.json()["error"]["message"]
    elif outcome.ask.body.get("stream"):
        events = [
            json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
        ]
        if "error" in events[-1]:
            error = events[-1]["error"]
            outcome.problem = "an error as last event"
            outcome.message = error["message"] if isinstance(error, dict) else str(error)


@contextlib.contextmanager
def stage() -> Iterator[tuple[Served, Path]]:
    """A server of the demo models, and the folder for orders to it."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, (_FAULTY, os.environ.get("PYTHONPATH")))),
            "FAULT_FOLDER": folder,
            "NEREID_ENGINE_HANG_TIMEOUT_S": str(HANG_TIMEOUT_S),
            "NEREID_EMBEDDING_HANG_TIMEOUT_S": str(HANG_TIMEOUT_S),
            "NEREID_RERANK_MODEL": "none",
        }
        flags = ["--served-model-name=chat", "--max-restarts=100", "--log-level=warning"]
        with Served(environment=environment, arguments=flags) as served:
            yield served, Path(folder)


async def _measure(served: Served, orders: Path, chosen: Sequence[Fault]) -> list[Row]:
    on_stage = Stage(served, orders)
    rows = []
    try:
        for fault in chosen:
            rows.append(await on_stage.measure(fault))
            print(" | ".join(rows[-1].cells()), flush=True)
    finally:
        await on_stage.close()
    return rows


def run_faults(only: str) -> tuple[str, bool]:
    """The first table, and whether anything was broken."""
    chosen = [fault for fault in faults() if only in fault.name]
    if not chosen:
        return "", False
    with stage() as (served, orders):
        rows = asyncio.run(_measure(served, orders, chosen))
    return table(HEAD, [row.cells() for row in rows]), any(row.is_broken for row in rows)


def _in_own_mounts() -> bool:
    """Whether this program has mounts of its own; else it becomes one that has, if it may."""
    if _MOUNTED in sys.argv:
        return True
    command = ["unshare", "--mount", "--propagation", "private"]
    try:
        if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            os.execvp(command[0], [*command, sys.executable, *sys.argv, _MOUNTED])
    except OSError:
        pass
    return False


def main() -> int:
    """Measure; 1 when something hung, did not come back, or was not refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD", help="faults whose name has this")
    parser.add_argument("--markdown", type=Path, help="write the tables here too")
    parser.add_argument(_MOUNTED, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    runs = [run_faults, run_checkpoints]
    if _in_own_mounts():
        runs.append(run_disks)
    else:
        print("no mounts of our own: full disks are left out")
    found = [run(args.only) for run in runs]
    text = "\n\n".join(text for text, _ in found if text)
    print(f"\n{text}")
    if args.markdown:
        args.markdown.write_text(text + "\n")
    return int(any(is_broken for _, is_broken in found))


if __name__ == "__main__":
    sys.exit(main())
