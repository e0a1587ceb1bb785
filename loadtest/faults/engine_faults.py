# SPDX-License-Identifier: Apache-2.0
"""Inject failures into the engine and its surroundings, and measure what the clients see.

    python -m loadtest.faults.engine_faults [--only WORD] [--markdown PATH]

The program prints three tables: forward passes that fail or hang in a serving process, damaged
checkpoints, and full disks. The folder faulty_python makes forward passes of the real processes
fail, and the module broken_checkpoints damages checkpoints. Full disks are small tmpfs file systems
in a mount namespace of this program. Mounting requires root; without root, the third table is left
out.
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
        kind: the name in the report.
        path: the path of the URL.
        body: the JSON body.
        is_direct: whether the request goes to the HTTP endpoint of the Triton server instead of the
            OpenAI API.
    """

    kind: str
    path: str
    body: Json
    is_direct: bool = False


@dataclass
class Outcome:
    """The outcome of a request.

    Attributes:
        ask: the request.
        problem: what went wrong; empty for a complete answer.
        message: the error message.
        ended: the time of the end, from time.monotonic.
    """

    ask: Ask
    problem: str = ""
    message: str = ""
    ended: float = 0.0


@dataclass(frozen=True)
class Fault:
    """A failure of a running server.

    Attributes:
        name: the name in the report.
        role: the process whose forward pass fails: "engine" or "worker".
        order: the order for faulty_python.
        victim: a further request that is sent together with the fault, while the others run.
        happen: a function that causes the failure, for failures without an order.
        undo: a function that removes the cause of the failure after the measurement.
        limit_s: the time within which the last request must fail, in seconds.
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
    """The results of one fault.

    Attributes:
        fault: the fault.
        outcomes: the outcomes of the requests.
        happened: the time of the fault, from time.monotonic.
        recovery_s: the seconds until the service had recovered, or None if it did not.
        replaced: the roles of the processes that were restarted.
        was_obeyed: whether the fault happened at all.
    """

    fault: Fault
    outcomes: list[Outcome]
    happened: float
    recovery_s: float | None
    replaced: list[str] = field(default_factory=list)
    was_obeyed: bool = True

    @property
    def hurt(self) -> list[Outcome]:
        """The outcomes of the requests that were not answered completely."""
        return [outcome for outcome in self.outcomes if outcome.problem]

    def cells(self) -> list[str]:
        """Return the cells of the row in the table."""
        seen = collections.Counter(f"{o.ask.kind}: {o.problem}" for o in self.hurt)
        effects = [f"{n} x {what}" for what, n in seen.most_common()]
        if num_complete := len(self.outcomes) - len(self.hurt):
            effects.append(f"{num_complete} complete answers")
        ends = [outcome.ended - self.happened for outcome in self.hurt]
        times = (min(ends, default=None), max(ends, default=None), self.recovery_s)
        messages = collections.Counter(short(outcome.message) for outcome in self.hurt)
        said = messages.most_common(1)[0][0] if messages else "-"
        lost = "the failed requests" if self.hurt else "nothing"
        if self.replaced:
            lost += f"; {' and '.join(self.replaced)} restarted"
        shown = ["-" if t is None else f"{t:.1f} s" for t in times]
        return [self.fault.name, "; ".join(effects), said, *shown, lost]

    @property
    def is_broken(self) -> bool:
        """Whether the effects of the fault violate a limit."""
        late = any(o.ended - self.happened > self.fault.limit_s for o in self.hurt)
        hung = any(outcome.problem == "hung" for outcome in self.outcomes)
        return late or hung or self.recovery_s is None or not self.was_obeyed


HEAD = ["Fault", "What the clients saw", "Error message", "First error", "Last error", "Recovery",
        "What was lost"]  # fmt: skip


def _chat(kind: str, question: str, **fields: Any) -> Ask:  # noqa: ANN401 - JSON
    messages = [{"role": "user", "content": question}]
    body = {"model": "chat", "messages": messages, "temperature": 0}
    return Ask(kind, "/v1/chat/completions", body | fields)


def _schema() -> Json:
    items = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "array", "items": items, "minItems": 300, "maxItems": 300}
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}


def generating() -> list[Ask]:
    """Return requests that run for some seconds on the demo's language model, and an embedding."""
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
    """Return requests that run for a few seconds on the embedding model, and one chat stream."""
    words = "Hugo lives in Pinemark and has a turtle, which is older than he is. " * 6
    long = {"model": "embed", "input": [f"{n} {words}" for n in range(1200)]}
    return [
        *(Ask("embedding", "/v1/embeddings", long) for _ in range(3)),
        _chat("stream", "Hello!", stream=True, max_tokens=300, ignore_eos=True),
    ]


def _last_id(name: str) -> int:
    """Return the last token id of a vocabulary, which no ordinary text contains."""
    return int(json.loads((_DEMO / name / "config.json").read_text())["vocab_size"]) - 1


async def _no_memory(served: Served) -> None:
    """Limit the address space of the engine to its current size, so that every allocation fails."""
    engine = processes.roles(served)["engine"]
    size = engine.memory_info().vms
    engine.rlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))


def _memory_again(served: Served) -> None:
    no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    processes.roles(served)["engine"].rlimit(resource.RLIMIT_AS, no_limit)


def faults() -> list[Fault]:
    """Return all failures of forward passes."""
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
        # Connections are not kept alive, because a restarted server has closed the old ones.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=_CLIENT_TIMEOUT_S, limits=limits, trust_env=False)

    async def measure(self, fault: Fault) -> Row:
        """Inject one fault while requests run, and return the results."""
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
        # From now on, probe requests are repeated until the service has recovered.
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
        """Close the connections."""
        await self._client.aclose()

    def _order(self, fault: Fault) -> None:
        draft = self._orders / "draft"
        draft.write_text(fault.order)
        draft.rename(self._orders / fault.role)

    def _pids(self) -> dict[str, int]:
        return {role: process.pid for role, process in processes.roles(self._served).items()}

    async def _recovered(self, fault: Fault, since: float) -> float | None:
        """Return the seconds from `since` until probes succeed and no later probe fails."""
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
                _check(outcome, answer)
        except TimeoutError:
            outcome.problem = "hung"
        except httpx.HTTPError as error:
            outcome.problem, outcome.message = "connection lost", repr(error)
        outcome.ended = time.monotonic()
        return outcome


def _check(outcome: Outcome, answer: httpx.Response) -> None:
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
    """Start a server of the demo models; yield it and the folder for orders to faulty_python."""
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
    """Return the table of failed forward passes, and whether a limit was violated."""
    chosen = [fault for fault in faults() if only in fault.name]
    if not chosen:
        return "", False
    with stage() as (served, orders):
        rows = asyncio.run(_measure(served, orders, chosen))
    return table(HEAD, [row.cells() for row in rows]), any(row.is_broken for row in rows)


def _in_own_mounts() -> bool:
    """Return whether this program has its own mount namespace; restart it with one if possible."""
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
    """Run all tests. Return 1 if a request hung, a service did not recover, or a check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", metavar="WORD", help="run only tests with WORD in their name"
    )
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    parser.add_argument(_MOUNTED, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    runs = [run_faults, run_checkpoints]
    if _in_own_mounts():
        runs.append(run_disks)
    else:
        print("The tests of full disks are left out, because they need root to mount a tmpfs.")
    found = [run(args.only) for run in runs]
    text = "\n\n".join(text for text, _ in found if text)
    print(f"\n{text}")
    if args.markdown:
        args.markdown.write_text(text + "\n")
    return int(any(is_broken for _, is_broken in found))


if __name__ == "__main__":
    sys.exit(main())
