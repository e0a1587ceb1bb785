"""Tests of trials. A trial compiles a slow grammar in a process with limited time and memory."""

import json
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.connection import Pipe
from pathlib import Path

import psutil
import pytest
from nereid_backend.core.grammar import GrammarSpec
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.errors import CapacityError, EngineError, RequestError
from nereid_backend.grammar.compile_cost import is_quick
from nereid_backend.grammar.compile_pool import CompilePool
from nereid_backend.grammar.trials import trial_compiler
from nereid_backend.grammar.trials.trial_compiler import TrialCompiler
from nereid_backend.grammar.trials.trial_process import Outcome

SLOW = GrammarSpec("ebnf", "slow")
QUICK = GrammarSpec("regex", "a+")


def schema(**keywords):
    return GrammarSpec("json_schema", json.dumps({"type": "object", **keywords}))


def tag(schema):
    """Return a structural tag for texts that are `null` or match a JSON schema."""
    node = {"type": "json_schema", "json_schema": {"anyOf": [{"type": "null"}, schema]}}
    return GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": node}))


def properties(count):
    return {f"p{i}": {"type": "string"} for i in range(count)}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (schema(properties=properties(20)), True),
        (schema(properties={"not_": {"enum": ["a"]}, "b": {"anyOf": [{"type": "null"}]}}), True),
        (schema(properties=properties(5000)), False),
        (schema(allOf=[{}]), False),
        (schema(properties={"a": {"pattern": "(a{9}){9}"}}), False),
        (schema(properties={"a": {"pattern": "^[a-z]{1,40}$"}}), True),
        (schema(properties={"a": {"maxLength": 100_000}}), False),
        (GrammarSpec("regex", "(ab)*"), False),
        (GrammarSpec("regex", "[0-9]{1,9999}"), False),
        (GrammarSpec("regex", "a{99}{99}{99}"), False),
        (GrammarSpec("structural_tag", '{"format": {"type": "token_dispatch"}}'), False),
        (GrammarSpec("structural_tag", '{"format": {"type": "any_text"}}'), True),
        (
            tag({"properties": properties(20), "maxLength": 100, "pattern": "[0-9]{4}-[0-9]{2}"}),
            True,
        ),
        (tag({"properties": properties(20), "minProperties": 10}), False),
        (tag({"pattern": ".{0,9}" * 20}), False),
        (tag({"anyOf": [{"maxLength": 500}, {"maxLength": 501}]}), False),
        (tag({"anyOf": [{"maxLength": 900}, {"maxLength": -900}]}), False),
        (tag({"anyOf": [{"format": "email"}, {"format": "uri"}, {"format": "date-time"}]}), True),
        (tag({"anyOf": [{"format": "email"}, {"format": "email"}]}), False),
        (tag({"format": "uri-template"}), False),
        (tag({"maxLength": float("nan")}), False),
        (tag({"maxLength": 10**400}), False),
        (GrammarSpec("regex", "a{2,9}?b{9}"), True),
        (GrammarSpec("ebnf", 'root ::= "a"'), False),
        (GrammarSpec("json_schema", "[" * 5000), True),
        (GrammarSpec("choice", '["a", "b"]'), True),
    ],
)
def test_only_small_grammars_without_slow_keywords_are_quick(spec, expected):
    assert is_quick(spec) is expected


# ---- the server of the trials --------------------------------------------------------------------


def start_server(timeout_s):
    """Start a trial server in its own process. Return the connection and the process."""
    connection, servers_end = Pipe()
    program = Path(__file__).with_name("scripted_trials.py")
    process = subprocess.Popen(
        [sys.executable, str(program), str(servers_end.fileno()), str(timeout_s)],
        pass_fds=[servers_end.fileno()],
    )
    servers_end.close()
    return connection, process


@contextmanager
def running_server(timeout_s):
    """Run a trial server, and yield a connection to the server."""
    connection, process = start_server(timeout_s)
    yield connection
    connection.close()
    assert process.wait(20) == 0


