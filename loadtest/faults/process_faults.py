# SPDX-License-Identifier: Apache-2.0
"""What breaks, and what its clients see of it: the table fault by fault, measured.

    python -m loadtest.faults.process_faults [--model PATH] [--only engine] [--markdown PATH]

For each fault a handful of requests of all kinds run, the fault happens, and two times are taken:
until the last of those requests had ended, and until a new one was answered in full again.
"""

import argparse
import asyncio
import collections
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.client.traffic import Ask, Asker, Outcome, asks
from loadtest.server import processes
from loadtest.server.served import Served

_RECOVERY_LIMIT_S = 180.0
_SETTLED_S = 2.5
_STOPPED_S = 3.0


@dataclass(frozen=True)
class Fault:
    """Something that can be done to a running server.

    Attributes:
        name: for the report.
        role: of the process that suffers, see processes.roles.
        number: the signal that it gets.
        stopped_s: with SIGSTOP: SIGCONT follows after so long.
        is_harmless: whether every request must survive it.
    """

    name: str
    role: str
    number: signal.Signals = signal.SIGKILL
    stopped_s: float = 0.0
    is_harmless: bool = False

    async def happen(self, served: Served) -> float:
        """Do it; when that was, by time.monotonic."""
        process = processes.roles(served)[self.role]
        process.send_signal(self.number)
        happened = time.monotonic()
        if self.stopped_s:
            await asyncio.sleep(self.stopped_s)
            process.send_signal(signal.SIGCONT)
        return happened


def _kill(role: str) -> Fault:
    return Fault(f"kill -9 {role}", role)


def _stop(role: str, is_harmless: bool = True) -> Fault:
    name = f"{role} stopped for {_STOPPED_S:g} s"
    return Fault(name, role, signal.SIGSTOP, _STOPPED_S, is_harmless)


FAULTS = (
    _kill("engine"),
    _kill("tokenizer stub"),
    _kill("executor stub"),
    _kill("postprocessor stub"),
    _kill("embedding stub"),
    _kill("rerank stub"),
    _kill("embedding worker"),
    _kill("tritonserver"),
    # Server 2.51 prints a stack in the handler of this signal, and may hang there.
    Fault("tritonserver crashes (SIGSEGV)", "tritonserver", signal.SIGSEGV),
    _kill("frontend"),
    _stop("engine"),
    # Server 2.51 kills a stub that gives no sign of life for about a second.
    _stop("postprocessor stub", is_harmless=False),
    _stop("tritonserver"),
    _stop("frontend"),
)


@dataclass(frozen=True)
class Row:
    """What one fault did.

    Attributes:
        fault: which.
        outcomes: of the requests that ran when it happened.
        first_error_s, last_end_s: after the fault: the first of them that failed, and the end of
            the last one; None where none did.
        recovery_s: after the fault: a new request was answered in full.
    """

    fault: Fault
    outcomes: list[Outcome]
    first_error_s: float | None
    last_end_s: float | None
    recovery_s: float | None

    def cells(self) -> list[str]:
        """As a line of the table."""
        seen = collections.Counter(_seen(outcome) for outcome in self.outcomes)
        told = "; ".join(f"{count} x {what}" for what, count in seen.most_common())
        times = (self.first_error_s, self.last_end_s, self.recovery_s)
        return [self.fault.name, told, *("-" if t is None else f"{t:.1f} s" for t in times)]


HEAD = ["Fault", "What its clients saw", "First error", "Last error", "Service again"]


def _seen(outcome: Outcome) -> str:
    if outcome.kind == "ok":
        return "answered in full"
    door = "Triton's HTTP stream" if outcome.ask.is_direct else outcome.ask.kind
    how = {"lost": "connection closed", "failed": "error", "refused": "503"}
    return f"{door}: {how.get(outcome.kind, outcome.kind)}"


