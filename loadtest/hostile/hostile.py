"""Send hostile requests to a real server, with a well-behaved client beside them.

    python -m loadtest.hostile.hostile                      # everything, some minutes
    python -m loadtest.hostile.hostile --only grammar       # the attacks whose kind or name matches
    python -m loadtest.hostile.hostile --list               # only print the table of attacks

The server is `nereid serve` with the demo models, in processes whose memory is limited. Several
attacks run at the same time. The run fails if one of these happens:

    A request is answered with a status of 500 or more, or not within its time limit. Some answers
    of the Triton server itself are allowed (triton_http.OWN_ANSWERS).
    The memory of all processes together grows by more than 1 GB, or a process is restarted.
    The well-behaved client waits more than 2 s for a first token, or gets an error.
    The server connects to an address that a request names.

On a busy machine, the time limits are longer: the client first measures the time to a first token
without attacks. The exit code is 1 if the run fails.
"""

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from loadtest import command_line
from loadtest.hostile import (
    bodies,
    field_values,
    floods,
    grammars,
    http_variants,
    model_inputs,
    templates,
    tensors,
    triton_http,
    wire,
)
from loadtest.hostile.attack import Attack, Outcome, Target
from loadtest.hostile.observers import MemoryWatch, Neighbour, canary, first_token_s
from loadtest.hostile.report import Limits, Result, Run, report
from loadtest.hostile.requests import Request, exchange
from loadtest.server import processes
from loadtest.server.served import Served

_ATTACKER = "sk-attacker"
_NEIGHBOUR = "sk-neighbour"
_ATTACKER_NICENESS = 10
_NUM_ATTACKERS = 4
_NUM_QUIET_REQUESTS = 40
_MEMORY_LIMIT = 6 * 2**30
_SETTINGS = {"NEREID_RECEIVE_TIMEOUT_S": "8", "NEREID_UNREAD_TIMEOUT_S": "5"}
_KEYS = f"""
[attacker]
key = "{_ATTACKER}"

[neighbour]
key = "{_NEIGHBOUR}"
"""


def all_attacks() -> list[Attack]:
    """Return all attacks."""
    modules = (
        *(bodies, field_values, grammars, templates, floods, wire, http_variants),
        *(triton_http, tensors, model_inputs),
    )
    return [attack for module in modules for attack in module.attacks()]


def run(attacks: Sequence[Attack]) -> tuple[str, bool]:
    """Start a server, run the attacks, and return the report and whether the run passed."""
    with serve() as served, canary() as (canary_port, visits):
        port = served.openai_port
        target = Target(
            openai=port,
            http=served.http_port,
            grpc=served.grpc_url,
            key=_ATTACKER,
            foreign_response=stored_response(port),
            canary=canary_port,
        )
        limits = Limits.measure(
            [first_token_s(port, _NEIGHBOUR) for _ in range(_NUM_QUIET_REQUESTS)]
        )
        before = processes.pids(served)
        with MemoryWatch(served) as memory, Neighbour(port, _NEIGHBOUR) as neighbour:
            started = time.monotonic()
            results = _run_together(attacks, target, limits)
            time.sleep(1)  # the neighbour may still notice an effect of the last attacks
        gone = processes.replaced(before, served)
        log = served.output + served.server_log
    text, has_passed = report(Run(results, neighbour, memory, gone, visits, started, limits))
    if not has_passed:
        text += "\n\nThe last warnings in the log:\n" + _warnings(log)
    return text, has_passed


def _run_together(attacks: Sequence[Attack], target: Target, limits: Limits) -> list[Result]:
    """Run several attacks at a time, with a low priority of this process.

    Real attackers use other machines. With the low priority, the attacks take less processor time
    from the server.
    """
    os.nice(_ATTACKER_NICENESS)
    with ThreadPoolExecutor(_NUM_ATTACKERS) as pool:
        return list(pool.map(lambda attack: _result(attack, target, limits), attacks))


def _result(attack: Attack, target: Target, limits: Limits) -> Result:
    """Run an attack, and print its fault."""
    started = time.monotonic()
    try:
        outcome = attack.send(target, attack.limit_s * limits.slowness)
    except OSError as error:
        outcome = Outcome(503, f"no connection: {error}")
    result = Result(attack, outcome, started, time.monotonic())
    if result.fault:
        print(f"fault: {attack.kind}: {attack.name}: {result.fault}", file=sys.stderr)
    return result


@contextmanager
def serve() -> Iterator[Served]:
    """Start a server with two API keys, and with limited memory for each of its processes."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        keys = Path(folder) / "keys.toml"
        keys.write_text(_KEYS)
        environment = {**_SETTINGS, "NEREID_API_KEY_FILE": str(keys)}
        served = Served(environment=environment, arguments=["--log-level=warning"])
        with limited_memory(_MEMORY_LIMIT):  # processes keep the limit with which they start
            stack.enter_context(served)
        yield served


@contextmanager
def limited_memory(num_bytes: int) -> Iterator[None]:
    """Limit the private memory (RLIMIT_DATA) of each process that is started in the context."""
    previous = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, previous[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, previous)


def stored_response(port: int) -> str:
    """Create a response of the well-behaved client, and return its id."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {_NEIGHBOUR}"}
    body = json.dumps({"input": "my secret", "max_output_tokens": 16}).encode()
    request = Request("POST", "/v1/responses", body, headers)
    outcome = exchange(port, request, limit_s=60)
    if outcome.status != 200:
        raise RuntimeError(f"the server rejected the first response: {outcome}")
    response_id: str = json.loads(outcome.text)["id"]
    return response_id


def _warnings(log: str) -> str:
    lines = [line for line in log.splitlines() if "Error" in line or "nereid: " in line]
    return "\n".join(lines[-40:])


def main() -> int:
    """Run the program and return the exit code."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    add("--only", default="", help="run the attacks whose kind or name contains this text")
    add("--list", action="store_true", help="print the attacks and exit")
    args = parser.parse_args()
    by_name = {f"{one.kind}: {one.name}": one for one in all_attacks()}
    command_line.check_word(parser, "--only", args.only, by_name)
    attacks = [one for name, one in by_name.items() if args.only in name]
    if args.list:
        for attack in attacks:
            print(f"{attack.kind}: {attack.name}")
        print(f"{len(attacks)} attacks")
        return 0
    text, has_passed = run(attacks)
    print(text)
    return 0 if has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
