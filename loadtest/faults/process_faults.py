# SPDX-License-Identifier: Apache-2.0
"""Kill, crash or stop one process of a server at a time, and measure what the clients see.

    python -m loadtest.faults.process_faults [--model PATH] [--only engine] [--markdown PATH]

For each fault, the program starts several requests of all kinds and injects the fault. It then
measures the time until the last of these requests has ended, and the time until a new request is
answered completely.
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
    """A signal that is sent to one process of a running server.

    Attributes:
        name: the name in the report.
        role: the role of the process, as in processes.roles.
        number: the signal.
        stopped_s: with SIGSTOP, the seconds until SIGCONT is sent.
        is_harmless: whether no request may fail because of the fault.
    """

    name: str
    role: str
    number: signal.Signals = signal.SIGKILL
    stopped_s: float = 0.0
    is_harmless: bool = False

    async def happen(self, served: Served) -> float:
        """Send the signal, and return the time of sending, from time.monotonic."""
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
    # Triton server 2.51 prints a stack trace in its handler of this signal, and may hang there.
    Fault("tritonserver crashes (SIGSEGV)", "tritonserver", signal.SIGSEGV),
    _kill("frontend"),
    _stop("engine"),
    # Triton server 2.51 kills a stub that does not respond for about a second.
    _stop("postprocessor stub", is_harmless=False),
    _stop("tritonserver"),
    _stop("frontend"),
)


@dataclass(frozen=True)
class Row:
    """The results of one fault.

    Attributes:
        fault: the fault.
        outcomes: the outcomes of the requests that ran when the fault happened.
        first_error_s: the seconds from the fault to the first failed request, or None.
        last_end_s: the seconds from the fault to the last failed request, or None.
        recovery_s: the seconds from the fault until a new request was answered completely, or None.
    """

    fault: Fault
    outcomes: list[Outcome]
    first_error_s: float | None
    last_end_s: float | None
    recovery_s: float | None

    def cells(self) -> list[str]:
        """Return the cells of the row in the table."""
        seen = collections.Counter(_seen(outcome) for outcome in self.outcomes)
        effects = "; ".join(f"{count} x {what}" for what, count in seen.most_common())
        times = (self.first_error_s, self.last_end_s, self.recovery_s)
        return [self.fault.name, effects, *("-" if t is None else f"{t:.1f} s" for t in times)]


HEAD = ["Fault", "What the clients saw", "First error", "Last error", "Recovery"]


def _seen(outcome: Outcome) -> str:
    if outcome.kind == "ok":
        return "complete answer"
    request = "Triton's HTTP stream" if outcome.ask.is_direct else outcome.ask.kind
    effects = {"lost": "connection closed", "failed": "error", "refused": "503"}
    return f"{request}: {effects.get(outcome.kind, outcome.kind)}"


async def measure(
    served: Served, asker: Asker, fault: Fault, running: Sequence[Ask], probe: Ask | None = None
) -> Row:
    """Inject one fault while requests run, and return the results.

    Args:
        served: the server.
        asker: the client.
        fault: the fault.
        running: the requests that run when the fault happens.
        probe: the request that is repeated until the service has recovered; by default the first of
            `running`.
    """
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
    """Return the seconds from `since` until requests are answered again; None after a time limit.

    A fault may become visible only after a moment, so a single good answer is no proof of recovery.
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
    """Return a Markdown table with one header row."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def long_requests(model: str, poolers: dict[str, str]) -> list[Ask]:
    """Return eight requests that run for some seconds on the demo model, over HTTP."""
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
    """Inject all faults. Return 1 if a limit was violated.

    A limit is violated if a request hung or got a wrong answer, if the service did not recover, if
    a request failed late, or if a harmless fault made a request fail.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, help="folder of the checkpoint (default: the demo)")
    add("--only", default="", metavar="WORD", help="inject only faults with WORD in their name")
    add("--markdown", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    flags = ["--max-restarts=100", "--restart-backoff=0", "--served-model-name=chat"]
    faults = [fault for fault in FAULTS if args.only in fault.name]
    with Served(args.model, arguments=[*flags, "--log-level=warning"]) as served:
        rows = asyncio.run(_all(served, faults, lambda row: print(*row.cells(), sep=" | ")))
    text = table(HEAD, [row.cells() for row in rows])
    again = [row.recovery_s for row in rows if row.recovery_s is not None]
    print(f"\n{text}\n\nThe median time to recovery is {statistics.median(again):.1f} s.")
    if args.markdown:
        args.markdown.write_text(text + "\n")
    return int(any(is_broken(row) for row in rows))


def is_broken(row: Row) -> bool:
    """Return whether the effects of a fault violate a limit."""
    kinds = {outcome.kind for outcome in row.outcomes}
    if row.recovery_s is None or "hung" in kinds or "wrong" in kinds:
        return True
    late = row.last_end_s is not None and row.last_end_s > 5.0
    return late or (row.fault.is_harmless and kinds != {"ok"})


if __name__ == "__main__":
    sys.exit(main())
