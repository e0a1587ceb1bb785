"""Send about 300 hostile requests to a real server, with a well-behaved client beside them.

    python -m loadtest.hostile.hostile                      # everything, some minutes
    python -m loadtest.hostile.hostile --only grammar       # the attacks whose kind or name matches
    python -m loadtest.hostile.hostile --list               # only print the table of attacks

The server is `nereid serve` with the demo models, in processes whose memory is limited. Several
attacks run at the same time. The run fails if one of these happens:

    A request is answered with a status of 500 or more, or not within its time limit.
    The memory of all processes together grows by more than 1 GB, or a process is restarted.
    The well-behaved client waits more than 2 s for a first token, or gets an error.
    The server connects to an address or reads a file that a request names.

The exit code is 1 if the run fails.
"""

import argparse
import json
import resource
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest import command_line
from loadtest.hostile import bodies, tensors, wire
from loadtest.hostile.attack import Attack, Outcome, Target, chat, exchange
from loadtest.server import processes
from loadtest.server.served import Served

_ATTACKER = "sk-attacker"
_NEIGHBOUR = "sk-neighbour"
_MAX_GROWTH_MIB = 1000.0
_MAX_FIRST_TOKEN_S = 2.0
_SAMPLE_S = 0.2
_NEIGHBOUR_PAUSE_S = 0.2
_SETTINGS = {"NEREID_RECEIVE_TIMEOUT_S": "8", "NEREID_UNREAD_TIMEOUT_S": "5"}
_KEYS = f"""
[attacker]
key = "{_ATTACKER}"

[neighbour]
key = "{_NEIGHBOUR}"
"""


@dataclass(frozen=True)
class Result:
    """An attack with its outcome and its duration in seconds."""

    attack: Attack
    outcome: Outcome
    started: float
    ended: float

    @property
    def fault(self) -> str | None:
        """Why the outcome is a defect, or None."""
        return self.attack.fault(self.outcome)


def all_attacks() -> list[Attack]:
    """Return all attacks."""
    return [*bodies.attacks(), *wire.attacks(), *tensors.attacks()]


class Neighbour(threading.Thread):
    """A well-behaved client that requests a short stream again and again.

    Attributes:
        waits: for each request the time at which it started, and the seconds until the first token.
        errors: the time and the description of each request that failed.
    """

    def __init__(self, port: int, key: str) -> None:
        super().__init__(daemon=True)
        self._port, self._key = port, key
        self._stopped = threading.Event()
        self.waits: list[tuple[float, float]] = []
        self.errors: list[tuple[float, str]] = []

    def run(self) -> None:
        """Send requests until `stop` is called."""
        while not self._stopped.wait(_NEIGHBOUR_PAUSE_S):
            started = time.monotonic()
            try:
                wait_s = first_token_s(self._port, self._key)
            except OSError as error:
                self.errors.append((started, str(error)))
            else:
                self.waits.append((started, wait_s))

    def stop(self) -> None:
        """Stop after the current request."""
        self._stopped.set()
        self.join(60)


def first_token_s(port: int, key: str) -> float:
    """Request a short stream, and return the seconds until its first token.

    Raises: OSError if there is no token.
    """
    body = json.dumps(chat(stream=True, max_tokens=3, temperature=0)).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(head.encode() + body)
        received = b""
        while block := connection.recv(65536):
            received += block
            if b'"content"' in received:
                return time.monotonic() - started
    raise OSError(f"no token: {received[-300:]!r}")


class MemoryWatch(threading.Thread):
    """Samples the memory of the server's processes.

    Attributes:
        peaks: for each process the first and the largest memory in MiB.
        total: the first and the largest memory of all processes together, in MiB.
        peak_at: the time of the largest memory.
    """

    def __init__(self, served: Served) -> None:
        super().__init__(daemon=True)
        self._served = served
        self._stopped = threading.Event()
        self.peaks: dict[str, tuple[float, float]] = {}
        self.total = (0.0, 0.0)
        self.peak_at = 0.0

    def run(self) -> None:
        """Sample the memory until `stop` is called."""
        while not self._stopped.wait(_SAMPLE_S):
            found = {}
            for role, process in processes.roles(self._served).items():
                try:
                    found[role] = process.memory_info().rss / 2**20
                except psutil.NoSuchProcess:
                    continue
            for role, mib in found.items():
                first, most = self.peaks.get(role, (mib, mib))
                self.peaks[role] = (first, max(most, mib))
            total = sum(found.values())
            first, most = self.total
            if total > most:
                self.peak_at = time.monotonic()
            self.total = (first or total, max(most, total))

    def stop(self) -> None:
        """Stop sampling."""
        self._stopped.set()
        self.join(10)


