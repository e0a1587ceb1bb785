"""Tests that `nereid serve` restarts dead processes, and finishes requests before it stops.

Several tests share a server, because each start takes some seconds. The last test of each server
stops the server.
"""

import http.client
import json
import signal
import threading
import time
import urllib.error
import urllib.request

import psutil
import pytest
from fakes.live_frontend import wait_for
from fakes.live_server import NEREID, serve

pytestmark = pytest.mark.triton


def url_of(served, path):
    return f"http://127.0.0.1:{served.ports['openai']}{path}"


def ask(served, text, stream=False, on_first_line=lambda: None):
    """Send a chat request. Return the HTTP status and the text of the response.

    The status is None if the connection failed, and 0 for an error without the header Retry-After.
    The function calls `on_first_line` when the first line of the response has arrived.
    """
    body = {"messages": [{"role": "user", "content": text}], "stream": stream}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        url_of(served, "/v1/chat/completions"), json.dumps(body).encode(), headers
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            first_line = answer.readline()
            on_first_line()
            return answer.status, (first_line + answer.read()).decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code if "Retry-After" in error.headers else 0, error.read().decode()
    except (OSError, http.client.HTTPException):
        return None, ""


def num_running(served):
    """Return the number of requests that are running in the frontend."""
    try:
        with urllib.request.urlopen(url_of(served, "/health/ready"), timeout=60) as page:
            text = page.read()
    except urllib.error.HTTPError as error:  # the status 503: the Triton server does not answer
        with error:
            text = error.read()
    return json.loads(text)["num_requests"]


class BackgroundRequest(threading.Thread):
    """A thread that sends a request.

    When the constructor returns, the request is running or has ended.
    """

    def __init__(self, served, text, stream=False, num_others=0):
        """Send the request as soon as exactly `num_others` other requests are running."""
        super().__init__(daemon=True)
        self._has_started = threading.Event()
        self._arguments = (served, text, stream, self._has_started.set)
        # The frontend may still count the warm-up request of `nereid serve` for a moment.
        wait_for(lambda: num_running(served) == num_others)
        self.start()
        if stream:
            wait_for(lambda: self.has_started or not self.is_alive())
        else:
            wait_for(lambda: not self.is_alive() or num_running(served) > num_others)

    @property
    def has_started(self):
        """Whether the first line of the response has arrived."""
        return self._has_started.is_set()

    def run(self):
        self.status, self.text = ask(*self._arguments)
        self.ended = time.monotonic()

    def wait(self):
        """Wait until the request has ended."""
        self.join(120)
        assert not self.is_alive(), "the request hangs"


def begin_stream(served, text):
    """Send a streaming request, wait until its stream has begun, and return the request.

    If the server refuses the request, send it again. A server that was just restarted may refuse a
    request. On a busy machine, the supervisor may also restart a server that is only slow.
    """
    deadline = time.monotonic() + 120
    while not (request := BackgroundRequest(served, text, stream=True)).has_started:
        request.wait()
        assert time.monotonic() < deadline, (request.status, request.text)
        time.sleep(0.2)
    return request


def kill(served, word):
    """Kill the process whose command line contains `word`, and return the time of the kill."""
    served.descendants = psutil.Process(served._process.pid).children(recursive=True)
    served.child(word).kill()
    return time.monotonic()


def answers_again(served):
    """Send a request, and return whether it was answered rather than refused."""
    status, _ = ask(served, "hi")
    assert status in (200, 503, None)
    return status == 200


# The echo model answers "a b b ..." and waits 0.05 s before each "b", 100 s together.
ENDLESS = "a " + "<pause 0.05>b " * 2000


# ---- a server whose processes are killed


@pytest.fixture(scope="module")
def victim(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("victim"), "--restart-backoff=0") as running:
        running.wait_until_ready()
        yield running


def test_a_frontend_that_is_killed_is_started_again_and_the_server_goes_on(victim):
    server = victim.child("bin/tritonserver")
    kill(victim, "-m nereid_client")
    wait_for(lambda: answers_again(victim), timeout_s=120)
    assert server.is_running()
    assert "the OpenAI frontend was ended by SIGKILL" in "\n".join(victim.lines)
    wait_for(lambda: any("answers again" in line for line in victim.lines))


