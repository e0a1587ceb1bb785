"""Tests that each command in the README, the quickstart and the how-to guides runs as printed."""

import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Container, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from docs.blocks import (
    BIN,
    ROOT,
    Block,
    Ports,
    printed,
    read_blocks,
    run_block,
    unaccounted,
    unprinted_lines,
)

from loadtest.server.served import Served, free_ports

PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    ROOT / "docs" / "quickstart.md",
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
]
_START_TIMEOUT_S = 300


class Servers:
    """The servers that the pages start. Each command is started only once.

    The command `make serve` uses the server `main`, which is already running. A server that no
    later page needs is stopped while the next pages run, because an idle server uses 4 % of a core.
    """

    def __init__(
        self, served: Served, fork_server: Mapping[str, str], folder: Path, stack: ExitStack
    ) -> None:
        self.main = Ports(
            served.openai_port, served.http_port, served.grpc_port, served.metrics_port
        )
        self._served = served
        self._fork_server = fork_server
        self._logs: dict[Ports, Path] = {}
        self._folder = folder
        self._stack = stack
        self._started: dict[str, Ports] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._stopping: list[subprocess.Popen[bytes]] = []
        self._children: list[psutil.Process] = []
        stack.callback(self._stop)

    def start(self, block: Block, current: Ports) -> Ports:
        """Start the server of a block if it is not running. Return its ports when it is ready.

        A block that starts a frontend connects the frontend to the Triton server with the ports
        `current`.
        """
        command = printed(block.text, current, self._folder).strip()
        if command == "make serve":
            return self.main
        if command not in self._started:
            self._started[command] = self._start(block, command, current)
        return self._started[command]

    def output_of(self, ports: Ports) -> str:
        """Return the output of the server with these ports."""
        return self._served.output if ports == self.main else self._logs[ports].read_text()

    def _start(self, block: Block, command: str, current: Ports) -> Ports:
        """Start a server with free ports, wait until it is ready, and return its ports."""
        command, ports = _with_free_ports(command, current)
        # With `exec`, the server replaces the shell, so that it gets the signals.
        script = re.sub(r"(\S+/(?:nereid|tritonserver|python) )", r"exec \1", command)
        log = Path(self._stack.enter_context(tempfile.TemporaryDirectory())) / "log"
        with log.open("w") as out:
            process = subprocess.Popen(
                ["bash", "-euc", script],
                cwd=ROOT,
                env={k: v for k, v in os.environ.items() if not k.startswith("NEREID_")}
                | self._fork_server,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        self._running[block.text] = process
        self._logs[ports] = log

        url = f"http://127.0.0.1:{ports.openai}/health/ready"
        if "tritonserver" in command:
            url = f"http://127.0.0.1:{ports.http}/v2/health/ready"
        expected_line = "nereid: ready" if "nereid serve" in command else ""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while expected_line not in log.read_text() or not _answers(url):
            assert process.poll() is None, f"{block.place}: {command}\n{log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"{block.place}: not ready\n{log.read_text()}"
            time.sleep(0.1)
        return ports

    def stop_all_except(self, needed: Container[str]) -> None:
        """Send SIGTERM to each server whose block has a text that is not in `needed`.

        A frontend is stopped before its Triton server, because it was started later.
        """
        for text in reversed(list(self._running)):
            if text in needed:
                continue
            process = self._running.pop(text)
            self._stopping.append(process)
            if process.poll() is None:
                self._children += psutil.Process(process.pid).children(recursive=True)
                process.send_signal(signal.SIGTERM)

    def _stop(self) -> None:
        """Stop all servers.

        Raises: AssertionError if a server leaves one of its processes running.
        """
        self.stop_all_except(())
        for process in self._stopping:
            process.wait(120)
        _, alive = psutil.wait_procs(self._children, timeout=60)
        assert not alive


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=10).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def servers(served, fork_server, tmp_path_factory):
    with ExitStack() as stack:
        yield Servers(served, fork_server, tmp_path_factory.mktemp("nereid"), stack)


def _with_free_ports(command: str, current: Ports) -> tuple[str, Ports]:
    """Replace the ports in the command of a server by free ports. Return the command and its ports.

    If the command starts only a frontend (`nereid_client`), the other ports are those of the Triton
    server in `current`. Example: "python -m nereid_client --port 8000" becomes
    "python -m nereid_client --port 41234".
    """
    ports = Ports(*free_ports(4))
    flags = {
        "--openai-port": ports.openai,
        "--http-port": ports.http,
        "--grpc-port": ports.grpc,
        "--metrics-port": ports.metrics,
    }
    if "tritonserver" in command:
        del flags["--openai-port"]
    elif "nereid_client" in command:
        ports = replace(current, openai=ports.openai)
        flags = {"--port": ports.openai}
    for flag, number in flags.items():
        command, num_replaced = re.subn(rf"{flag}[= ]\d+", f"{flag} {number}", command)
        if not num_replaced:
            command += f" {flag} {number}"
    return command, ports


def _check_printed_lines(block: Block, servers: Servers, ports: Ports) -> None:
    """Wait for at most ten seconds until a server has printed all lines of a block."""
    deadline = time.monotonic() + 10
    while lines := unprinted_lines(block, servers.output_of(ports)):
        message = f"{block.place}: the server did not print {lines}"
        assert time.monotonic() < deadline, message
        time.sleep(0.1)


@pytest.mark.triton
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run_as_printed(page, servers, tmp_path):
    ports = servers.main
    for block in read_blocks(page):
        if block.mark == "serves":
            ports = servers.start(block, ports)
        elif block.mark == "main":
            ports = servers.main
        elif block.mark == "printed":
            _check_printed_lines(block, servers, ports)
        if block.is_run and block.mark != "serves":
            run_block(block, ports, tmp_path)

    later_pages = PAGES[PAGES.index(page) + 1 :]
    servers.stop_all_except([block.text for later in later_pages for block in read_blocks(later)])


def test_make_serve_is_the_command_that_the_tests_start():
    dry = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "serve"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert dry.stdout.splitlines()[-1].startswith("exec .venv/bin/nereid serve ")
    assert (BIN / "nereid").exists()


def test_every_block_is_run_or_skipped_for_a_reason(capsys):
    blocks = [block for page in PAGES for block in read_blocks(page)]
    assert not [problem for block in blocks if (problem := unaccounted(block))]
    with capsys.disabled():
        for block in blocks:
            if block.mark == "skip":
                print(f"\nnot run: {block.place}: {block.reason}", end="")  # noqa: T201


def test_the_links_of_the_readme_lead_to_files():
    readme = ROOT / "README.md"
    source = readme.read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", source)
    assert targets
    assert not [target for target in targets if not (ROOT / target).exists()]
    assert len(source.splitlines()) <= 100
