"""Tests of the worker process with the demo embedding model, and of other pooling engines."""

import dataclasses
import shutil
import subprocess
import sys
import time

import msgpack
import numpy as np
import pytest
import torch  # noqa: F401 - the engines need it
from backend.serving.fake_server import DEMO
from nereid_backend.errors import EngineError
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.pooling.pooling_engine import PoolingEngine
from nereid_backend.serving.pooling.job_progress import WorkerJobs
from nereid_backend.serving.pooling.jobs import Job, Outcome
from nereid_backend.serving.process.process_handle import ChildProcess, ChildProgram, Limit


def start_worker(model, **settings):
    config = PoolingConfig(str(model), num_threads=1, **settings)
    limits = (Limit("start_timeout_s", 300), Limit("hang_timeout_s", 60), Limit("restarts", 0))
    module = "nereid_backend.serving.pooling.pooling_worker"
    program = ChildProgram("worker", "worker", module, dataclasses.asdict(config), *limits)
    return ChildProcess.start(program, lambda line: None)


@pytest.fixture(scope="module")
def worker():
    child = start_worker(DEMO / "embed", max_batch_tokens=64)
    yield child
    child.stop()


def texts(*values, **options):
    """Return a job with one text input for each value."""
    return Job("texts", [("text", value) for value in values], options)


def results(worker, **jobs):
    """Send jobs to the worker, and return its message about each job, by the id of the job.

    A message is a tuple that begins with "done" or "refused".
    """
    for request_id, job in jobs.items():
        worker.send(["add", request_id, *job.row()])
    messages, deadline = {}, time.monotonic() + 120
    while len(messages) < len(jobs):
        assert time.monotonic() < deadline
        for kind, *values in worker.receive(0.1, is_working=True):
            if kind in ("done", "refused"):
                messages[values[0]] = (kind, *values[1:])
    return messages


def outcome(message):
    """Return the outcome in a message "done" of `results`."""
    kind, _, *row = message
    assert kind == "done", message
    return Outcome.from_row(row)


def test_the_worker_reports_the_loaded_model(worker):
    assert worker.info["task"] == "embed"
    assert worker.info["dimension"] == 128


def test_each_job_has_its_own_options(worker):
    messages = results(
        worker,
        whole=texts("Hugo lives in Pinemark.", ""),
        short=texts("Hugo lives in Pinemark.", dimensions=16),
    )
    whole, short = outcome(messages["whole"]).values, outcome(messages["short"]).values
    assert whole.shape == (2, 128)
    assert short.shape == (1, 16)
    normalised_beginning = whole[0, :16] / np.linalg.norm(whole[0, :16])
    assert np.abs(normalised_beginning - short[0]).max() < 1e-5


def test_a_wrong_job_is_refused_and_the_next_one_is_computed(worker):
    messages = results(worker, wrong=texts("x", "y " * 2000), right=texts("x"))
    kind, error_class, text = messages["wrong"]
    assert (kind, error_class) == ("refused", "RequestError")
    assert text.startswith("texts: element 1: the input has 2002 tokens")
    assert outcome(messages["right"]).values.shape == (1, 128)


def test_a_long_job_sends_messages_all_the_time(worker):
    worker.send(["add", "long", *texts(*["Hugo lives in Pinemark."] * 3000).row()])
    silences_s, is_done = [], False
    submitted_at = last_message_at = time.monotonic()
    while not is_done:
        messages = worker.receive(0.05, is_working=True)
        is_done = any(kind == "done" for kind, *_ in messages)
        if messages:
            silences_s.append(time.monotonic() - last_message_at)
            last_message_at = time.monotonic()
    assert len(silences_s) > 2
    # On a slow machine, no silence may last longer than a third of the whole job.
    assert max(silences_s) < max(2.0, (last_message_at - submitted_at) / 3)


def test_a_checkpoint_that_does_not_exist_is_reported_with_its_path(tmp_path):
    with pytest.raises(EngineError, match="nowhere"):
        start_worker(tmp_path / "nowhere")


def tiny(folder, kind, **config):
    """Save a tiny random checkpoint of the class `kind` of transformers, and return its folder.

    The checkpoint has the tokenizer of the demo reranker.
    """
    import transformers

    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "rerank" / file, folder)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    bert_config = transformers.BertConfig(vocab_size=2000, num_attention_heads=2, **shape, **config)
    getattr(transformers, kind)(bert_config).save_pretrained(folder)
    return str(folder)


def compute(engine, job):
    """Compute one job in this process, and return its outcome.

    The function packs and unpacks the job and its outcome, as if they were sent through a socket.
    """
    sent = []
    jobs = WorkerJobs(engine, lambda message: sent.append(repacked(message)))
    jobs.add("a", Job(*repacked(job.row())))
    while jobs.has_work:
        jobs.advance()
    ((kind, _, *row),) = sent
    return outcome((kind, *row))


def repacked(values):
    return msgpack.unpackb(msgpack.packb(values))


def test_a_classifier_returns_the_probabilities_of_the_labels(tmp_path):
    model = tiny(tmp_path, "BertForSequenceClassification", num_labels=3)
    engine = PoolingEngine(PoolingConfig(model, num_threads=1))
    assert engine.info.task == "classify"
    done = compute(engine, texts("one", "two words", kind="classify"))
    assert done.values.shape == (2, 3)
    assert np.abs(done.values.sum(1) - 1).max() < 1e-5


def test_a_splade_model_returns_weights_of_the_vocabulary(tmp_path):
    model = tiny(tmp_path, "BertForMaskedLM")
    engine = PoolingEngine(PoolingConfig(model, task="embed", pooling="splade", num_threads=1))
    assert list(engine.info.kinds) == ["sparse"]
    done = compute(engine, texts("one", "two words"))
    assert done.kind == "sparse"
    for ids, weights in done.weights:
        assert len(ids) == len(weights) > 0
        assert ids.max() < 2000
        assert weights.min() > 0


def test_the_modules_of_the_stub_import_no_torch():
    code = (
        "import sys\n"
        "from nereid_backend.serving import serving_settings\n"
        "from nereid_backend.serving.pooling import decode_request, jobs\n"
        "from nereid_backend.serving.process import process_handle\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
