"""Run two minutes of mixed load on a server, check every answer, and write a report.

    python -m loadtest.load.load                       # starts `nereid serve` twice and stops it
    python -m loadtest.load.load --seconds 20 --phases numbered
    python -m loadtest.load.load --url http://127.0.0.1:9000       # uses a running server

The phase `numbered` uses a scripted engine that returns numbered tokens, so that a token that is
lost, repeated, swapped or cut off can be recognised by its number. The phase `model` uses the demo
models. There, each answer must equal the first answer to the same request. This phase adds tools,
schemas, embeddings and reranking.
After each phase, the server must be idle: no request, no used KV cache block, no shared memory and
no process may remain. The exit code is 1 if any check failed, and the failures are listed.

locust generates the load in a process of its own. The scenarios are in locustfile.py.
"""

import argparse
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest import command_line
from loadtest.load import numbered_answers, records, report_page, report_tables
from loadtest.load.report_tables import Phase
from loadtest.server import gauges, processes
from loadtest.server.served import ALONE, Served

_LOADTEST = Path(__file__).parents[1]
_TRAFFIC = (
    "SteadyChat", "Bursts", "LongPrompts", "SharedPrefixes", "Writers", "GrpcChat", "Fickle",
    "SlowReaders", "Mistaken",
)  # fmt: skip
SCENARIOS = {"numbered": _TRAFFIC, "model": (*_TRAFFIC, "Agents", "Searchers")}
_DRAIN_S = 60.0
_EXIT_LIMIT_S = 10.0
_MAX_SHOWN = 50


@dataclass(frozen=True)
class Stack:
    """The addresses of a server."""

    openai_url: str
    triton_url: str
    grpc_url: str
    metrics_url: str


def main() -> int:
    """Run the phases and write the report. Return 1 if any check failed."""
    args = arguments().parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    phases = []
    if args.url is not None:
        args.phases = ["model"]  # a running server does not have the scripted engine
    for name in args.phases:
        print(f"{name}: {args.seconds / len(args.phases):.0f} s ...", file=sys.stderr, flush=True)
        phases.append(run_phase(name, args))
    print(report_tables.text(phases))
    report_tables.write_csv(args.out, phases)
    report_page.write(args.out / "report.html", phases, "Nereid under load", facts())
    print(f"\nThe report is {args.out / 'report.html'}. The same folder contains CSV files.")
    return verdict(phases)


def verdict(phases: Sequence[Phase]) -> int:
    """Print the failures and return the exit code."""
    failures = [failure for phase in phases for failure in phase.failures]
    for failure in failures[:_MAX_SHOWN]:
        # If a server did not start, the reason is at the end of its output.
        cut = failure if len(failure) < 600 else f"{failure[:200]} ... {failure[-400:]}"
        print(f"FAILED {cut}")
    if len(failures) > _MAX_SHOWN:
        print(f"The report lists {len(failures) - _MAX_SHOWN} more failures.")
    print(f"There were {len(failures)} failures." if failures else "There were no failures.")
    return int(bool(failures))


def run_phase(name: str, args: argparse.Namespace) -> Phase:
    """Run one phase of the load test on one server."""
    phase = Phase(name, _describe(name, args), args.seconds / len(args.phases))
    if args.url is not None:
        load(phase, Stack(args.url, args.triton_url, args.grpc_url, args.metrics_url), args)
        return phase
    try:
        with (
            tempfile.TemporaryDirectory(prefix="nereid-load-") as folder,
            _served(name, Path(folder), args.model, phase) as stack,
        ):
            load(phase, stack, args)
    except RuntimeError as error:  # the server did not start; other phases are still reported
        phase.broken.append(str(error))
    return phase


def _describe(name: str, args: argparse.Namespace) -> str:
    """Return a phrase that describes the server or the models of a phase."""
    if args.url is not None:
        return f"the server at {args.url}"
    if name == "numbered":
        return "a scripted engine that returns numbered tokens"
    return "the demo models" if args.model is None else args.model.name


@contextmanager
def _served(name: str, folder: Path, model: Path | None, phase: Phase) -> Iterator[Stack]:
    """Start a server for a phase, and check that nothing remains after it has stopped."""
    environment = {}
    flags = ["--log-level=warning", "--served-model-name=chat"]
    if name == "numbered":
        model = numbered_answers.make_checkpoint(folder / "recites")
        script = numbered_answers.make_script(folder / "script.json")
        environment = {"NEREID_ENGINE": "scripted", "NEREID_SCRIPT": str(script)}
        environment["NEREID_MAX_NUM_SEQS"] = "12"  # so that some requests of a burst must wait
        flags += ALONE  # no scenario of this phase uses embeddings or reranking
    with Served(model, environment=environment, arguments=flags) as served:
        yield Stack(
            served.openai_url.removesuffix("/v1"),
            served.http_url,
            served.grpc_url,
            f"http://127.0.0.1:{served.metrics_port}/metrics",
        )
        phase.broken += stop(served)