@pytest.fixture(scope="module")
def server():
    with running_server(2.0) as connection:
        yield connection


def outcome(server, job_id):
    """Return the outcome of the trial `job_id`. Skip the outcomes of other trials."""
    while server.poll(30):
        received_id, *result = server.recv()
        if received_id == job_id:
            return tuple(result)
    raise TimeoutError("the trial has no outcome")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("quick", (Outcome.DONE, "")),
        ("wrong", (Outcome.REFUSED, "ebnf: the grammar is not valid")),
        ("slow", (Outcome.LATE, "")),
        ("memory", (Outcome.CRASHED, "")),
        ("crash", (Outcome.CRASHED, "")),
    ],
)
def test_a_trial_has_one_outcome(server, source, expected):
    server.send(("compile", 7, "ebnf", source))
    assert outcome(server, 7) == expected


@pytest.mark.parametrize("timeout_s", [30 * 86400.0, 1e300])
def test_a_time_limit_of_months_does_not_end_the_server(timeout_s):
    with running_server(timeout_s) as connection:
        connection.send(("compile", 7, "ebnf", "quick"))
        assert outcome(connection, 7) == (Outcome.DONE, "")


def test_slow_trials_do_not_delay_others_and_can_be_cancelled(server):
    for job_id in range(8):
        server.send(("compile", job_id, "ebnf", "slow"))
    server.send(("compile", 99, "ebnf", "quick"))
    for job_id in range(8):
        server.send(("cancel", job_id))
    assert outcome(server, 99)[0] == Outcome.DONE


def test_a_killed_server_is_noticed_while_its_children_still_compile():
    connection, process = start_server(30.0)
    connection.send(("compile", 1, "ebnf", "slow"))
    connection.send(("compile", 2, "ebnf", "quick"))
    # The slow trial started before the quick trial.
    assert outcome(connection, 2)[0] == Outcome.DONE
    children = psutil.Process(process.pid).children()
    process.kill()
    try:
        assert connection.poll(10)
        with pytest.raises(EOFError):
            connection.recv()
    finally:
        for child in children:
            child.kill()
        process.wait()
        connection.close()


def test_a_process_of_the_trials_that_hangs_is_replaced(monkeypatch):
    monkeypatch.setattr(trial_compiler, "_EXTRA_S", 0.3)
    trials = TrialCompiler(vocabulary=None, eos_token_ids=(), timeout_s=0.2)
    processes = []

    def start(child_fd):
        processes.append(subprocess.Popen(["sleep", "60"], pass_fds=[child_fd]))
        return processes[-1]

    monkeypatch.setattr(trials, "_start_process", start)
    for num_processes in (1, 2):
        with pytest.raises(EngineError, match="the process that compiles grammars has ended"):
            trials.submit(SLOW).result(timeout=20)
        assert len(processes) == num_processes
        assert processes[-1].wait(5) == -signal.SIGKILL
    trials.close()


# ---- the pool ------------------------------------------------------------------------------------


class ScriptedTrials:
    """A fake of the trials. The test sets the outcome of each trial."""

    def __init__(self):
        self.futures = []

    def submit(self, spec):
        self.futures.append(Future())
        return self.futures[-1]

    def close(self):
        for future in self.futures:
            future.cancel()


@pytest.fixture
def trials():
    return ScriptedTrials()


@pytest.fixture
def pool(trials):
    made = CompilePool(1, trials)
    yield made
    made.close()


def test_a_quick_grammar_needs_no_trial_and_waits_for_none(pool, trials):
    for _ in range(4):
        pool.submit(SLOW, lambda: 1)
    assert pool.submit(QUICK, lambda: 2).result(10) == 2
    assert len(trials.futures) == 4


