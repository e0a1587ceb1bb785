"""Tests of the stub process of a pooling model, with a scripted worker process."""

import json
import os
import re
import signal
import time

import msgpack
import numpy as np
import pytest
from backend.serving.fake_server import TESTS, MetricFamily, Request
from nereid_backend.serving import pooling_tensor_names as names
from nereid_backend.serving.pooling import pooling_metrics
from nereid_backend.serving.pooling.embedding_model import EmbeddingModel
from nereid_backend.serving.pooling.job_progress import _JobProgress
from nereid_backend.serving.pooling.jobs import Job
from nereid_backend.serving.pooling.rerank_model import RerankModel

WORKER = "backend.serving.pooling.scripted_worker"


@pytest.fixture(scope="module", autouse=True)
def environment():
    """Set PYTHONPATH so that workers can import test modules, and remove all NEREID_ variables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS))
        for variable in [name for name in os.environ if name.startswith("NEREID_")]:
            patch.delenv(variable)
        yield


class Sender(Request):
    """A request for embeddings."""

    def __init__(self, *texts, **inputs):
        if texts:
            inputs[names.TEXTS] = np.array([text.encode() for text in texts])
        super().__init__(**inputs)

    @property
    def rows(self):
        return self.replies[-1][names.EMBEDDINGS]


def open_stub(model, folder, kind=EmbeddingModel, **settings):
    """Start the stub of the checkpoint in the folder `model`."""
    values = {"model": str(model), **settings} if model else settings
    config = {"parameters": {name: {"string_value": str(v)} for name, v in values.items()}}
    args = {"model_config": json.dumps(config), "model_repository": str(folder / "embedding")}
    stub = kind()
    stub.worker_module = WORKER
    stub.initialize(args)
    return stub


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def stub(model, tmp_path_factory):
    opened = open_stub(model, tmp_path_factory.mktemp("stub"), served_model_name="lengths")
    yield opened
    opened.finalize()


def ask(stub, *texts, **inputs):
    sender = Sender(*texts, **inputs)
    stub.execute([sender])
    return sender


def wait_until(is_true, limit_s=60.0):
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_embeddings_arrive_in_the_order_of_the_texts(stub):
    sender = ask(stub, "a", "bbb", "cc").wait()
    assert sender.rows[:, 0].tolist() == [1, 3, 2]
    assert sender.replies[0][names.NUM_TOKENS].tolist() == [1, 3, 2]
    assert names.INFO not in sender.replies[0]


def test_a_request_may_ask_for_a_description_of_the_model(stub, model):
    with_texts = ask(stub, "a", return_info=np.array([True])).wait()
    alone = ask(stub, return_info=np.array([True])).wait()
    for sender in (with_texts, alone):
        info = json.loads(sender.replies[0][names.INFO][0])
        assert info == {
            "model": str(model),
            "task": "embed",
            "kinds": ["dense", "sparse", "multi_vector"],
            "device": "cpu",
            "name": "lengths",
            "max_model_len": 128,
            "max_token_bytes": 16,
        }
    assert with_texts.rows.shape == (1, 128)


def test_a_request_without_inputs_has_an_empty_result(stub):
    sender = ask(stub, texts=np.zeros(0, dtype=np.object_)).wait()
    assert sender.rows.shape == (0, 0)


@pytest.mark.parametrize(
    ("kind", "outputs"),
    [
        ("sparse", {names.SPARSE, names.NUM_TOKENS}),
        ("multi_vector", {names.EMBEDDINGS, names.NUM_VECTORS, names.NUM_TOKENS}),
    ],
)
def test_a_request_without_inputs_has_the_outputs_of_its_kind(stub, kind, outputs):
    options = np.array([json.dumps({"kind": kind}).encode()])
    (reply,) = ask(stub, texts=np.zeros(0, dtype=np.object_), options=options).wait().replies
    assert reply.keys() == outputs


def test_a_wrong_input_is_refused(stub):
    assert (
        ask(stub, "a", "bad").wait().error == "[INVALID_ARGUMENT] texts: element 1: has no tokens"
    )
    assert (
        ask(stub).wait().error.startswith("[INVALID_ARGUMENT] texts: a request must have exactly")
    )


@pytest.fixture
def no_job(stub, monkeypatch):
    """Let the test fail if a job is sent to the worker."""

    def refuse(*values):
        pytest.fail("the job was sent to the worker")

    monkeypatch.setattr(stub, "add_request", refuse)


@pytest.mark.usefixtures("no_job")
def test_a_text_that_is_too_long_is_refused_before_it_goes_to_the_worker(stub):
    error = ask(stub, "a", "w " * 1_000_000).wait().error
    assert error.startswith("[INVALID_ARGUMENT] texts: element 1: the input has at least 2000000 ")
    assert "at least 125000 tokens, but the limit is 128 (max_model_len)" in error


def test_a_text_that_is_too_long_goes_to_the_worker_if_it_may_be_truncated(stub):
    options = np.array([b'{"truncate": true}'])
    assert ask(stub, "w " * 100_000, options=options).wait().error is None


@pytest.mark.usefixtures("no_job")
def test_token_ids_that_are_too_long_are_refused_before_they_go_to_the_worker(stub):
    error = ask(stub, input_ids=np.zeros(1_000_000, dtype=np.int32)).wait().error
    assert "input_ids: the input has 1000000 tokens, but the limit is 128" in error


@pytest.mark.usefixtures("no_job")
@pytest.mark.parametrize("name", [names.TEXTS, names.PARTS])
def test_more_inputs_than_the_queue_can_hold_are_refused_at_once(stub, name):
    inputs = {name: np.full(100_001, b"a", dtype=np.object_)}
    started = time.perf_counter()
    error = ask(stub, **inputs).wait().error
    assert time.perf_counter() - started < 0.5
    said = f"{name}: the request has 100001 inputs, but the limit is 15196 (max_num_waiting)"
    assert error == f"[INVALID_ARGUMENT] {said}. Send fewer inputs."


@pytest.mark.parametrize(
    ("field", "inputs"),
    [
        ("options", {"texts": np.array([b"a"]), "options": np.array([b'{"prompt": "\\ud800"}'])}),
        ("parts: element 1", {"parts": np.array([b'{"text": "a"}', b'{"text": "\\ud800"}'])}),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_under_the_name_of_its_tensor(stub, field, inputs):
    error = ask(stub, **inputs).wait().error
    assert error.startswith(f"[INVALID_ARGUMENT] {field}: a text contains half of a surrogate pair")
    assert ask(stub, "a").wait().error is None


def test_parameters_that_are_not_utf8_are_a_request_error(stub):
    sender = Sender("a")
    # A call of `decode` raises a UnicodeDecodeError, as `parameters` does in a stub of the server.
    sender.parameters = b"\xff".decode
    stub.execute([sender])
    assert sender.wait().error.startswith("[INVALID_ARGUMENT] parameters: ")


@pytest.mark.parametrize("name", [names.TEXTS, names.PARTS])
def test_lengths_of_texts_are_refused_instead_of_ignored(stub, name):
    inputs = {name: np.array([b'{"text": "a"}']), names.INPUT_LENGTHS: np.ones(1, np.int32)}
    error = ask(stub, **inputs).wait().error
    assert f"input_lengths: the lengths belong to input_ids, but the request has {name}" in error


@pytest.mark.usefixtures("no_job")
def test_more_lengths_than_the_queue_can_hold_are_refused_at_once(stub):
    ids = np.ones(100_001, dtype=np.int32)
    error = ask(stub, input_ids=ids, input_lengths=ids).wait().error
    assert "the request has 100001 inputs, but the limit is 15196 (max_num_waiting)" in error


def test_the_query_of_many_documents_is_sent_to_the_worker_once(monkeypatch):
    texts = {names.QUERY: ["q" * 60_000], names.DOCUMENTS: ["d"] * 10_000}
    monkeypatch.setattr(RerankModel, "read_texts", lambda self, request, name, options: texts[name])
    job = RerankModel().read_job(None, [names.QUERY, names.DOCUMENTS], {})
    assert len(msgpack.packb(job.row())) < 1_000_000


def test_documents_that_are_images_become_the_items_of_a_job(monkeypatch):
    tensors = {names.QUERY: ["q"], names.PARTS: ['{"text": "d"}', '{"image": "aGk="}']}
    monkeypatch.setattr(
        RerankModel, "read_texts", lambda self, request, name, options: tensors[name]
    )
    monkeypatch.setattr(RerankModel, "read_array", lambda self, request, name: tensors[name])
    job = RerankModel().read_job(None, [names.QUERY, names.PARTS], {})
    received = Job(*msgpack.unpackb(msgpack.packb(job.row())))
    items = _JobProgress("r", received).next_slice()
    assert [item.pair for item in items] == [("q", "d"), ("q", b"hi")]


def test_a_text_with_an_image_is_one_item_of_a_job():
    job = Job(names.PARTS, [("part", {"text": "a", "image": b"hi"})], {"truncate": True})
    (item,) = _JobProgress("r", Job(*msgpack.unpackb(msgpack.packb(job.row())))).next_slice()
    assert (item.text, item.image, item.truncate) == ("a", b"hi", True)


def test_a_cancelled_request_ends_and_its_job_is_dropped(stub):
    sender = ask(stub, *["slow"] * 3)
    sender.is_gone = True
    assert "the request was cancelled" in sender.wait().error
    assert ask(stub, "x").wait().error is None


def test_a_defect_in_building_the_outputs_ends_that_request_alone(stub, monkeypatch):
    def broken(outcome):
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(stub, "build_outputs", broken)
        assert "ZeroDivisionError: a bug" in ask(stub, "x").wait().error
    assert ask(stub, "x").wait().rows.shape == (1, 128)


def test_a_response_that_does_not_fit_into_shared_memory_is_refused_unless_it_is_small(
    stub, monkeypatch
):
    full = os.statvfs_result((4096, 4096, 10, 0, 0, 0, 0, 0, 0, 255))
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda path: full)
        assert "larger than the free part of /dev/shm" in ask(stub, *["x"] * 300).wait().error
        assert ask(stub, "x").wait().rows.shape == (1, 128)
    assert ask(stub, *["x"] * 300).wait().rows.shape == (300, 128)


def test_one_request_more_than_the_limit_is_refused(model, tmp_path):
    stub = open_stub(model, tmp_path, max_requests=1)
    try:
        first = ask(stub, "slow")
        refused = ask(stub, "x").wait()
        assert "the model has 1 requests, which is the limit (embedding_max_req" in refused.error
        assert first.wait().error is None
        assert ask(stub, "x").wait().error is None
    finally:
        stub.finalize()


def test_sizes_phases_and_outcomes_are_counted(model, tmp_path, monkeypatch):
    monkeypatch.setattr(MetricFamily, "values", {})
    monkeypatch.setattr(pooling_metrics, "_PUBLISH_INTERVAL_S", 0.0)
    stub = open_stub(model, tmp_path)
    try:
        ask(stub, "a", "bbb").wait()
        ask(stub, "bad").wait()
        values = MetricFamily.values
        wait_until(lambda: values.get("pooling_requests_total/refused") == 1)
        wait_until(lambda: values.get("pooling_request_prompt_tokens_sum") == 4)
        assert values["pooling_num_requests"] == 0
        assert values["pooling_requests_total/success"] == 1
        assert values["pooling_prompt_tokens_total"] == 4
        # A bucket is not published while its value is 0.
        assert "pooling_request_inputs_bucket/1" not in values
        assert values["pooling_request_inputs_bucket/2"] == 1
        assert values["pooling_request_prompt_tokens_sum"] == 4
        phases = ("queue_time", "compute_time")
        times = [values[f"pooling_{phase}_seconds_sum"] for phase in phases]
        assert sum(times) == pytest.approx(values["pooling_e2e_latency_seconds_sum"])
    finally:
        stub.finalize()


def test_a_worker_that_dies_is_restarted_after_each_death(model, tmp_path):
    stub = open_stub(model, tmp_path, max_restarts=1)
    try:
        for _ in range(2):
            sender = ask(stub, "die")
            assert re.search("the worker process .*: the script says so", sender.wait().error)
            refused = ask(stub, "x").wait()
            assert refused.error == (
                "[UNAVAILABLE] the worker process is restarting. Try again in a few seconds."
            )
            wait_until(lambda: not stub.outage)
            assert ask(stub, "x").wait().rows.shape == (1, 128)
    finally:
        stub.finalize()


def test_after_the_last_failed_restart_requests_are_refused_with_the_reason(tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    stub = open_stub(model, tmp_path, max_restarts=1)
    try:
        (model / "broken").touch()
        os.kill(stub.child.pid, signal.SIGKILL)
        wait_until(lambda: "Restart the server" in stub.outage)
        error = ask(stub, "x").wait().error
        assert "could not be restarted in 1 attempts (max_restarts)" in error
        # When `nereid serve` reads this line, it restarts the server.
        assert "nereid: error: embedding: the worker process could not" in capsys.readouterr().out
    finally:
        stub.finalize()


def test_a_model_without_a_checkpoint_refuses_requests_and_says_why(tmp_path):
    stub = open_stub(None, tmp_path)
    try:
        refused = ask(stub, "x").wait()
        assert "[UNAVAILABLE] no checkpoint is served as 'embedding'" in refused.error
        (reply,) = ask(stub, return_info=np.array([True])).wait().replies
        assert json.loads(reply[names.INFO][0])["task"] == "none"
    finally:
        stub.finalize()


def test_a_checkpoint_with_another_task_is_refused_at_the_start(model, tmp_path, capsys):
    with pytest.raises(RuntimeError, match="has the task 'embed', but the model 'rerank' needs"):
        open_stub(model, tmp_path, RerankModel)
    assert "nereid: error: NEREID_RERANK_MODEL: the checkpoint" in capsys.readouterr().out


def test_a_checkpoint_that_cannot_be_loaded_names_the_variables_of_the_model(tmp_path):
    (tmp_path / "broken").touch()
    with pytest.raises(
        RuntimeError, match=r"broken makes .* model begin with NEREID_EMBEDDING_\.\)"
    ):
        open_stub(tmp_path, tmp_path)
