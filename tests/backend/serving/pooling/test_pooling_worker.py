"""A worker process with the demo embedder: its results, and the effects of its death."""

import os
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from nereid_backend.errors import EngineError, RequestError
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.serving.pooling.jobs import Job
from nereid_backend.serving.pooling.worker_client import WorkerClient
from nereid_backend.serving.process.process_handle import EngineDiedError

DEMO = Path(__file__).resolve().parents[4] / "demo"


@pytest.fixture(scope="module")
def worker():
    client = WorkerClient(PoolingConfig(str(DEMO / "embed"), num_threads=1), lambda line: None)
    client.start(300)
    yield client
    client.stop()


def texts(*values, **options):
    return Job("texts", [("text", value) for value in values], options)


def answers(worker, **jobs):
    for name, job in jobs.items():
        worker.submit(name, job)
    found = {}
    deadline = time.monotonic() + 120
    while len(found) < len(jobs):
        assert time.monotonic() < deadline
        for answer in worker.receive(0.1):
            found[answer.request_id] = answer
    return found


def receive_for(worker, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        worker.receive(0.1)


def test_it_says_what_it_has_loaded(worker):
    assert worker.info["task"] == "embed"
    assert worker.info["dimension"] == 128


def test_jobs_of_different_options_are_answered_each_in_its_own_way(worker):
    found = answers(
        worker,
        whole=texts("Hugo lives in Pinemark.", ""),
        short=texts("Hugo lives in Pinemark.", dimensions=16),
    )
    whole, short = found["whole"].outcome.values, found["short"].outcome.values
    assert whole.shape == (2, 128)
    assert short.shape == (1, 16)
    cut = whole[0, :16] / np.linalg.norm(whole[0, :16])
    assert np.abs(cut - short[0]).max() < 1e-5


def test_a_wrong_job_is_refused_and_the_next_one_is_served(worker):
    found = answers(worker, wrong=texts("x", "y " * 2000), right=texts("x"))
    assert isinstance(found["wrong"].error, RequestError)
    assert str(found["wrong"].error).startswith("texts: element 1: the input has 2002 tokens")
    assert found["right"].outcome.values.shape == (1, 128)


def test_a_checkpoint_that_is_not_there_is_reported_in_words(tmp_path):
    client = WorkerClient(PoolingConfig(str(tmp_path / "nowhere")), lambda line: None)
    with pytest.raises(EngineError, match="nowhere"):
        client.start(300)
    assert client.pid is None


def test_a_death_is_noticed_and_it_can_be_started_again():
    client = WorkerClient(PoolingConfig(str(DEMO / "embed"), num_threads=1), lambda line: None)
    client.start(300)
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDiedError, match="signal 9"):
        receive_for(client, 120)
    client.start(300)
    assert answers(client, again=texts("x"))["again"].outcome.values.shape == (1, 128)
    client.stop()
    assert client.pid is None


def tiny(folder, kind, **config):
    """A random checkpoint of a class of transformers, with the demo's tokenizer."""
    import transformers

    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "rerank" / file, folder)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    made = transformers.BertConfig(vocab_size=2000, num_attention_heads=2, **shape, **config)
    getattr(transformers, kind)(made).save_pretrained(folder)
    return str(folder)


@contextmanager
def started(model, **settings):
    client = WorkerClient(PoolingConfig(model, num_threads=1, **settings), lambda line: None)
    client.start(300)
    try:
        yield client
    finally:
        client.stop()


def test_a_classifier_gives_each_text_the_probabilities_of_its_labels(tmp_path):
    model = tiny(tmp_path, "BertForSequenceClassification", num_labels=3)
    with started(model) as client:
        assert client.info["task"] == "classify"
        done = answers(client, a=texts("one", "two words", kind="classify"))["a"]
    assert done.outcome.values.shape == (2, 3)
    assert np.abs(done.outcome.values.sum(1) - 1).max() < 1e-5


def test_a_splade_gives_weights_of_the_vocabulary(tmp_path):
    with started(tiny(tmp_path, "BertForMaskedLM"), task="embed", pooling="splade") as client:
        assert client.info["kinds"] == ["sparse"]
        done = answers(client, a=texts("one", "two words"))["a"]
    assert done.outcome.kind == "sparse"
    for ids, weights in done.outcome.weights:
        assert len(ids) == len(weights) > 0
        assert ids.max() < 2000
        assert weights.min() > 0


def test_the_stubs_modules_bring_no_torch():
    code = (
        "import sys\n"
        "from nereid_backend.serving.pooling import pooling_settings, worker_client\n"
        "from nereid_backend.serving.pooling import decode_request, jobs\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


def test_a_long_job_gives_signs_of_life():
    with started(str(DEMO / "embed"), max_batch_tokens=64) as client:
        client.submit("long", texts(*["Hugo lives in Pinemark."] * 3000))
        silences, is_done = [], False
        submitted = last = time.monotonic()
        while not is_done:
            messages = client.messages(0.05)
            is_done = any(kind == "done" for kind, *_ in messages)
            if messages:
                silences.append(time.monotonic() - last)
                last = time.monotonic()
    assert len(silences) > 2
    assert max(silences) < max(2.0, (last - submitted) / 3)
