"""Tests of the executor model with a scripted engine process and a fake server."""

import json
import os
import re
import signal
import threading
import time
from collections import defaultdict
from dataclasses import replace

import msgpack
import numpy as np
import pytest
from backend.serving.fake_server import DEMO, MetricFamily, Request
from nereid_backend import SamplingParams
from nereid_backend.serving import tensor_names
from nereid_backend.serving.executor.executor_model import ExecutorModel
from nereid_backend.serving.executor.scripted.scripted_engine import SCRIPT_VARIABLE
from nereid_backend.serving.feedback import FeedbackWriter
from nereid_backend.serving.process.process_handle import ChildProcess
from nereid_backend.serving.process.supervised_process import SupervisedProcess
from nereid_backend.serving.wire import RequestEnvelope, StepState, pack_params
from nereid_client.supervise.hang_detection import PROBES

ENDLESS = {"when": "", "token_ids": [10], "ends": False, "delay_ms": 10}


class Sender(Request):
    """A request that records its generated tokens.

    If `consumes` is true, the request reports each step to the executor as consumed, as the
    postprocessor does.
    """

    def __init__(self, num_tokens=3, consumes=True, params=None, **limits):
        params = params or SamplingParams(max_tokens=5)
        envelope = RequestEnvelope(pack_params(params), params.n, b"", **limits)
        prompt = np.full(num_tokens, 7, dtype=np.int32)
        super().__init__(
            **{tensor_names.ENVELOPE: envelope.pack(), tensor_names.PROMPT_TOKEN_IDS: prompt}
        )
        self.token_ids, self.has_tokens = [], threading.Event()
        self._consumes = consumes
        self._feedback = FeedbackWriter()

    def receive(self, outputs):
        super().receive(outputs)
        signed = outputs[tensor_names.STATE].tobytes()
        state = StepState.unpack(self._feedback.attach_and_verify(signed))
        self._consume(state)
        self.token_ids += [token_id for delta in state.deltas for token_id in delta.token_ids]
        if self.token_ids:
            self.has_tokens.set()

    def _consume(self, state):
        if self._consumes:
            self._feedback.report(state.slot, state.serial, state.step)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A function that starts an executor model with the rules of a script and some settings."""
    models = []

    def make(*rules, **settings):
        path = tmp_path / "script.json"
        path.write_text(json.dumps([{"when": ""} | rule for rule in rules]))
        monkeypatch.setenv(SCRIPT_VARIABLE, str(path))
        monkeypatch.setattr(MetricFamily, "values", {})
        settings = {"model": str(DEMO / "chat"), "engine": "scripted", **settings}
        config = {"parameters": {n: {"string_value": str(v)} for n, v in settings.items()}}
        model = ExecutorModel()
        model.initialize(
            {"model_config": json.dumps(config), "model_repository": str(tmp_path / "llm")}
        )
        models.append(model)
        return model

    yield make
    for model in models:
        model.finalize()


def ask(model, **request):
    sender = Sender(**request)
    model.execute([sender])
    return sender


def wait_for_metric(name, expected, limit_s=120.0):
    """Wait until a metric has the value `expected`. Return the value at the end of the wait."""
    deadline_s = time.monotonic() + limit_s
    while MetricFamily.values.get(name) != expected and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return MetricFamily.values.get(name)


def wait_until(is_true, limit_s=120.0):
    """Call `is_true` until it returns true, and fail after `limit_s` seconds."""
    deadline_s = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def wait_for_more_tokens(sender):
    """Wait until a running request has more tokens than now."""
    num_tokens = len(sender.token_ids)
    wait_until(lambda: len(sender.token_ids) > num_tokens, limit_s=60)


LONG = SamplingParams(max_tokens=2000)


def test_times_tokens_and_outcomes_are_counted(start):
    model = start({"token_ids": [10], "ends": False, "delay_ms": 5})
    for _ in range(2):
        assert ask(model, num_tokens=4).wait().token_ids == [10] * 5
    assert wait_for_metric("request_success_total/length", 2) == 2
    values = MetricFamily.values
    assert (values["prompt_tokens_total"], values["generation_tokens_total"]) == (8, 10)
    assert len(values["time_to_first_token_seconds"]) == 2
    assert len(values["request_queue_time_seconds"]) == 2
    assert values["request_prompt_tokens"] == [4, 4]
    assert values["request_generation_tokens"] == [5, 5]

    latencies_s = values["e2e_request_latency_seconds"]
    phases_s = [
        sum(values[f"request_{phase}_time_seconds"]) for phase in ("queue", "prefill", "decode")
    ]
    assert sum(phases_s) == pytest.approx(sum(latencies_s))
    assert all(0.02 < latency_s < 120 for latency_s in latencies_s)
    # Each answer has 5 tokens, so it has 4 intervals between tokens.
    assert values["inter_token_latency_seconds_count"] == 8
    assert values["inter_token_latency_seconds_bucket/+Inf"] == 8
    assert values["engine_up"] == 1
    assert wait_for_metric("num_requests", 0) == 0


def test_one_client_cannot_use_all_sequences(start):
    model = start(ENDLESS, max_streams=8)
    params = SamplingParams(max_tokens=100, n=2)
    running = [ask(model, params=params, client_id="busy") for _ in range(3)]
    refused = ask(model, params=params, client_id="busy").wait()
    assert "this client would have more than its share of them (max_streams)" in refused.error
    request_of_other_client = ask(model, client_id="other").wait()
    assert request_of_other_client.error is None
    for request in running:
        assert request.wait().error is None
    assert ask(model, client_id="busy").wait().error is None


def test_a_request_that_waits_too_long_ends_with_a_time_to_retry(start):
    model = start(ENDLESS, max_num_seqs=1)
    first = ask(model, params=LONG)
    assert first.has_tokens.wait(120)
    late = ask(model, queue_timeout_s=0.5).wait()
    assert re.match(r"\[UNAVAILABLE\] the request waited in the queue for \d+\.\d s", late.error)
    assert "the limit is 0.5 s (queue_timeout)" in late.error
    assert late.error.endswith("(queue_timeout). Try again in 1 s.")
    assert 0.4 < late.elapsed_s < 15
    assert wait_for_metric("num_requests_waiting", 0) == 0
    assert wait_for_metric("requests_timed_out_total", 1) == 1
    assert not first.ended.is_set()


def test_a_request_that_runs_too_long_ends_and_its_sequence_with_it(start):
    model = start(ENDLESS)
    late = ask(model, params=LONG, timeout_s=1.5).wait()
    assert re.match(
        r"\[DEADLINE_EXCEEDED\] the request was not finished after \d+\.\d s", late.error
    )
    assert "but the limit is 1.5 s (timeout)" in late.error
    assert late.token_ids
    assert wait_for_metric("kv_cache_blocks_used", 0) == 0
    assert wait_for_metric("num_requests", 0) == 0


def test_a_full_queue_refuses_requests_immediately_by_number_and_by_tokens(start):
    model = start(ENDLESS, max_num_seqs=1, max_num_waiting=2, max_waiting_tokens=10)
    assert ask(model, params=LONG).has_tokens.wait(120)
    ask(model, num_tokens=6)
    refused = ask(model, num_tokens=6).wait()
    assert (
        "6 prompt tokens are waiting, and this request has 6 more, but the limit is 10"
        in refused.error
    )
    ask(model, num_tokens=3)
    refused = ask(model, num_tokens=1).wait()
    assert (
        "[UNAVAILABLE] 2 requests are waiting, and the limit is 2 (max_num_waiting)"
        in refused.error
    )
    assert refused.elapsed_s < 15  # The request did not wait for the end of the first request.
    assert wait_for_metric("requests_refused_total", 2) == 2


def test_a_stream_that_is_not_consumed_ends_at_a_limit_of_tokens(start):
    model = start(
        {"token_ids": [10], "ends": False, "tokens_per_step": 500, "delay_ms": 50},
        max_pending_tokens=1000,
        max_model_len=100_000,
        stale_after_ms=60_000,
    )
    stuck = ask(model, params=SamplingParams(), consumes=False)
    assert "limit is 1000 (max_pending_tokens)" in stuck.wait().error
    other = ask(model).wait()
    assert (other.error, other.token_ids) == (None, [10] * 5)
    assert wait_for_metric("kv_cache_blocks_used", 0) == 0


def test_an_engine_that_dies_ends_its_requests_and_the_metrics_show_the_restart(start):
    model = start(ENDLESS)
    running = ask(model, params=LONG)
    assert running.has_tokens.wait(120)
    os.kill(model.child.pid, signal.SIGKILL)
    assert "[INTERNAL] the engine process ended (signal 9)" in running.wait().error
    refused = ask(model).wait()
    assert re.search(r"\[UNAVAILABLE\] the engine is restarting. Try again in \d+ s", refused.error)
    assert wait_for_metric("engine_up", 0) == 0
    assert wait_for_metric("num_engine_restarts", 1) == 1
    assert wait_for_metric("engine_up", 1) == 1
    assert ask(model).wait().token_ids == [10] * 5
    assert wait_for_metric("num_requests_running", 0) == 0
    assert wait_for_metric("request_success_total/length", 1) == 1
    assert wait_for_metric("requests_refused_total", 1) == 1
    assert MetricFamily.values["request_success_total/error"] == 1


def test_the_gauges_of_a_dead_engine_are_0_until_it_is_restarted(start, monkeypatch):
    model = start(ENDLESS)
    assert ask(model, params=LONG).has_tokens.wait(120)
    assert wait_for_metric("num_requests_running", 1) == 1

    may_restart = threading.Event()
    start_replacement = SupervisedProcess._start_replacement
    monkeypatch.setattr(
        SupervisedProcess,
        "_start_replacement",
        lambda process: may_restart.wait(120) and start_replacement(process),
    )
    os.kill(model.child.pid, signal.SIGKILL)
    assert wait_for_metric("engine_up", 0) == 0
    names = ("num_requests_running", "kv_cache_blocks", "kv_cache_blocks_used")
    for name in (*names, "kv_cache_usage_perc"):
        assert wait_for_metric(name, 0, limit_s=2) == 0

    may_restart.set()
    assert wait_for_metric("engine_up", 1) == 1
    wait_until(lambda: MetricFamily.values["kv_cache_blocks"], limit_s=60)


def test_each_sequence_of_a_request_that_fails_or_exceeds_its_time_is_counted(start):
    model = start(ENDLESS)
    params = replace(LONG, n=3)
    assert ask(model, params=params, timeout_s=1).wait().error.startswith("[DEADLINE_EXCEEDED]")
    assert wait_for_metric("request_success_total/abort", 3) == 3
    failed = ask(model, params=params)
    assert failed.has_tokens.wait(120)
    os.kill(model.child.pid, signal.SIGKILL)
    assert failed.wait().error
    assert wait_for_metric("request_success_total/error", 3) == 3
    assert len(MetricFamily.values["request_generation_tokens"]) == 6


def test_a_defect_in_the_loop_ends_the_requests_and_the_engines_work_on_them(start, monkeypatch):
    model = start(ENDLESS)
    stuck = ask(model, params=LONG)
    assert stuck.has_tokens.wait(120)
    do_periodic_work = model.do_periodic_work
    failures = iter([ValueError("a defect")])

    def fail_once():
        for error in failures:
            raise error
        return do_periodic_work()

    monkeypatch.setattr(model, "do_periodic_work", fail_once)
    assert "the executor failed: ValueError: a defect" in stuck.wait().error
    assert ask(model).wait().token_ids == [10] * 5
    assert wait_for_metric("num_requests_running", 0) == 0


def test_an_engine_that_dies_again_and_again_is_given_up(start):
    model = start({"token_ids": [10], "fault": "CUDA error: gone"}, max_engine_restarts=1)
    for number in range(2):
        assert wait_for_metric("num_engine_restarts", number) == number
        assert wait_for_metric("engine_up", 1) == 1
        assert "CUDA error: gone" in ask(model).wait().error
    wait_until(lambda: "not restarted again" in ask(model).wait().error)
    refused = ask(model).wait()
    assert "[UNAVAILABLE] the engine process has died 2 times in a row" in refused.error
    assert wait_for_metric("engine_up", 0) == 0


@pytest.mark.parametrize("n", [-1, 0, 2])
def test_a_wrong_number_of_sequences_ends_only_its_own_request(start, n):
    model = start(ENDLESS)
    neighbour = ask(model, params=LONG)
    assert neighbour.has_tokens.wait(120)

    damaged = Sender()
    envelope = RequestEnvelope(pack_params(SamplingParams(max_tokens=5)), n, b"")
    damaged.inputs[tensor_names.ENVELOPE].values = envelope.pack()
    model.execute([damaged])
    assert damaged.wait().error.startswith("[INVALID_ARGUMENT] envelope: the message")

    wait_for_more_tokens(neighbour)
    assert neighbour.error is None


def send_adapter_request(model, **parameters):
    """Send a call about adapters or weights, and return the request without waiting for its end."""
    request = Request(
        **{
            tensor_names.ENVELOPE: np.zeros(1, np.uint8),
            tensor_names.PROMPT_TOKEN_IDS: np.zeros(1, np.int32),
        }
    )
    request.request_parameters = json.dumps(parameters)
    model.execute([request])
    return request


def adapter_request(model, **parameters):
    """Send a call that loads, unloads or lists adapters, and return the request after its end."""
    return send_adapter_request(model, **parameters).wait()


def adapters(model, **parameters):
    """Send a call about adapters, and return the names of the adapters after the call."""
    (reply,) = adapter_request(model, **parameters).replies
    return json.loads(reply[tensor_names.STATE].tobytes())["adapters"]


@pytest.mark.parametrize(
    "parameters",
    [{"unload_lora": "first"}, {"reload_weights": "/new"}, {"cache": "drop"}, {"cache": True}],
)
def test_a_request_with_a_prompt_generates_text_whatever_parameters_its_client_sends(
    start, parameters
):
    model = start({"token_ids": [10]}, lora_adapters="first=/f")
    sender = Sender()
    sender.request_parameters = json.dumps(parameters)
    model.execute([sender])
    assert sender.wait().error is None
    assert 10 in sender.token_ids
    assert adapters(model, list_loras=True) == ["first"]


def test_adapters_are_loaded_listed_and_unloaded_and_survive_a_restart(start):
    model = start(ENDLESS, lora_adapters="first=/f")
    assert adapters(model, load_lora="second", lora_path="/s") == ["first", "second"]
    assert adapters(model, unload_lora="first") == ["second"]
    assert adapters(model, list_loras=True) == ["second"]
    os.kill(model.child.pid, signal.SIGKILL)
    wait_until(lambda: model.processes[0].num_restarts > 0)
    wait_until(lambda: adapters(model, list_loras=True) == ["second"])


def test_a_restarted_engine_gets_the_replaced_weights_before_the_first_request(start, monkeypatch):
    model = start(ENDLESS)
    adapters(model, reload_weights="/new")
    # For each process id of an engine, the kinds of the messages that the process got, in order.
    kinds_by_process = defaultdict(list)
    send, finish_restart = ChildProcess.send_packed, SupervisedProcess.finish_restart

    def send_and_record_kind(child, data):
        kinds_by_process[child.pid].append(msgpack.unpackb(data)[0])
        send(child, data)

    def finish_restart_and_request(process):
        """Finish the restart, and send a request before the model can send any other message."""
        finish_restart(process)
        monkeypatch.setattr(ChildProcess, "send_packed", send_and_record_kind)
        model.execute([Sender()])

    monkeypatch.setattr(SupervisedProcess, "finish_restart", finish_restart_and_request)
    os.kill(model.child.pid, signal.SIGKILL)
    assert wait_for_metric("num_engine_restarts", 1) == 1
    assert ask(model).wait().token_ids == [10] * 5
    assert kinds_by_process[model.child.pid][0] == "reload_weights"


def test_a_test_of_nereid_serve_does_not_wait_until_the_weights_are_replaced(start):
    # `nereid serve` sends test requests to the server. If a test request had no response while the
    # weights are replaced, `nereid serve` would restart the server.
    model = start(ENDLESS)
    running = ask(model, params=SamplingParams(max_tokens=500))
    assert running.has_tokens.wait(120)

    reload = send_adapter_request(model, reload_weights="/new")
    wait_until(lambda: model._engine_calls.is_replacing_weights)
    client_id = json.loads(PROBES["llm"].body["sampling_parameters"])["client_id"]
    refused = ask(model, client_id=client_id).wait()
    assert "the weights of the model are being replaced" in refused.error
    assert not running.ended.is_set()
    assert reload.wait().error is None
    assert ask(model, client_id=client_id).wait().token_ids == [10] * 5


def test_a_line_of_the_running_engine_reaches_the_log(start, capsys):
    model = start(ENDLESS)
    receive, is_logged = model.child.receive, threading.Event()
    # The child process seems to send this message first.
    messages = [["progress", "the forward pass is compiled"]]

    def receive_the_line_first(*arguments, **options):
        if messages:
            return [messages.pop()]
        is_logged.set()
        return receive(*arguments, **options)

    model.child.receive = receive_the_line_first
    # The test reads the output only after the line was written: if one thread writes while another
    # thread reads, the output capture of pytest can crash the interpreter.
    assert is_logged.wait(10)
    assert "nereid: the forward pass is compiled\n" in capsys.readouterr().out


def test_an_adapter_call_without_a_path_or_for_an_unknown_name_is_refused(start):
    model = start(ENDLESS)
    refused = adapter_request(model, load_lora="a")
    assert (
        refused.error
        == "[INVALID_ARGUMENT] lora_path: the parameter must be a text, but it is None."
    )
    unknown = adapter_request(model, unload_lora="a")
    assert unknown.error == "[INVALID_ARGUMENT] lora_name: no adapter has the name 'a'."


def test_two_engines_share_the_requests_and_one_that_dies_ends_only_its_own(start):
    model = start(ENDLESS, data_parallel_size=2)
    streams = [ask(model, params=LONG) for _ in range(4)]
    for stream in streams:
        assert stream.has_tokens.wait(120)
    first, second = model.processes  # The requests alternate between the two processes.
    assert (first.num_requests, second.num_requests) == (2, 2)
    for number in (0, 1):
        assert wait_for_metric(f"num_requests_running/{number}", 2) == 2

    os.kill(second.child.pid, signal.SIGKILL)
    for stream in streams[1::2]:
        assert "[INTERNAL] the engine process ended (signal 9)" in stream.wait().error
    assert not model.outage
    late = ask(model).wait()
    assert (late.error, late.token_ids) == (None, [10] * 5)
    assert wait_for_metric("engine_up/1", 1) == wait_for_metric("num_engine_restarts/1", 1) == 1
    assert wait_for_metric("num_engine_restarts/0", 0) == 0
    for stream in streams[::2]:
        assert stream.error is None
        wait_for_more_tokens(stream)

    answers = [ask(model, params=SamplingParams(max_tokens=5)).wait().token_ids for _ in range(4)]
    assert answers == [[10] * 5] * 4


def test_adapters_reach_every_engine_and_a_restarted_one_gets_them_again(start):
    model = start(ENDLESS, data_parallel_size=2, lora_adapters="first=/f")
    assert adapters(model, load_lora="second", lora_path="/s") == ["first", "second"]
    os.kill(model.processes[1].child.pid, signal.SIGKILL)
    wait_until(lambda: model.processes[1].num_restarts > 0)
    wait_until(lambda: adapters(model, list_loras=True) == ["first", "second"])
    assert adapters(model, unload_lora="second") == ["first"]
    refused = adapter_request(model, unload_lora="second")
    assert "no adapter has the name 'second'" in refused.error