@pytest.mark.parametrize(("program", "restart"), [("backend_stub", 1), ("bin/tritonserver", 2)])
def test_a_server_or_stub_that_is_killed_is_started_again_and_nobody_waits_for_ever(
    victim, program, restart
):
    num_earlier_lines = len(victim.lines)
    stream = begin_stream(victim, ENDLESS)
    request = BackgroundRequest(victim, ENDLESS, num_others=1)

    killed_at = kill(victim, program)
    stream.wait()
    request.wait()

    assert max(stream.ended, request.ended) - killed_at < 30
    assert stream.status == 200
    last_event = stream.text.strip().split("\n\n")[-1]
    assert json.loads(last_event.removeprefix("data: "))["error"]["code"] == "unavailable"
    assert request.status == 503

    wait_for(lambda: answers_again(victim), timeout_s=120)
    wait_for(lambda: any("answers again" in line for line in victim.lines[num_earlier_lines:]))
    # On a busy machine, a stub of the new server can die, so that the server is restarted again.
    message = f"it is started again now (restart {restart} of 5)"
    reason = next(line for line in victim.lines[num_earlier_lines:] if message in line)
    is_stub_named = "tritonserver: the process of " in reason
    assert is_stub_named == (program == "backend_stub"), reason
    assert [process for process in victim.left() if "stub" in process.name()] == []


def test_a_stop_lets_running_requests_finish_and_takes_no_new_ones(victim, tmp_path):
    may_end = tmp_path / "may-end"
    request = begin_stream(victim, f"a <until {may_end}>b")  # "b" follows once the file exists
    victim.signal(signal.SIGTERM)
    wait_for(lambda: any("to finish, for at most" in line for line in victim.lines))

    status, text = ask(victim, "new")
    assert status == 503
    assert "The server is stopping." in text

    may_end.touch()
    assert victim.wait() == 0
    request.wait()
    assert request.text.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"stop"' in request.text
    assert victim.shared_memory() == []


# ---- a server that is checked for hangs


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    flags = ("--hang-timeout=4", "--drain-timeout=1")
    with serve(tmp_path_factory.mktemp("checked"), *flags) as running:
        running.wait_until_ready()
        yield running


def test_a_server_at_rest_is_not_taken_for_one_that_hangs(checked):
    # First, the server is idle. An idle server must not count as hanging.
    time.sleep(3)
    # This request makes no progress for 5 s, which is longer than the hang timeout. However, the
    # server answers the probes of the supervisor.
    request = BackgroundRequest(checked, "a <pause 5> b")
    request.wait()
    assert request.status == 200
    assert "hangs" not in "\n".join(checked.lines)


def test_a_server_that_hangs_is_started_again(checked):
    checked.child("bin/tritonserver").suspend()
    started = time.monotonic()
    request = BackgroundRequest(checked, "hi")
    request.wait()
    assert request.status == 503
    assert 4 < request.ended - started < 60
    wait_for(lambda: answers_again(checked), timeout_s=120)
    assert "tritonserver hangs" in "\n".join(checked.lines)


def test_a_stop_has_a_limit(checked):
    # The first line of a stream proves that the request is running. The number of running requests
    # is no proof, because it may include a probe of the supervisor.
    request = begin_stream(checked, ENDLESS)
    started = time.monotonic()
    checked.signal(signal.SIGTERM)
    assert checked.wait() == 0
    assert 1 < time.monotonic() - started < 60
    assert "1 request did not finish within 1 s" in "\n".join(checked.lines)
    request.wait()
    assert '"finish_reason":"' not in request.text


# ---- a server that starts at the third attempt, and whose log is on a full disk


def write_triton_server(folder, first_command):
    """Write a script that runs a shell command and then becomes Triton server. Return its path."""
    program = folder / "tritonserver"
    real_server = NEREID.parent / "tritonserver"
    program.write_text(f'#!/bin/bash\n{first_command}\nexec {real_server} "$@"\n')
    program.chmod(0o755)
    return program


