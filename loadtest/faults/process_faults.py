"""Kill, crash or stop one process of a server at a time, and measure what the clients see.

    python -m loadtest.faults.process_faults [--model PATH] [--only engine] [--markdown PATH]

For each fault, the program starts several requests of all kinds and injects the fault. The program
then measures the time until the last of these requests has ended, and the time until a new request
is answered completely.
"""

import asyncio
import random
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest import command_line
from loadtest.bench.markdown_table import table
from loadtest.client.ask import Ask, generate_stream
from loadtest.client.traffic import QUESTIONS, asks
from loadtest.faults.fault_rows import HEAD, Fault, Row, make_asker, measure
from loadtest.server import processes
from loadtest.server.served import Served

_STOPPED_S = 3.0
_ENDLESS = {"max_tokens": 800, "ignore_eos": True}


@dataclass(frozen=True, kw_only=True)
class ProcessFault(Fault):
    """A signal that is sent to one process of a running server.

    Attributes:
        number: the signal.
        stopped_s: with SIGSTOP, the seconds until SIGCONT is sent.
    """

    number: signal.Signals = signal.SIGKILL
    stopped_s: float = 0.0

    async def happen(self, served: Served) -> Sequence[Ask]:
        """Send the signal. No further request is needed."""
        process = processes.roles(served)[self.role]
        process.send_signal(self.number)
        if self.stopped_s:
            await asyncio.sleep(self.stopped_s)
            process.send_signal(signal.SIGCONT)
        return ()


def _kill(role: str) -> ProcessFault:
    return ProcessFault(name=f"kill -9 {role}", role=role)


def _stop(role: str, *, is_harmless: bool = True) -> ProcessFault:
    """Return the fault that stops a process for a while with SIGSTOP."""
    return ProcessFault(
        name=f"{role} stopped for {_STOPPED_S:g} s",
        role=role,
        number=signal.SIGSTOP,
        stopped_s=_STOPPED_S,
        is_harmless=is_harmless,
    )


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
    replace(_kill("tritonserver"), name="tritonserver crashes (SIGSEGV)", number=signal.SIGSEGV),
    _kill("frontend"),
    _stop("engine"),
    # Triton server 2.51 kills a stub that does not respond for about a second.
    _stop("postprocessor stub", is_harmless=False),
    _stop("tritonserver"),
    _stop("frontend"),
)


def long_requests(model: str, pooling_models: Mapping[str, str]) -> list[Ask]:
    """Return eight requests that run for some seconds on the demo model, over HTTP."""
    requests = asks(random.Random(0), model, pooling_models)
    texts = [ask for ask in requests if ask.kind in ("chat", "whole chat", "completion")]
    return [
        *(ask.with_fields(_ENDLESS) for ask in texts[:5]),
        *(generate_stream(one, {"temperature": 0, **_ENDLESS}) for one in QUESTIONS[:3]),
    ]


async def _measure_all(served: Served, faults: Sequence[Fault]) -> list[Row]:
    """Inject the faults one after the other."""
    asker = make_asker(served)
    pooling_models = {"embedding": "embed", "rerank": "rerank"}
    probes = {ask.kind: ask for ask in asks(random.Random(0), "chat", pooling_models)}
    chat = probes["whole chat"]
    running = [chat, *long_requests("chat", {})]
    rows = []
    try:
        for fault in faults:
            # A role such as "embedding worker" begins with the kind of the requests for it.
            probe = probes.get(fault.role.split()[0], chat)
            rows.append(await measure(served, asker, fault, running, probe))
            print(*rows[-1].cells(), sep=" | ", flush=True)
            await asyncio.sleep(1.0)
    finally:
        await asker.close()
    return rows


def main() -> int:
    """Inject all faults. Return 1 if a limit was violated (see `Row.is_broken`)."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    add("--model", type=Path, help="folder of the checkpoint (default: the demo)")
    add("--only", default="", metavar="WORD", help="inject only faults with WORD in their name")
    add("--markdown", type=Path, help="also write the report to this file")
    args = parser.parse_args()
    command_line.check_word(parser, "--only", args.only, [fault.name for fault in FAULTS])
    flags = ["--max-restarts=100", "--restart-backoff=0", "--served-model-name=chat"]
    faults = [fault for fault in FAULTS if args.only in fault.name]
    with Served(args.model, arguments=[*flags, "--log-level=warning"]) as served:
        rows = asyncio.run(_measure_all(served, faults))
    recoveries_s = [row.recovery_s for row in rows if row.recovery_s is not None]
    median = f"The median time to recovery is {statistics.median(recoveries_s):.1f} s."
    table_of_faults = table(HEAD, [row.cells() for row in rows])
    command_line.print_report(f"{table_of_faults}\n\n{median}", args.markdown)
    return int(any(row.is_broken for row in rows))


if __name__ == "__main__":
    sys.exit(main())
