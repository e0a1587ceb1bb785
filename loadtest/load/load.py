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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest.command_line import Option, parse_command_line
from loadtest.load import numbered_answers, records, report_page, report_tables
from loadtest.load.report_tables import Phase
from loadtest.load.scripted_server import scripted_server
from loadtest.load.shared_options import SHARED_OPTIONS
from loadtest.server import gauges, processes
from loadtest.server.served import Served

_LOADTEST = Path(__file__).parents[1]
_TRAFFIC = (
    "SteadyChat", "Bursts", "LongPrompts", "SharedPrefixes", "Writers", "GrpcChat", "Fickle",
    "SlowReaders", "Mistaken",
)  # fmt: skip
SCENARIOS = {"numbered": _TRAFFIC, "model": (*_TRAFFIC, "Agents", "Searchers")}
_DRAIN_S = 60.0
_EXIT_LIMIT_S = 10.0
_MAX_SHOWN = 50
OPTIONS = {
    "--seconds": Option(120.0, "duration of the load, shared by the phases"),
    "--phases": Option([], "run only these phases", choices=list(SCENARIOS)),
    "--scenarios": Option([], "run only these classes of locustfile.py", SCENARIOS["model"]),
    "--scale": Option(1, "number of users of each scenario"),
    "--model": Option(None, "checkpoint of the phase `model` (default: the demo)", value_type=Path),
    "--out": Option(_LOADTEST / "results" / time.strftime("%Y%m%d-%H%M%S"), "folder of the report"),
    "--url": Option(None, "address of a running server's OpenAI API; no server is started then"),
    **SHARED_OPTIONS,
    "--metrics-url": Option("http://127.0.0.1:8002/metrics", "metrics of that server"),
}


@dataclass(frozen=True)
class Stack:
    """The addresses of a server."""

    openai_url: str
    triton_url: str
    grpc_url: str
    metrics_url: str


def main() -> int:
    """Run the phases and write the report. Return 1 if any check failed."""
    args = parse_command_line(__doc__, OPTIONS)
    args.out.mkdir(parents=True, exist_ok=True)
    # A running server does not have the scripted engine of the other phase.
    names = args.phases or list(SCENARIOS) if args.url is None else ["model"]
    seconds = args.seconds / len(names)
    phases = []
    for name in names:
        print(f"{name}: {seconds:.0f} s ...", file=sys.stderr, flush=True)
        phases.append(run_phase(name, seconds, args))
    print(report_tables.text(phases))
    report_tables.write_csv(args.out, phases)
    page = report_page.page(phases, "Nereid under load", facts())
    (args.out / "report.html").write_text(page, encoding="utf-8")
    print(f"\nThe report is {args.out / 'report.html'}. The same folder contains CSV files.")
    return verdict(phases)


def verdict(phases: Sequence[Phase]) -> int:
    """Print the failures and return the exit code."""
    failures = [failure for phase in phases for failure in phase.failures]
    for failure in failures[:_MAX_SHOWN]:
        # If a server did not start, the reason is at the end of its output.
        shown = failure if len(failure) < 600 else f"{failure[:200]} ... {failure[-400:]}"
        print(f"FAILED {shown}")
    if len(failures) > _MAX_SHOWN:
        print(f"The report lists {len(failures) - _MAX_SHOWN} more failures.")
    print(f"There were {len(failures)} failures." if failures else "There were no failures.")
    return int(bool(failures))


def run_phase(name: str, seconds: float, args: argparse.Namespace) -> Phase:
    """Run one phase of the load test on the server at `--url` or on a new server."""
    if args.url is not None:
        phase = Phase(name, f"the server at {args.url}", seconds)
        load(phase, Stack(args.url, args.triton_url, args.grpc_url, args.metrics_url), args)
        return phase
    phase = Phase(name, _description(name, args.model), seconds)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="nereid-load-") as folder,
            _server(name, Path(folder), args.model) as served,
        ):
            metrics_url = f"http://127.0.0.1:{served.metrics_port}/metrics"
            urls = (served.frontend_url, served.http_url, served.grpc_url, metrics_url)
            load(phase, Stack(*urls), args)
            phase.broken += stop(served)
    except RuntimeError as error:  # the server did not start; other phases are still reported
        phase.broken.append(str(error))
    return phase


