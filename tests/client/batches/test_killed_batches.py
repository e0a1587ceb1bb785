"""Tests that a batch continues after the process of the frontend was killed."""

import collections
from contextlib import contextmanager

import openai
import pytest
from fakes.batches import create, finished, library, line, results, serve
from fakes.live_frontend import free_port, wait_for
from warm_python import CONTEXT


@contextmanager
def frontend_process(folder):
    """Run the frontend in its own process, and yield the process and an openai client."""
    port = free_port()
    process = CONTEXT.Process(target=serve, args=(port, str(folder)), daemon=True)
    process.start()
    try:
        with library(port) as client:
            wait_for(lambda: answers(client))
            yield process, client
    finally:
        process.kill()
        process.join()


def answers(client):
    try:
        return bool(client.models.list())
    except openai.APIConnectionError:
        return False


@pytest.mark.parametrize(
    "num_lines",
    [60, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])],
)
def test_a_killed_frontend_answers_each_line_exactly_once(tmp_path, num_lines):
    # The last quarter of the lines waits for a file that is created only after the kill.
    gate = tmp_path / "gate"
    num_free = num_lines * 3 // 4
    lines = [line(number, f"word{number}") for number in range(num_free)]
    lines += [line(number, f"<until {gate}> word{number}") for number in range(num_free, num_lines)]
    with frontend_process(tmp_path / "folder") as (process, client):
        batch = create(client, lines)
        output = tmp_path / "folder" / "batches" / batch.id / "output" / "content"
        wait_for(lambda: output.exists() and output.read_bytes().count(b"\n") > num_lines // 2, 900)
        process.kill()
        process.join()
    assert num_lines // 2 < output.read_bytes().count(b"\n") < num_lines

    gate.touch()
    with output.open("ab") as file:
        # The file ends like a file whose last write was interrupted by the kill.
        file.write(b'{"id": "batch_req_1_1", "custom')
    with frontend_process(tmp_path / "folder") as (_, client):
        batch = finished(client, batch, timeout_s=900)
        answers = results(client, batch.output_file_id)

    assert (batch.status, batch.error_file_id) == ("completed", None)
    assert batch.request_counts.completed == num_lines
    num_answers = collections.Counter(answer["custom_id"] for answer in answers)
    assert num_answers == {f"line-{number}": 1 for number in range(num_lines)}
    for answer in answers:
        text = answer["response"]["body"]["choices"][0]["message"]["content"]
        assert text.strip() == answer["custom_id"].replace("line-", "word")