@pytest.fixture(scope="module")
def third_attempt(tmp_path_factory):
    """A server whose Triton server starts at the third attempt. Its log file is on a full disk.

    At the first attempt the Triton server crashes, and at the second attempt it waits for its stub.
    """
    folder = tmp_path_factory.mktemp("third")
    has_crashed, has_hung = folder / "crashed", folder / "hung"
    stub = folder / "triton_python_backend_stub"
    stub.symlink_to("/bin/sleep")
    program = write_triton_server(
        folder,
        f"if [ ! -e {has_crashed} ]; then touch {has_crashed}; kill -ABRT $$; fi\n"
        f"if [ ! -e {has_hung} ]; then touch {has_hung}; {stub} 600 & wait; fi",
    )
    flags = ("--restart-backoff=0", "--log-file=/dev/full", f"--tritonserver={program}")
    with serve(folder, *flags) as running:
        running.wait_until_ready()
        yield running


def test_a_server_that_crashes_while_it_starts_is_started_again(third_attempt):
    assert "tritonserver was ended by SIGABRT; it is started again" in "\n".join(
        third_attempt.lines
    )


def test_a_server_that_gives_up_a_stub_while_it_starts_is_started_again(third_attempt):
    assert "waits for the end of a stub process that is still running" in "\n".join(
        third_attempt.lines
    )


def test_a_full_disk_costs_the_log_and_nothing_else(third_attempt):
    assert ask(third_attempt, "hi")[0] == 200


def test_the_second_signal_does_not_wait(third_attempt):
    BackgroundRequest(third_attempt, ENDLESS)
    third_attempt.signal(signal.SIGTERM)
    wait_for(lambda: any("to finish, for at most" in line for line in third_attempt.lines))
    second_signal_at = time.monotonic()
    third_attempt.signal(signal.SIGTERM)
    assert third_attempt.wait() == 0
    # Without the second signal, the server would wait for the default of --drain-timeout, 30 s.
    assert time.monotonic() - second_signal_at < 20
    # Despite the full disk, all messages were printed.
    assert third_attempt.lines[-1] == "nereid: stopped"
    assert "Traceback" not in "\n".join(third_attempt.lines)


# ---- servers of one test


@pytest.mark.long  # test_child_processes.py tests the same detection without a server
def test_a_server_whose_stub_is_unhealthy_while_it_starts_is_started_again(tmp_path):
    has_failed = tmp_path / "failed"
    line = "E1122 10:20:42 1 model.cc:1] Stub process executor_0_0 is not healthy."
    program = write_triton_server(
        tmp_path, f'if [ ! -e {has_failed} ]; then touch {has_failed}; echo "{line}"; exit 1; fi'
    )
    with serve(tmp_path, f"--tritonserver={program}") as running:
        running.wait_until_ready()
        assert "tritonserver ended with exit code 1; it is started again" in "\n".join(
            running.lines
        )
        assert answers_again(running)


@pytest.mark.long  # test_child_processes.py tests the same detection without a server
def test_a_server_that_hangs_in_its_own_crash_is_started_again(tmp_path):
    has_crashed = tmp_path / "crashed"
    program = write_triton_server(
        tmp_path,
        f"if [ ! -e {has_crashed} ]; then touch {has_crashed}; echo 'Signal (11) received.'; "
        "exec sleep 600; fi",
    )
    with serve(tmp_path, f"--tritonserver={program}") as running:
        running.wait_until_ready()
        assert "tritonserver crashed (Signal (11) received.)" in "\n".join(running.lines)
        assert answers_again(running)


def test_a_program_that_fails_too_often_ends_nereid_serve_with_exit_code_1(tmp_path):
    with serve(tmp_path, "--max-restarts=1") as running:
        running.wait_until_ready()
        kill(running, "bin/tritonserver")
        wait_for(lambda: answers_again(running), timeout_s=120)
        kill(running, "bin/tritonserver")

        assert running.wait() == 1
        output = "\n".join(running.lines)
        assert "tritonserver was ended by SIGKILL. The last lines of its output are:" in output
        assert str(running.log) in output
        assert "tritonserver failed again after 1 restart in a row (--max-restarts)" in output
        assert running.left() == []
        assert running.shared_memory() == []
