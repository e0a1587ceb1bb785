# SPDX-License-Identifier: Apache-2.0
"""Two minutes of mixed load on a server of its own, every answer checked, and a report.

    python -m loadtest.load.load                       # starts `nereid serve` twice and stops it
    python -m loadtest.load.load --seconds 20 --phases numbered
    python -m loadtest.load.load --url http://127.0.0.1:9000       # on one that runs already

Phase `numbered` runs on a scripted engine that recites numbered tokens: a token that is lost,
doubled, swapped or cut off shows by its number. Phase `model` runs on the demo models, where each
answer must be the first one to the same request, and adds tools, schemas, embeddings and reranking.
After each, nothing may be in use: no request, no block of the KV cache, no shared memory, no
process. Exit code 1, with a list, when something of this did not hold.

The load itself is locust's, in a process of its own: see locustfile.py for the scenarios.
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

from loadtest.load import numbered_answers, records, report_page, report_tables
from loadtest.load.report_tables import Phase
from loadtest.server import gauges, processes
from loadtest.server.served import Served

_LOADTEST = Path(__file__).parents[1]
_TRAFFIC = (
    "SteadyChat", "Bursts", "LongPrompts", "SharedPrefixes", "Writers", "GrpcChat", "Fickle",
    "SlowReaders", "Mistaken",
)  # fmt: skip
SCENARIOS = {"numbered": _TRAFFIC, "model": (*_TRAFFIC, "Agents", "Searchers")}
_DRAIN_S = 120.0
_EXIT_LIMIT_S = 10.0
_MAX_SHOWN = 50


@dataclass(frozen=True)
class Stack:
    """Where a server listens."""

    openai_url: str
    triton_url: str
    grpc_url: str
    metrics_url: str


def main() -> int:
    """Run the phases, report, and judge; 1 when anything was wrong."""
    args = arguments().parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    phases = []
    if args.url is not None:
        args.phases = ["model"]  # nobody knows what another server should recite
    for name in args.phases:
        print(f"{name}: {args.seconds / len(args.phases):.0f} s ...", file=sys.stderr, flush=True)
        phases.append(run_phase(name, args))
    print(report_tables.text(phases))
    report_tables.write_csv(args.out, phases)
    report_page.write(args.out / "report.html", phases, "Nereid under load", facts())
    print(f"\nreport: {args.out / 'report.html'}, with CSV files beside it")
    return verdict(phases)


def verdict(phases: Sequence[Phase]) -> int:
    """Print what was wrong; the exit code."""
    failures = [failure for phase in phases for failure in phase.failures]
    for failure in failures[:_MAX_SHOWN]:
        # The reason of a server that did not start stands at the end of what it said.
        cut = failure if len(failure) < 600 else f"{failure[:200]} ... {failure[-400:]}"
        print(f"FAILED {cut}")
    if len(failures) > _MAX_SHOWN:
        print(f"and {len(failures) - _MAX_SHOWN} more: see the report")
    print(f"{len(failures)} failures" if failures else "nothing was wrong")
    return int(bool(failures))


def run_phase(name: str, args: argparse.Namespace) -> Phase:
    """Load on one server, until it is at rest again."""
    phase = Phase(name, _told(name, args), args.seconds / len(args.phases))
    if args.url is not None:
        load(phase, Stack(args.url, args.triton_url, args.grpc_url, args.metrics_url), args)
        return phase
    try:
        with (
            tempfile.TemporaryDirectory(prefix="nereid-load-") as folder,
            _served(name, Path(folder), args.model, phase) as stack,
        ):
            load(phase, stack, args)
    except RuntimeError as error:  # it did not start; what other phases found is told even so
        phase.broken.append(str(error))
    return phase


def _told(name: str, args: argparse.Namespace) -> str:
    """What a phase runs on, in words."""
    if args.url is not None:
        return f"the server at {args.url}"
    if name == "numbered":
        return "a scripted engine recites numbered tokens"
    return "the demo models" if args.model is None else args.model.name


@contextmanager
def _served(name: str, folder: Path, model: Path | None, phase: Phase) -> Iterator[Stack]:
    """A server for a phase; when it has stopped, nothing of it may be left."""
    environment = {}
    if name == "numbered":
        model = numbered_answers.make_checkpoint(folder / "recites")
        script = numbered_answers.make_script(folder / "script.json")
        environment = {"NEREID_ENGINE": "scripted", "NEREID_SCRIPT": str(script)}
        environment["NEREID_MAX_NUM_SEQS"] = "12"  # so that bursts have to wait
    flags = ["--log-level=warning", "--served-model-name=chat"]
    with Served(model, environment=environment, arguments=flags) as served:
        yield Stack(
            served.openai_url.removesuffix("/v1"),
            served.http_url,
            served.grpc_url,
            f"http://127.0.0.1:{served.metrics_port}/metrics",
        )
        phase.broken += stop(served)


def stop(served: Served) -> list[str]:
    """Stop a server; what it left behind."""
    assert served.process is not None
    family = psutil.Process(served.process.pid).children(recursive=True)
    code = served.stop()
    _, alive = psutil.wait_procs(family, timeout=_EXIT_LIMIT_S)
    broken = [f"nereid serve ended with {code}"] if code else []
    broken += [f"process {process.pid} stayed: {process.name()}" for process in alive]
    broken += [f"shared memory stayed: {name}" for name in processes.shared_memory(served)]
    return broken


def load(phase: Phase, stack: Stack, args: argparse.Namespace) -> None:
    """Let locust run, and enter into the phase what came of it."""
    kept = args.out / f"records-{phase.name}.jsonl"
    log = args.out / f"locust-{phase.name}.log"
    kept.unlink(missing_ok=True)
    command = locust_command(phase, stack, args, kept)
    with gauges.Sampler(stack.metrics_url) as sampler, log.open("w") as output:
        try:
            code = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=phase.seconds + _DRAIN_S
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    phase.samples = sampler.samples
    if kept.exists():
        phase.records = records.read(kept)
    if code not in (0, 1) or not phase.records:
        phase.broken.append(f"the load generator ended with {code}: see {log}")
    missing = set(scenarios_of(phase.name, args)) - {one.scenario for one in phase.records}
    phase.broken += [f"{scenario} sent nothing" for scenario in sorted(missing)]
    if busy := gauges.wait_for_rest(stack.metrics_url):
        phase.broken.append(f"leaked, and still in use after the load: {busy}")


def scenarios_of(name: str, args: argparse.Namespace) -> Sequence[str]:
    """The scenarios of a phase, or those of them that were asked for."""
    return [one for one in SCENARIOS[name] if not args.scenarios or one in args.scenarios]


def locust_command(phase: Phase, stack: Stack, args: argparse.Namespace, kept: Path) -> list[str]:
    """One user of each scenario, times the scale."""
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
        "records": kept,
    }
    command = [sys.executable, "-m", "locust", "-f", str(_LOADTEST / "locustfile.py"), *chosen]
    command += ["--headless", "--only-summary"]
    command += [f"--{name}={value}" for name, value in options.items()]
    if args.arrivals:
        command += [f"--arrivals={args.arrivals}", f"--rate={args.rate}"]
    return command + (["--numbered"] if phase.name == "numbered" else [])


def facts() -> list[str]:
    """Where and how it ran."""
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
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seconds", type=float, default=120.0, help="of load, shared by the phases")
    add("--phases", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    add("--scenarios", nargs="+", metavar="NAME", help="only these classes of locustfile.py")
    add("--scale", type=int, default=1, help="users of each scenario; each brings its rate")
    add("--arrivals", choices=["closed", "poisson", "constant"], help="instead of their own")
    add("--rate", type=float, default=0.0, help="requests/s of each user, with --arrivals")
    add("--seed", type=int, default=0, help="of all chance")
    add("--model", type=Path, help="checkpoint of phase `model` (default: the demo)")
    add("--out", type=Path, default=_LOADTEST / "results" / time.strftime("%Y%m%d-%H%M%S"))
    add("--embedding-model", default="embed", help="its name in the API")
    add("--rerank-model", default="rerank", help="its name in the API")
    add("--url", help="OpenAI API of a server that runs already; nothing is started")
    add("--triton-url", default="http://127.0.0.1:8000", help="of that server")
    add("--grpc-url", default="127.0.0.1:8001", help="of that server")
    add("--metrics-url", default="http://127.0.0.1:8002/metrics", help="of that server")
    return parser


if __name__ == "__main__":
    sys.exit(main())