def _description(phase_name: str, model: Path | None) -> str:
    """Return a phrase that describes the models of a phase."""
    if phase_name == "numbered":
        return "a scripted engine that returns numbered tokens"
    return "the demo models" if model is None else model.name


def _server(phase_name: str, folder: Path, model: Path | None) -> Served:
    """Create the server of a phase, but do not start it. Its files are in `folder`."""
    flags = ["--log-level=warning", "--served-model-name=chat"]
    if phase_name == "model":
        return Served(model, arguments=flags)
    # No scenario of the phase `numbered` uses embeddings or reranking.
    return scripted_server(
        folder,
        numbered_answers.script(),
        model=numbered_answers.make_checkpoint(folder / "recites"),
        settings={"NEREID_MAX_NUM_SEQS": "12"},  # so that some requests of a burst must wait
        flags=flags,
    )


def stop(served: Served) -> list[str]:
    """Stop a server and return sentences about everything that it left behind."""
    assert served.process is not None
    children = psutil.Process(served.process.pid).children(recursive=True)
    code = served.stop()
    _, alive = psutil.wait_procs(children, timeout=_EXIT_LIMIT_S)
    files = processes.shared_memory(served)
    return [
        *([f"nereid serve ended with exit code {code}."] if code else []),
        *(f"The process {process.pid} ({process.name()}) did not end." for process in alive),
        *(f"The shared memory file {name} was not removed." for name in files),
    ]


def load(phase: Phase, stack: Stack, args: argparse.Namespace) -> None:
    """Run locust, and store its records and failures in `phase`."""
    records_path = args.out / f"records-{phase.name}.jsonl"
    log_path = args.out / f"locust-{phase.name}.log"
    records_path.unlink(missing_ok=True)
    command = locust_command(phase, stack, args, records_path)
    with gauges.Sampler(stack.metrics_url) as sampler:
        code = _run(command, log_path, phase.seconds + args.request_limit + _DRAIN_S)
    phase.samples = sampler.samples
    if records_path.exists():
        phase.records = records.read(records_path)
    if code not in (0, 1) or not phase.records:
        phase.broken.append(f"The load generator ended with exit code {code}; see {log_path}.")
    missing = set(scenarios_of(phase.name, args)) - {one.scenario for one in phase.records}
    phase.broken += [f"The scenario {scenario} sent no request." for scenario in sorted(missing)]
    if busy := gauges.wait_for_rest(stack.metrics_url, args.request_limit / 4):
        phase.broken.append(f"The server still uses resources after the load: {busy}")


def _run(command: list[str], log_path: Path, timeout_s: float) -> int:
    """Run a command, write its output to a file, and return its exit code; -1 after the timeout."""
    with log_path.open("w") as log:
        try:
            return subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, timeout=timeout_s
            ).returncode
        except subprocess.TimeoutExpired:
            return -1


def scenarios_of(phase_name: str, args: argparse.Namespace) -> Sequence[str]:
    """Return the selected scenarios of a phase."""
    return [one for one in SCENARIOS[phase_name] if not args.scenarios or one in args.scenarios]


def locust_command(
    phase: Phase, stack: Stack, args: argparse.Namespace, records_path: Path
) -> list[str]:
    """Return the command that runs `--scale` users of each scenario."""
    scenarios = scenarios_of(phase.name, args)
    num_users = len(scenarios) * args.scale
    options = {
        "--users": num_users,
        "--spawn-rate": num_users,
        "--run-time": f"{max(1, round(phase.seconds))}s",
        "--host": stack.openai_url,
        "--records": records_path,
    }
    values = {
        name: getattr(args, name.removeprefix("--").replace("-", "_")) for name in SHARED_OPTIONS
    }
    options |= {name: value for name, value in values.items() if value is not None}
    options |= {"--triton-url": stack.triton_url, "--grpc-url": stack.grpc_url}
    flags = ["--headless", "--only-summary"] + ["--numbered"] * (phase.name == "numbered")
    command = [sys.executable, "-m", "locust", "-f", str(_LOADTEST / "locustfile.py")]
    return [*command, *scenarios, *flags, *(f"{name}={value}" for name, value in options.items())]


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


if __name__ == "__main__":
    sys.exit(main())