def test_a_slow_grammar_is_compiled_after_its_trial(pool, trials):
    future = pool.submit(SLOW, lambda: 1)
    assert not future.done()
    trials.futures[0].set_result(None)
    assert future.result(10) == 1


def test_a_failed_trial_is_the_error_of_the_grammar(pool, trials):
    future = pool.submit(SLOW, lambda: 1)
    trials.futures[0].set_exception(RequestError("too slow"))
    assert str(future.exception(10)) == "too slow"


def test_cancelling_a_grammar_cancels_its_trial(pool, trials):
    assert pool.submit(SLOW, lambda: 1).cancel()
    assert trials.futures[0].cancelled()


def test_a_library_that_panics_is_an_error_of_the_request(pool):
    class PanicError(BaseException):
        pass

    def panic():
        raise PanicError("index out of bounds")

    assert "index out of bounds" in str(pool.submit(QUICK, panic).exception(10))


def test_grammars_that_wait_when_the_pool_closes_get_an_error(pool):
    release = threading.Event()
    running = pool.submit(QUICK, lambda: release.wait(20))
    waiting = pool.submit(QUICK, lambda: 1)
    pool.close()
    release.set()
    assert "shutting down" in str(waiting.exception(10))
    assert running.result(10) is True
    assert "shutting down" in str(pool.submit(QUICK, lambda: 1).exception(10))


# ---- the guides ----------------------------------------------------------------------------------


def test_a_slow_schema_is_compiled_after_a_real_trial(guides):
    params = SamplingParams(grammar=schema(properties=properties(300), required=["p0"]))
    assert not is_quick(params.grammar)
    assert guides.prepare(params, frozenset({2})).result(60)


@pytest.mark.parametrize("start", ["r0", '"b" r0'])
def test_a_grammar_that_must_be_followed_by_endless_text_needs_little_memory(guides, start):
    doubling = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60))
    grammar = GrammarSpec("ebnf", f'root ::= "a" | {start}\n{doubling}\nr60 ::= "a"')
    guide = guides.prepare(SamplingParams(grammar=grammar), frozenset({2})).result(60)
    assert guide.forced() == []


def test_a_tag_that_crashes_the_library_is_refused(problem):
    rules = [["a", {"type": "any_text"}]]
    dispatch = {"type": "token_dispatch", "rules": rules}
    node = {"type": "repeat", "content": {"type": "plus", "content": dispatch}, "min": 0, "max": 1}
    error = problem("structural_tag", json.dumps({"type": "structural_tag", "format": node}))
    assert isinstance(error, RequestError)
    assert "the grammar library failed" in str(error)


def test_a_grammar_whose_answer_ends_at_once_passes_its_trial(problem):
    assert problem("ebnf", 'root ::= "a" | ""') is None


def test_a_process_that_ends_is_an_error_of_the_server(monkeypatch):
    monkeypatch.setattr(trial_compiler, "_MODULE", "a_module_that_does_not_exist")
    trials = trial_compiler.TrialCompiler(vocabulary=None, eos_token_ids=(2,), timeout_s=10.0)
    error = trials.submit(SLOW).exception(30)
    assert isinstance(error, EngineError)
    trials.close()


def test_more_grammars_than_may_wait_are_an_error_of_the_server(guides, monkeypatch):
    monkeypatch.setattr(trial_compiler, "_MAX_JOBS", 0)
    params = SamplingParams(grammar=schema(properties=properties(303)))
    with pytest.raises(CapacityError, match="Try again later"):
        guides.prepare(params, frozenset({2})).result(60)


def test_a_grammar_that_nobody_waits_for_is_stopped(guides):
    params = SamplingParams(grammar=schema(properties=properties(9000)))
    first, second = (guides.prepare(params, frozenset({2})) for _ in range(2))
    compilation = guides._compilations._running[params.grammar]
    first.cancel()
    assert not compilation.future.done()
    second.cancel()
    assert compilation.future.cancelled()
    assert guides._compilations._running == {}
