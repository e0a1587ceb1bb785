"""Inject one fault into a running server, and measure what the clients see."""

import asyncio
import collections
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from loadtest.bench.markdown_table import short, table
from loadtest.client.ask import Ask
from loadtest.client.traffic import Asker, Outcome
from loadtest.server import processes
from loadtest.server.served import Served

_RECOVERY_LIMIT_S = 180.0
_RUNNING_S = 0.7  # the requests run for this time before the fault
_EFFECTS = {"lost": "connection closed", "failed": "error", "refused": "503"}
HEAD = ("Fault", "What the clients saw", "Error message", "First error", "Last error", "Recovery",
         "What was lost")  # fmt: skip


class Section(NamedTuple):
    """A part of a report.

    Attributes:
        text: the table as Markdown, or "" if there are no rows.
        is_broken: whether a check failed.
    """

    text: str
    is_broken: bool

    @classmethod
    def of(cls, head: Sequence[str], rows: Sequence[Sequence[str]], is_broken: bool) -> "Section":
        """Return the section with a table of `rows`."""
        return cls(table(head, rows) if rows else "", is_broken)


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
    def failed(self) -> list[Outcome]:
        """The outcomes of the requests that were not answered completely."""
        return [outcome for outcome in self.outcomes if outcome.kind != "ok"]

    @property
    def last_end_s(self) -> float | None:
        """The seconds from the fault to the end of the last failed request, or None."""
        return max(self._ends_s(), default=None)

    def _ends_s(self) -> list[float]:
        return [outcome.reply.ended - self.happened for outcome in self.failed]

    @property
    def is_broken(self) -> bool:
        """Whether the effects of the fault violate a limit.

        A limit is violated if the service did not recover, if the fault had no effect at all, if a
        request hung or got a wrong answer, if a harmless fault made a request fail, or if a request
        failed late.
        """
        if self.recovery_s is None or not self.has_happened:
            return True
        if any(outcome.kind in ("hung", "wrong") for outcome in self.failed):
            return True
        if self.fault.is_harmless and self.failed:
            return True
        return self.last_end_s is not None and self.last_end_s > self.fault.limit_s

    def cells(self) -> list[str]:
        """Return the cells of the row in the table."""
        effects = collections.Counter(_effect(outcome) for outcome in self.outcomes)
        messages = [short(outcome.detail) for outcome in self.failed]
        losses = "the failed requests" if self.failed else "nothing"
        if self.replaced:
            losses += f"; {' and '.join(self.replaced)} restarted"
        first_end_s = min(self._ends_s(), default=None)
        return [
            self.fault.name,
            "; ".join(f"{count} x {effect}" for effect, count in effects.most_common()),
            statistics.mode(messages) if messages else "-",
            _seconds_cell(first_end_s),
            _seconds_cell(self.last_end_s),
            _seconds_cell(self.recovery_s),
            losses,
        ]


def _seconds_cell(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def _effect(outcome: Outcome) -> str:
    """Return what the client of a request saw, such as "chat: 503"."""
    if outcome.kind == "ok":
        return "complete answer"
    return f"{outcome.ask.kind}: {_EFFECTS.get(outcome.kind, outcome.kind)}"


def make_asker(served: Served, limit_s: float = 60.0) -> Asker:
    """Return a client of a server. `limit_s` is the time limit of a request in seconds."""
    return Asker(served.frontend_url, served.http_url, served.grpc_url, limit_s)


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
    before = processes.pids(served)
    tasks = [asyncio.create_task(asker.ask(ask)) for ask in running]
    await asyncio.sleep(_RUNNING_S)
    happened = time.monotonic()
    tasks += [asyncio.create_task(asker.ask(ask)) for ask in await fault.happen(served)]
    recovery = recovered(asker, probe or running[0], happened, fault.settled_s)
    recovery_s, outcomes = await asyncio.gather(recovery, asyncio.gather(*tasks))
    has_happened = fault.undo(served)
    replaced = processes.replaced(before, served)
    return Row(fault, outcomes, happened, recovery_s, replaced, has_happened)


async def recovered(
    asker: Asker, ask: Ask, since: float, settled_s: float = Fault.settled_s
) -> float | None:
    """Return the seconds from `since` until requests are answered; None after a time limit.

    A good answer within the first `settled_s` seconds proves nothing if a later request fails.
    """
    first_good_s: float | None = None
    while (passed_s := time.monotonic() - since) < _RECOVERY_LIMIT_S:
        outcome = await asker.ask(ask)
        if outcome.kind != "ok":
            first_good_s = None
        elif first_good_s is None:
            first_good_s = time.monotonic() - since
        elif passed_s > settled_s:
            return first_good_s
        await asyncio.sleep(0.1)
    return None
