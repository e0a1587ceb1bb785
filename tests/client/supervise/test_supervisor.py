"""`nereid serve` restarts processes that died, and finishes running requests before it stops."""

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


def url_of(running, path):
    return f"http://127.0.0.1:{running.ports['openai']}{path}"


def ask(running, text, stream=False, begin=lambda: None):
    """Send a chat. Return the status and the text, or status None if the connection failed.

    `begin` is called when the first line of the response has arrived.
    """
    body = {"messages": [{"role": "user", "content": text}], "stream": stream}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        url_of(running, "/v1/chat/completions"), json.dumps(body).encode(), headers
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            first = answer.readline()
            begin()
            return answer.status, (first + answer.read()).decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code if "Retry-After" in error.headers else 0, error.read().decode()
    except (OSError, http.client.HTTPException):
        return None, ""


def num_in_work(running):
    """Return the number of requests that run in the frontend."""
    try:
        with urllib.request.urlopen(url_of(running, "/health/ready"), timeout=60) as page:
            text = page.read()
    except urllib.error.HTTPError as error:  # the frontend answers, the server does not
        with error:
            text = error.read()
    return json.loads(text)["num_requests"]


class Asking(threading.Thread):
    """A request in a thread. It is running when the constructor returns."""

    def __init__(self, running, text, stream=False, beside=0):
        """`beside` is the number of requests that are already running."""
        super().__init__(daemon=True)
        self._has_begun = threading.Event()
        self._arguments = (running, text, stream, self._has_begun.set)
        # The request of the warm-up may still be counted for a moment.
        wait_for(lambda: num_in_work(running) == beside)
        self.start()
        if stream:
            wait_for(self._has_begun.is_set)
        else:
            wait_for(lambda: not self.is_alive() or num_in_work(running) > beside)

    def run(self):
        self.status, self.text = ask(*self._arguments)
        self.ended = time.monotonic()

    def end(self):
        """Wait for the end of the request."""
        self.join(120)
        assert not self.is_alive(), "the request hangs"


def kill(running, word):
    """Kill a process. Return the time."""
    running.descendants = psutil.Process(running._process.pid).children(recursive=True)
    running.child(word).kill()
    return time.monotonic()


def answers_again(running):
    status, _ = ask(running, "hi")
    assert status in (200, 503, None)
    return status == 200


ENDLESS = "a " + "<pause 0.05>b " * 2000


@pytest.mark.parametrize("word", ["bin/tritonserver", "backend_stub"])
def test_a_server_or_stub_that_is_killed_is_started_again_and_nobody_waits_for_ever(tmp_path, word):
    with serve(tmp_path) as running:
        running.wait_until_ready()
        stream = Asking(running, ENDLESS, stream=True)
        whole = Asking(running, ENDLESS, beside=1)
        died = kill(running, word)
        for asking in (stream, whole):
            asking.end()
            assert asking.ended - died < 30
        assert stream.status == 200
        last = stream.text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
        assert whole.status == 503
        wait_for(lambda: answers_again(running), timeout_s=120)
        wait_for(lambda: any("answers again" in line for line in running.lines))
        told = "\n".join(running.lines)
        assert "it is started again now (restart 1 of 5)" in told
        assert ("tritonserver: the process of " in told) == (word == "backend_stub"), told
        assert len([p for p in running.left() if "stub" in p.name()]) == 0
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
        assert running.shared_memory() == []


def test_a_frontend_that_is_killed_is_started_again_and_the_server_goes_on(tmp_path):
    with serve(tmp_path) as running:
        running.wait_until_ready()
        server = running.child("bin/tritonserver")
        kill(running, "-m nereid_client")
        wait_for(lambda: answers_again(running), timeout_s=120)
        assert server.is_running()
        assert "the OpenAI frontend was ended by SIGKILL" in "\n".join(running.lines)


def test_a_server_that_hangs_is_started_again(tmp_path):
    with serve(tmp_path, "--hang-timeout=4") as running:
        running.wait_until_ready()
        running.child("bin/tritonserver").suspend()
        started = time.monotonic()
        asking = Asking(running, "hi")
        asking.end()
        assert asking.status == 503
        assert 4 < asking.ended - started < 60
        wait_for(lambda: answers_again(running), timeout_s=120)
        assert "tritonserver hangs" in "\n".join(running.lines)


def test_a_server_at_rest_is_not_taken_for_one_that_hangs(tmp_path):
    # After half of this time without progress, the server is probed.
    with serve(tmp_path, "--hang-timeout=4") as running:
        running.wait_until_ready()
        time.sleep(3)
        asking = Asking(
            running, "a <pause 5> b"
        )  # no progress, but the server answers other requests
        asking.end()
        assert asking.status == 200
        assert "hangs" not in "\n".join(running.lines)