@contextmanager
def canary() -> Iterator[tuple[int, list[str]]]:
    """Listen on a port to which nobody should connect. Yield the port and the connections."""
    visits: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            while True:
                try:
                    connection, address = listener.accept()
                except OSError:
                    return
                visits.append(str(address))
                connection.close()

        threading.Thread(target=listen, daemon=True).start()
        yield listener.getsockname()[1], visits


def run(attacks: Sequence[Attack], num_attackers: int, memory_limit: int) -> tuple[str, bool]:
    """Start a server, run the attacks, and return the report and whether the run passed."""
    with tempfile.TemporaryDirectory() as folder, canary() as (canary_port, visits):
        keys = Path(folder) / "keys.toml"
        keys.write_text(_KEYS)
        tensors.CANARY_FILE.write_bytes(bytes(4096))
        environment = {**_SETTINGS, "NEREID_API_KEY_FILE": str(keys)}
        served = Served(environment=environment, arguments=["--log-level=warning"])
        with limited_memory(memory_limit):
            served.__enter__()
        with served_until_end(served):
            target = Target(
                served.openai_port, served.http_port, served.grpc_url, _ATTACKER,
                _stored_response(served.openai_port), canary_port,
            )  # fmt: skip
            before = {role: process.pid for role, process in processes.roles(served).items()}
            memory, neighbour = MemoryWatch(served), Neighbour(served.openai_port, _NEIGHBOUR)
            memory.start()
            neighbour.start()
            started = time.monotonic()
            with ThreadPoolExecutor(num_attackers) as pool:
                results = list(pool.map(lambda attack: _one(attack, target), attacks))
            time.sleep(1)
            neighbour.stop()
            memory.stop()
            after = {role: process.pid for role, process in processes.roles(served).items()}
            log = served.output + served.server_log
    if tensors.CANARY_FILE.read_bytes() != bytes(4096):
        visits.append("a file that a request names was changed")
    tensors.CANARY_FILE.unlink()
    gone = [role for role, pid in before.items() if after.get(role) != pid]
    return report(results, neighbour, memory, gone, visits, started, log)


def _one(attack: Attack, target: Target) -> Result:
    started = time.monotonic()
    try:
        outcome = attack.send(target, attack.limit_s)
    except OSError as error:
        outcome = Outcome(503, f"no connection: {error}")
    return Result(attack, outcome, started, time.monotonic())


@contextmanager
def served_until_end(served: Served) -> Iterator[None]:
    """Stop a server at the end."""
    try:
        yield
    finally:
        served.__exit__()


@contextmanager
def limited_memory(num_bytes: int) -> Iterator[None]:
    """Limit the private memory of each process that is started in the meantime (RLIMIT_DATA)."""
    previous = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, previous[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, previous)


