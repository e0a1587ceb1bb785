"""Inject one fault into a running server, and measure what the clients see."""

import asyncio
import collections
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loadtest.bench.markdown_table import short, table
from loadtest.client.ask import Ask
from loadtest.client.traffic import Asker, Outcome
from loadtest.server import processes
from loadtest.server.served import Served

_RECOVERY_LIMIT_S = 180.0
_BEFORE_S = 0.7
_EFFECTS = {"lost": "connection closed", "failed": "error", "refused": "503"}
_HEAD = ("Fault", "What the clients saw", "Error message", "First error", "Last error", "Recovery",
         "What was lost")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that can be injected into a running server.

    Attributes:
        name: the name in the report.
        role: the role of the process that fails (see processes.roles).
        is_harmless: whether no request may fail because of the fault.
        limit_s: the time within which the last request must fail, in seconds.
        settled_s: a time after the fault in seconds. A good answer within this time does not prove
            recovery, because some faults become visible only after a moment.
    """

    name: str
    role: str
    is_harmless: bool = False
    limit_s: float = 5.0
    settled_s: float = 2.5

    async def happen(self, served: Served) -> Iterable[Ask]:
        """Cause the fault, and return further requests that must be sent at the same time."""
        raise NotImplementedError

    def undo(self, served: Served) -> bool:  # noqa: ARG002 - for faults that leave a cause
        """Remove the cause of the fault. Return False if the fault did not happen."""
        return True


@dataclass(frozen=True)
class Row:
    """The results of one fault.

    Attributes:
        fault: the fault.
        outcomes: the outcomes of the requests that ran when the fault happened.
        happened: the time of the fault, from time.monotonic.
        recovery_s: the seconds from the fault until new requests were answered completely, or None.
        replaced: the roles of the processes that were restarted.
        has_happened: whether the fault had an effect at all.
    """

    fault: Fault
    outcomes: Sequence[Outcome]
    happened: float
    recovery_s: float | None
    replaced: Sequence[str]
    has_happened: bool

    @property
    def hurt(self) -> list[Outcome]:
        """The outcomes of the requests that were not answered completely."""
        return [outcome for outcome in self.outcomes if outcome.kind != "ok"]

    @property
    def last_end_s(self) -> float | None:
        """The seconds from the fault to the last failed request, or None if none failed."""
        return max((o.reply.ended - self.happened for o in self.hurt), default=None)

    @property
    def is_broken(self) -> bool:
        """Whether the effects of the fault violate a limit.

        A limit is violated if a request hung or got a wrong answer, if the service did not recover,
        if a request failed late, or if a harmless fault made a request fail.
        """
        if self.recovery_s is None or not self.has_happened:
            return True
        if {"hung", "wrong"} & {outcome.kind for outcome in self.hurt}:
            return True
        is_late = self.last_end_s is not None and self.last_end_s > self.fault.limit_s
        return is_late or (self.fault.is_harmless and bool(self.hurt))

    def cells(self) -> list[str]:
        """Return the cells of the row in the table."""
        seen = collections.Counter(_effect(outcome) for outcome in self.outcomes)
        messages = collections.Counter(short(outcome.detail) for outcome in self.hurt)
        first_s = min((o.reply.ended - self.happened for o in self.hurt), default=None)
        lost = "the failed requests" if self.hurt else "nothing"
        if self.replaced:
            lost += f"; {' and '.join(self.replaced)} restarted"
        times = (first_s, self.last_end_s, self.recovery_s)
        return [
            self.fault.name,
            "; ".join(f"{count} x {what}" for what, count in seen.most_common()),
            messages.most_common(1)[0][0] if messages else "-",
            *("-" if seconds is None else f"{seconds:.1f} s" for seconds in times),
            lost,
        ]


def _effect(outcome: Outcome) -> str:
    """Return what a client saw, such as "chat: 503"."""
    if outcome.kind == "ok":
        return "complete answer"
    return f"{outcome.ask.kind}: {_EFFECTS.get(outcome.kind, outcome.kind)}"


def report(rows: Iterable[Row]) -> str:
    """Return the table of all faults as Markdown."""
    return table(_HEAD, [row.cells() for row in rows])


async def measure(
    served: Served, asker: Asker, fault: Fault, running: Sequence[Ask], probe: Ask | None = None
) -> Row:
    """Inject one fault while requests run, and return the results.

    Args:
        served: the server.
        asker: the client.
        fault: the fault.
        running: the requests that run when the fault happens.
        probe: the request that is repeated until the service has recovered. The default is the
            first request of `running`.
    """
    before = _pids(served)
    tasks = [asyncio.create_task(asker.ask(ask)) for ask in running]
    await asyncio.sleep(_BEFORE_S)
    happened = time.monotonic()
    tasks += [asyncio.create_task(asker.ask(ask)) for ask in await fault.happen(served)]
    recovery = asyncio.create_task(recovered(asker, probe or running[0], happened, fault.settled_s))
    outcomes = await asyncio.gather(*tasks)
    recovery_s = await recovery
    has_happened = fault.undo(served)
    after = _pids(served)
    replaced = [role for role in before if after.get(role) != before[role]]
    return Row(fault, outcomes, happened, recovery_s, replaced, has_happened)


async def recovered(
    asker: Asker, ask: Ask, since: float, settled_s: float = Fault.settled_s
) -> float | None:
    """Return the seconds from `since` until requests are answered; None after a time limit.

    A good answer within the first `settled_s` seconds proves nothing if a later request fails.
    """
    again: float | None = None
    while (passed := time.monotonic() - since) < _RECOVERY_LIMIT_S:
        if (await asker.ask(ask)).kind != "ok":
            again = None
        elif again is None:
            again = time.monotonic() - since
        elif passed > settled_s:
            return again
        await asyncio.sleep(0.1)
    return None


def _pids(served: Served) -> dict[str, int]:
    return {role: process.pid for role, process in processes.roles(served).items()}