async def measure(
    served: Served, asker: Asker, fault: Fault, running: Sequence[Ask], probe: Ask | None = None
) -> Row:
    """Let one fault happen to these requests; the probe (the first of them) tells of recovery."""
    tasks = [asyncio.create_task(asker.ask(ask)) for ask in running]
    await asyncio.sleep(0.7)
    happened = await fault.happen(served)
    recovery = asyncio.create_task(recovered(asker, probe or running[0], happened))
    outcomes = await asyncio.gather(*tasks)
    hurt = [o.ended - happened for o in outcomes if o.kind != "ok" and o.ended >= happened]
    return Row(
        fault,
        list(outcomes),
        min(hurt, default=None),
        max(hurt, default=None),
        await recovery,
    )


async def recovered(asker: Asker, ask: Ask, since: float) -> float | None:
    """Seconds after `since` until requests were answered in full again; None: not in time.

    A fault may take a moment to show, so a first good answer proves nothing.
    """
    again: float | None = None
    while (passed := time.monotonic() - since) < _RECOVERY_LIMIT_S:
        if (await asker.ask(ask)).kind != "ok":
            again = None
        elif again is None:
            again = time.monotonic() - since
        elif passed > _SETTLED_S:
            return again
        await asyncio.sleep(0.1)
    return None


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def long_requests(model: str, poolers: dict[str, str]) -> list[Ask]:
    """Eight requests that run for some seconds on the demo's model, of every kind of door."""
    endless = {"max_tokens": 800, "ignore_eos": True}
    made: list[Ask] = []
    for ask in asks(random.Random(0), model, poolers):
        if ask.kind in ("chat", "whole chat", "completion") and len(made) < 6:
            made.append(Ask(ask.kind, ask.path, ask.body | endless))
        elif ask.is_direct and len(made) < 8:
            fields = '{"temperature": 0, "max_tokens": 800, "ignore_eos": true}'
            body = ask.body | {"sampling_parameters": fields}
            made.append(Ask(ask.kind, ask.path, body, ask.door))
    return made


async def _all(served: Served, faults: Sequence[Fault], tell: Callable[[Row], None]) -> list[Row]:
    model = "chat"
    asker = Asker(f"http://127.0.0.1:{served.openai_port}", served.http_url)
    poolers = {"embedding": "embed", "rerank": "rerank"}
    probes = {ask.kind: ask for ask in asks(random.Random(0), model, poolers)}
    running = [probes["whole chat"], *long_requests(model, {})]
    rows = []
    try:
        for fault in faults:
            probe = probes.get(fault.role.split()[0], running[0])
            rows.append(await measure(served, asker, fault, running, probe))
            tell(rows[-1])
            await asyncio.sleep(1.0)
    finally:
        await asker.close()
    return rows


def main() -> int:
    """Measure; 1 when something hung, did not come back, or was hurt by a harmless fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="checkpoint (default: the demo)")
    parser.add_argument("--only", default="", metavar="WORD", help="faults whose name has this")
    parser.add_argument("--markdown", type=Path, help="write the table here too")
    args = parser.parse_args()
    flags = ["--max-restarts=100", "--restart-backoff=0", "--served-model-name=chat"]
    faults = [fault for fault in FAULTS if args.only in fault.name]
    with Served(args.model, arguments=[*flags, "--log-level=warning"]) as served:
        rows = asyncio.run(_all(served, faults, lambda row: print(*row.cells(), sep=" | ")))
    text = table(HEAD, [row.cells() for row in rows])
    again = [row.recovery_s for row in rows if row.recovery_s is not None]
    print(f"\n{text}\n\nservice again after a median of {statistics.median(again):.1f} s")
    if args.markdown:
        args.markdown.write_text(text + "\n")
    return int(any(is_broken(row) for row in rows))


def is_broken(row: Row) -> bool:
    """Whether a fault did what no fault may do."""
    kinds = {outcome.kind for outcome in row.outcomes}
    if row.recovery_s is None or "hung" in kinds or "wrong" in kinds:
        return True
    late = row.last_end_s is not None and row.last_end_s > 5.0
    return late or (row.fault.is_harmless and kinds != {"ok"})


if __name__ == "__main__":
    sys.exit(main())