def test_a_server_that_crashes_while_it_starts_is_started_again(tmp_path):
    flag, program = tmp_path / "crashed", tmp_path / "tritonserver"
    program.write_text(
        f"#!/bin/bash\nif [ ! -e {flag} ]; then touch {flag}; kill -ABRT $$; fi\n"
        f'exec {NEREID.parent / "tritonserver"} "$@"\n'
    )
    program.chmod(0o755)
    with serve(tmp_path, f"--tritonserver={program}") as running:
        running.wait_until_ready()
        assert "tritonserver was ended by SIGABRT; it is started again" in "\n".join(running.lines)
        assert answers_again(running)


def test_a_server_that_gives_up_a_stub_while_it_starts_is_started_again(tmp_path):
    flag, program = tmp_path / "hung", tmp_path / "tritonserver"
    stub = tmp_path / "triton_python_backend_stub"
    stub.symlink_to("/bin/sleep")
    program.write_text(
        f"#!/bin/bash\nif [ ! -e {flag} ]; then touch {flag}; {stub} 600 & wait; fi\n"
        f'exec {NEREID.parent / "tritonserver"} "$@"\n'
    )
    program.chmod(0o755)
    with serve(tmp_path, f"--tritonserver={program}") as running:
        running.wait_until_ready()
        assert "waits for the end of a stub process that is still running" in "\n".join(
            running.lines
        )
        assert answers_again(running)


@pytest.mark.long  # test_child_processes.py tests how the output is read
def test_a_server_whose_stub_is_found_sick_while_it_starts_is_started_again(tmp_path):
    flag, program = tmp_path / "sick", tmp_path / "tritonserver"
    line = "E1122 10:20:42 1 model.cc:1] Stub process executor_0_0 is not healthy."
    program.write_text(
        f'#!/bin/bash\nif [ ! -e {flag} ]; then touch {flag}; echo "{line}"; exit 1; fi\n'
        f'exec {NEREID.parent / "tritonserver"} "$@"\n'
    )
    program.chmod(0o755)
    with serve(tmp_path, f"--tritonserver={program}") as running:
        running.wait_until_ready()
        assert "tritonserver ended with exit code 1; it is started again" in "\n".join(
            running.lines
        )
        assert answers_again(running)


@pytest.mark.long  # test_child_processes.py tests how the output is read
def test_a_server_that_hangs_in_its_own_crash_is_started_again(tmp_path):
    flag, program = tmp_path / "crashed", tmp_path / "tritonserver"
    program.write_text(
        f"#!/bin/bash\nif [ ! -e {flag} ]; then touch {flag}; echo 'Signal (11) received.'; "
        f'exec sleep 600; fi\nexec {NEREID.parent / "tritonserver"} "$@"\n'
    )
    program.chmod(0o755)
    with serve(tmp_path, f"--tritonserver={program}") as running:
        running.wait_until_ready()
        assert "tritonserver crashed (Signal (11) received.)" in "\n".join(running.lines)
        assert answers_again(running)


def test_what_dies_too_often_ends_it_all_with_exit_code_1(tmp_path):
    with serve(tmp_path, "--max-restarts=1") as running:
        running.wait_until_ready()
        for number in range(2):
            kill(running, "bin/tritonserver")
            if number == 0:
                wait_for(lambda: answers_again(running), timeout_s=120)
        assert running.wait() == 1
        assert "tritonserver failed again after 1 restart in a row (--max-restarts)" in "\n".join(
            running.lines
        )
        assert running.left() == []


def test_a_stop_lets_running_requests_finish_and_takes_no_new_ones(tmp_path):
    with serve(tmp_path) as running:
        running.wait_until_ready()
        may_end = tmp_path / "may-end"
        asking = Asking(running, f"a <until {may_end}>b", stream=True)
        running.signal(signal.SIGTERM)
        wait_for(lambda: any("to finish, for at most" in line for line in running.lines))
        status, text = ask(running, "new")
        assert status == 503
        assert "The server is stopping." in text
        may_end.touch()
        assert running.wait() == 0
        asking.end()
        assert asking.text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"stop"' in asking.text


def test_a_stop_has_a_limit(tmp_path):
    with serve(tmp_path, "--drain-timeout=1") as running:
        running.wait_until_ready()
        asking = Asking(running, ENDLESS)
        started = time.monotonic()
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
        assert 1 < time.monotonic() - started < 60
        assert "1 request did not finish within 1 s" in "\n".join(running.lines)
        asking.end()
        assert asking.status in (503, 500, None)


def test_the_second_signal_does_not_wait(tmp_path):
    with serve(tmp_path) as running:
        running.wait_until_ready()
        Asking(running, ENDLESS)
        running.signal(signal.SIGTERM)
        wait_for(lambda: any("to finish, for at most" in line for line in running.lines))
        started = time.monotonic()
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
        assert time.monotonic() - started < 20  # less than the 30 s that the request needs


def test_a_full_disk_costs_the_log_and_nothing_else(tmp_path):
    with serve(tmp_path, "--log-file=/dev/full") as running:
        running.wait_until_ready()
        assert ask(running, "hi")[0] == 200
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
        assert running.lines[-1] == "nereid: stopped"
        assert "Traceback" not in "\n".join(running.lines)
