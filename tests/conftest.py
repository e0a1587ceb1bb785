"""Configuration of pytest for all tests: hypothesis, fixtures, order of files, leftover processes.

By default, hypothesis generates the same examples in each run. To generate other examples, run
`pytest --hypothesis-profile=exploring`.
"""

import contextlib
import gc
import os
import signal
import time
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings

# On a busy machine, any example can take long. Slow examples therefore do not fail a test.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("exploring", **PATIENT)
settings.register_profile("repeatable", derandomize=True, **PATIENT)
settings.load_profile("repeatable")

# The files of each of these groups share a server. pytest-xdist runs a group in one process,
# because every process would start the server again, which takes about 20 s.
SHARED_SERVERS = {
    "the server of the fixture `served`": (
        *("tests/docs/test_pages.py", "tests/e2e/test_anthropic.py", "tests/e2e/test_cancel.py"),
        "tests/e2e/test_ensemble.py",
        *("tests/e2e/test_examples.py", "tests/e2e/test_openai.py", "tests/e2e/test_output.py"),
        *("tests/e2e/test_parsed.py", "tests/e2e/test_pooling.py", "tests/e2e/test_rag.py"),
        *("tests/e2e/test_responses.py", "tests/e2e/test_strict.py", "tests/e2e/test_faults.py"),
        *("tests/e2e/test_playground.py", "tests/e2e/test_described_requests.py"),
    ),
    "the fork server of the fixture `fork_server`": (
        *("tests/e2e/test_visual_pooling.py", "tests/e2e/test_reload.py"),
        *("tests/e2e/test_images.py", "tests/e2e/test_gguf_and_lora.py"),
        "tests/e2e/test_several_models.py",
    ),
    "the server of tests/fuzz": (
        *("tests/fuzz/test_grammars.py", "tests/fuzz/test_http.py"),
        *("tests/fuzz/test_images.py", "tests/fuzz/test_tensors.py"),
    ),
}
_GROUP_OF_FILE = {file: group for group, files in SHARED_SERVERS.items() for file in files}
_LEFTOVER_LIMIT_S = 15.0


@pytest.fixture(scope="session")
def served():
    """The demo models on a real Triton server with the OpenAI frontend.

    The fixture also checks how the server ends: on SIGTERM, `nereid serve` must end all of its
    processes and return exit code 0.
    """
    # The imports are here because the tests of parsers/ use this file, but run without psutil.
    import psutil

    from loadtest.server.served import Served

    with Served(arguments=["--log-level=warning"]) as running:
        yield running
        children = psutil.Process(running.process.pid).children(recursive=True)
        # The children are tritonserver, its stubs, the engine, two workers and the frontend.
        assert len(children) >= 6
        assert running.stop() == 0
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive


@pytest.fixture(scope="session")
def fork_server():
    """The environment variable that makes the servers of several tests use one fork server.

    All other servers, such as the server of the fixture `served`, start their own fork server,
    which is the default of `nereid serve`.
    """
    # The import is here because the tests of parsers/ use this file, but run without psutil.
    from fakes.shared_fork_server import run_fork_server

    with run_fork_server() as variable:
        yield variable


# ---- garbage collection


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Exclude the objects of all imported modules and collected tests from garbage collections.

    Otherwise, each garbage collection would visit half a million objects, which takes about 0.1 s.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


# ---- the order of the files


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Sort the tests: first the groups with a shared server, then other servers, then the rest.

    The many short files without a server run last, so that all processes stay busy to the end.
    """
    servers = {item.path for item in items if item.get_closest_marker("triton")}
    groups = list(SHARED_SERVERS)

    def rank(item):
        group = _group_of(item.nodeid)
        if group in SHARED_SERVERS:
            return groups.index(group)
        return len(groups) + (item.path not in servers)

    items.sort(key=rank)


def _group_of(nodeid):
    """Return the group to which a test's file belongs. Without a group, return the file itself."""
    file = nodeid.split("::", 1)[0]
    return _GROUP_OF_FILE.get(file, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Return a scheduler that gives all files of a group to the same process."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class GroupScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return _group_of(nodeid)

        def remove_node(self, node):
            """Return the test during which a process died. Let other processes run the rest.

            The method of the base class would run the crashing test again in up to eight processes.
            """
            units = self.assigned_work.pop(node)
            waiting = {scope: unit for scope, unit in units.items() if not all(unit.values())}
            if not waiting:
                return None
            first = next(iter(waiting.values()))
            crashed = next(nodeid for nodeid, has_ended in first.items() if not has_ended)
            first[crashed] = True
            self.workqueue.update(waiting)
            for other in self.nodes:
                self._reschedule(other)
            return crashed

    # Otherwise, xdist would sort the files by their number of tests.
    config.option.loadscopereorder = False
    return GroupScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Stop the server of a group after the group's last test.

    pytest would stop the server only after all tests. Until then, the idle server would use 4 % of
    a core. The argument `nextitem=None` makes pytest end all fixtures after this test.
    """
    group = _group_of(item.nodeid)
    if group not in SHARED_SERVERS or nextitem is None or group == _group_of(nextitem.nodeid):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    runtestprotocol(item, nextitem=None)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


# ---- processes that outlive the tests


def pytest_terminal_summary(terminalreporter, config):
    """Fail the run if a test left a process running, and end that process."""
    scheduler = config.pluginmanager.getplugin("dsession")
    if scheduler is None or not hasattr(scheduler, "nodemanager"):
        return  # only pytest-xdist sets the environment variable that marks the processes
    mark = f"PYTEST_XDIST_TESTRUNUID={scheduler.nodemanager.testrunuid}\0".encode()
    deadline = time.monotonic() + _LEFTOVER_LIMIT_S
    while (left := _marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid, command in left.items():
        terminalreporter.write_line(f"A test left this process running: {command}", red=True)
        config.pluginmanager.getplugin("session").exitstatus = pytest.ExitCode.TESTS_FAILED
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _marked_processes(mark):
    """Return the command line of each process that started with `mark` in its environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:  # the process has ended or belongs to another user
            continue
    return found