def stop(served: Served) -> list[str]:
    """Stop a server and return sentences about everything that it left behind."""
    assert served.process is not None
    family = psutil.Process(served.process.pid).children(recursive=True)
    code = served.stop()
    _, alive = psutil.wait_procs(family, timeout=_EXIT_LIMIT_S)
    broken = [f"nereid serve ended with exit code {code}."] if code else []
    broken += [f"The process {process.pid} ({process.name()}) did not end." for process in alive]
    broken += [
        f"The shared memory file {name} was not removed."
        for name in processes.shared_memory(served)
    ]
    return broken


def load(phase: Phase, stack: Stack, args: argparse.Namespace) -> None:
    """Run locust, and store its records and failures in `phase`."""
    kept = args.out / f"records-{phase.name}.jsonl"
    log = args.out / f"locust-{phase.name}.log"
    kept.unlink(missing_ok=True)
    command = locust_command(phase, stack, args, kept)
    with gauges.Sampler(stack.metrics_url) as sampler, log.open("w") as output:
        try:
            code = subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=phase.seconds + args.request_limit + _DRAIN_S,
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    phase.samples = sampler.samples
    if kept.exists():
        phase.records = records.read(kept)
    if code not in (0, 1) or not phase.records:
        phase.broken.append(f"The load generator ended with exit code {code}; see {log}.")
    missing = set(scenarios_of(phase.name, args)) - {one.scenario for one in phase.records}
    phase.broken += [f"The scenario {scenario} sent no request." for scenario in sorted(missing)]
    if busy := gauges.wait_for_rest(stack.metrics_url, args.request_limit / 4):
        phase.broken.append(f"The server still uses resources after the load: {busy}")


def scenarios_of(name: str, args: argparse.Namespace) -> Sequence[str]:
    """Return the selected scenarios of a phase."""
    return [one for one in SCENARIOS[name] if not args.scenarios or one in args.scenarios]


def locust_command(phase: Phase, stack: Stack, args: argparse.Namespace, kept: Path) -> list[str]:
    """Return the command that runs `--scale` users of each scenario."""
    chosen = scenarios_of(phase.name, args)
    num_users = len(chosen) * args.scale
    options = {
        "users": num_users,
        "spawn-rate": num_users,
        "run-time": f"{max(1, round(phase.seconds))}s",
        "host": stack.openai_url,
        "triton-url": stack.triton_url,
        "grpc-url": stack.grpc_url,
        "embedding-model": args.embedding_model,
        "rerank-model": args.rerank_model,
        "seed": args.seed,
        "request-limit": args.request_limit,
        "records": kept,
    }
    command = [sys.executable, "-m", "locust", "-f", str(_LOADTEST / "locustfile.py"), *chosen]
    command += ["--headless", "--only-summary"]
    command += [f"--{name}={value}" for name, value in options.items()]
    if args.arrivals:
        command += [f"--arrivals={args.arrivals}", f"--rate={args.rate}"]
    return command + (["--numbered"] if phase.name == "numbered" else [])


def facts() -> list[str]:
    """Return lines that describe the time, the commit, the machine and the command."""
    when = datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    cpus = len(os.sched_getaffinity(0))
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=_LOADTEST, capture_output=True, text=True
    ).stdout.strip()
    machine = f"{cpus} CPUs ({platform.machine()}), Python {platform.python_version()}"
    return [
        f"{when}, commit {commit or 'unknown'}, {machine}",
        "python -m loadtest.load.load " + " ".join(sys.argv[1:]),
    ]


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    out = _LOADTEST / "results" / time.strftime("%Y%m%d-%H%M%S")
    add("--seconds", type=float, default=120.0, help="duration of the load, shared by the phases")
    add("--phases", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    add(
        "--scenarios",
        nargs="+",
        choices=SCENARIOS["model"],
        metavar="NAME",
        help="run only these classes of locustfile.py",
    )
    add("--scale", type=int, default=1, help="number of users of each scenario")
    add(
        "--arrivals",
        choices=["closed", "poisson", "constant"],
        help="arrival process that replaces the one of each scenario",
    )
    add("--rate", type=float, default=0.0, help="requests/s of each user, with --arrivals")
    add("--seed", type=int, default=0, help="seed of all random choices")
    add("--request-limit", type=float, default=60.0, help="time limit of a request in seconds")
    add("--model", type=Path, help="checkpoint of the phase `model` (default: the demo model)")
    add("--out", type=Path, default=out, help="folder for the report (default: %(default)s)")
    add("--embedding-model", default="embed", help="name of the embedding model in the API")
    add("--rerank-model", default="rerank", help="name of the reranker in the API")
    add("--url", help="address of a running server's OpenAI API; no server is started then")
    add("--triton-url", default="http://127.0.0.1:8000", help="HTTP endpoint of that server")
    add("--grpc-url", default="127.0.0.1:8001", help="gRPC endpoint of that server")
    add("--metrics-url", default="http://127.0.0.1:8002/metrics", help="metrics of that server")
    return parser


if __name__ == "__main__":
    sys.exit(main())
