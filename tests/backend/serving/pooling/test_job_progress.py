import time

import pytest
from backend.serving.pooling.scripted_worker import LengthEngine
from nereid_backend.errors import EngineError
from nereid_backend.pooling.pooling_items import PoolingResult
from nereid_backend.serving.pooling import job_progress
from nereid_backend.serving.pooling.job_progress import WorkerJobs
from nereid_backend.serving.pooling.jobs import Job, Outcome


def texts(*values):
    return Job("texts", [["text", value] for value in values], {})


@pytest.fixture
def sent():
    return []


@pytest.fixture
def engine():
    return LengthEngine()


@pytest.fixture
def work(engine, sent):
    return WorkerJobs(engine, sent.append)


def run(work, limit=100_000):
    while work.has_work and limit:
        work.advance()
        limit -= 1
    assert limit


def outcome(message):
    """Return the outcome in a message "done"."""
    kind, _, started, *row = message
    assert kind == "done"
    assert 0 <= time.monotonic() - started < 60
    return Outcome.from_row(row)


def test_an_outcome_has_every_value_in_the_order_of_the_inputs(work, sent):
    work.add("a", texts("x", "yy", "zzz"))
    run(work)
    done = outcome(sent[0])
    assert done.kind == "dense"
    assert done.values.tolist() == [[1, 1], [2, 1], [3, 1]]
    assert done.num_tokens.tolist() == [1, 2, 3]


def test_a_large_job_goes_to_the_engine_a_slice_at_a_time(work, engine, sent):
    num_inputs = 5 * job_progress._SLICE_INPUTS + 3
    lengths = [number % 7 + 1 for number in range(num_inputs)]
    work.add("a", texts(*("x" * length for length in lengths)))
    run(work)
    assert engine.most_waiting <= job_progress._MAX_SLICES * job_progress._SLICE_INPUTS
    assert outcome(sent[0]).num_tokens.tolist() == lengths


def test_one_query_is_paired_with_each_document():
    job = Job("documents", [["document", "x"], ["document", "yy"]], {"truncate": True}, "q")
    items = job_progress._JobProgress("a", job).next_slice()
    assert [(item.pair, item.truncate) for item in items] == [
        (("q", "x"), True),
        (("q", "yy"), True),
    ]


def test_long_texts_make_short_slices(work, engine):
    long = "x" * job_progress._SLICE_SIZE
    work.add("a", texts(long, long, long, long))
    work.advance()
    assert engine.most_waiting == job_progress._MAX_SLICES


def test_a_small_job_is_done_long_before_a_large_one(work, sent):
    work.add("large", texts(*["x"] * 1000))
    for _ in range(5):
        work.advance()
    work.add("small", texts("y"))
    run(work)
    assert [message[1] for message in sent] == ["small", "large"]


def test_a_wrong_input_refuses_only_its_job_and_the_message_has_its_index(work, sent):
    count = job_progress._SLICE_INPUTS + 5
    work.add("a", texts(*["x"] * count, "bad"))
    work.add("b", texts("x"))
    run(work)
    refusals = [message for message in sent if message[0] == "refused"]
    error = f"texts: element {count}: has no tokens"
    assert refusals == [["refused", "a", "RequestError", error]]
    assert [message[1] for message in sent if message[0] == "done"] == ["b"]


def test_the_message_about_a_single_input_has_no_index(work, sent):
    work.add("a", texts("bad"))
    run(work)
    assert sent == [["refused", "a", "RequestError", "texts: has no tokens"]]


def test_the_message_about_a_wrong_option_names_the_option(work, sent):
    work.add("a", Job("texts", [["text", "x"]] * 2, {"dimensions": 0}))
    run(work)
    assert sent[0][3] == "dimensions: must be from 1 to 4, got 0"


def test_a_full_queue_is_reported_as_a_capacity_error(work, sent):
    work.add("a", texts("full"))
    run(work)
    assert sent == [["refused", "a", "CapacityError", "too many inputs wait"]]


def test_an_input_without_a_value_is_an_engine_error(work, sent):
    work.add("a", texts("x", "nan"))
    run(work)
    assert sent == [
        ["refused", "a", "EngineError", "texts: element 1: the model gave no finite numbers"]
    ]


def test_a_job_whose_outputs_are_too_large_for_a_response_is_refused(
    work, engine, sent, monkeypatch
):
    monkeypatch.setattr(job_progress, "_MAX_VALUE_BYTES", 100)
    work.add("large", texts(*(["a"] * 50)))
    work.add("small", texts("a"))
    run(work)
    by_id = {job_id: (kind, *values) for kind, job_id, *values in sent}
    kind, error_class, text = by_id["large"]
    assert (kind, error_class) == ("refused", "RequestError")
    assert text.startswith("texts: the outputs of the request have more than 100")
    assert by_id["small"][0] == "done"
    assert not engine.has_work()


def test_an_aborted_job_leaves_nothing_in_the_engine(work, engine, sent):
    work.add("a", texts(*["x"] * 1000))
    work.advance()
    work.abort("a")
    assert not work.has_work
    assert engine.waiting == {}
    work.abort("a")
    assert sent == []


def test_a_lost_device_ends_the_worker(work, engine):
    work.add("a", texts("one"))
    lost = PoolingResult("a:0", 0, None, 1, "the model failed: CUDA error: an illegal access")
    engine.step = lambda: [lost]
    with pytest.raises(EngineError, match="the device is lost"):
        run(work)


def test_an_unexpected_error_while_a_job_is_prepared_ends_only_that_job(work, engine, sent):
    work.add("bad", texts("odd"))
    work.add("good", texts("even"))
    run(work)
    refused = next(message for message in sent if message[1] == "bad")
    assert refused == ["refused", "bad", "EngineError", "ZeroDivisionError: a bug in a tokenizer"]
    assert outcome(next(message for message in sent if message[1] == "good")).num_tokens == [4]