def _stored_response(port: int) -> str:
    """Create a response of the well-behaved client, and return its id."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {_NEIGHBOUR}"}
    body = json.dumps({"input": "my secret", "max_output_tokens": 16}).encode()
    outcome = exchange(port, "POST", "/v1/responses", body, headers, 60)
    if outcome.status != 200:
        raise RuntimeError(f"the server rejected the first response: {outcome}")
    response_id: str = json.loads(outcome.text)["id"]
    return response_id


def report(  # noqa: PLR0913 - everything that was observed
    results: Sequence[Result],
    neighbour: Neighbour,
    memory: MemoryWatch,
    gone: Sequence[str],
    visits: Sequence[str],
    started: float,
    log: str,
) -> tuple[str, bool]:
    """Return the table of a run, and whether the run passed."""
    lines = ["", *_table(results, neighbour), ""]
    faults = [f"{r.attack.kind}: {r.attack.name}: {r.fault}; {r.ended - r.started:.1f} s; "
              f"{r.outcome.text[:200]!r}" for r in results if r.fault]  # fmt: skip
    for at, wait_s in neighbour.waits:
        if wait_s > _MAX_FIRST_TOKEN_S:
            names = _running(results, at, at + wait_s)
            faults.append(f"the neighbour waited {wait_s:.1f} s at {at - started:.0f} s: {names}")
    for at, text in neighbour.errors:
        faults.append(f"the neighbour failed: {text[:300]}: {_running(results, at - 1, at + 1)}")
    first, most = memory.total
    if most - first > _MAX_GROWTH_MIB:
        names = _running(results, memory.peak_at - 1, memory.peak_at)
        faults.append(f"the memory grew by {most - first:.0f} MiB: {names}")
    if gone:
        faults.append(f"these processes were restarted: {', '.join(gone)}")
    if visits:
        faults.append(f"the server used an address or a file in a request: {visits}")
    lines += _neighbour_line(neighbour)
    lines.append(
        f"memory of all processes: {first:.0f} MiB at the start, {most:.0f} MiB at the peak"
    )
    for role, (begin, peak) in sorted(memory.peaks.items()):
        if peak - begin > 20:
            lines.append(f"    {role}: {begin:.0f} MiB, {peak:.0f} MiB at the peak")
    lines.append("")
    lines += faults or ["No faults."]
    if faults:
        lines += ["", "The last warnings in the log:", *_warnings(log)]
    return "\n".join(lines), not faults


def _neighbour_line(neighbour: Neighbour) -> list[str]:
    waits = sorted(wait_s for _, wait_s in neighbour.waits)
    if not waits:
        return []
    median, late = waits[len(waits) // 2], waits[int(len(waits) * 0.99)]
    return [
        f"{len(waits)} requests of the neighbour: first token after {median:.2f} s (median), "
        f"{late:.2f} s (99 %), {waits[-1]:.2f} s (slowest)"
    ]


def _table(results: Sequence[Result], neighbour: Neighbour) -> Iterator[str]:
    kinds: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        kinds[result.attack.kind].append(result)
    yield f"{'kind':14} {'attacks':>7} {'faults':>6} {'slowest':>8} {'neighbour':>9}  statuses"
    for kind, found in kinds.items():
        slowest = max(result.ended - result.started for result in found)
        begin, end = min(r.started for r in found), max(r.ended for r in found)
        waits = [wait_s for at, wait_s in neighbour.waits if begin - 1 < at < end]
        counts = Counter(str(result.outcome.status) for result in found)
        statuses = ", ".join(f"{status}: {count}" for status, count in sorted(counts.items()))
        num_faults = sum(result.fault is not None for result in found)
        wait_s = max(waits, default=0)
        yield (
            f"{kind:14} {len(found):7} {num_faults:6} {slowest:6.1f} s {wait_s:7.2f} s  {statuses}"
        )


def _running(results: Sequence[Result], begin: float, end: float) -> str:
    names = [r.attack.name for r in results if r.started <= end and r.ended >= begin]
    return "; ".join(names[:8])


def _warnings(log: str) -> list[str]:
    found = [line for line in log.splitlines() if "Error" in line or "nereid: " in line]
    return found[-40:]


def main() -> int:
    """Run the program and return the exit code."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--only", default="", help="run the attacks whose kind or name contains it")
    parser.add_argument("--attackers", type=int, default=4, help="attacks at the same time")
    parser.add_argument("--memory-gib", type=float, default=6, help="the memory of each process")
    parser.add_argument("--list", action="store_true", help="print the attacks and exit")
    args: argparse.Namespace = parser.parse_args()
    attacks = [one for one in all_attacks() if args.only in f"{one.kind}: {one.name}"]
    if args.list:
        for attack in attacks:
            print(f"{attack.kind}: {attack.name}")
        print(f"{len(attacks)} attacks")
        return 0
    text, has_passed = run(attacks, args.attackers, int(args.memory_gib * 2**30))
    print(text)
    return 0 if has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
