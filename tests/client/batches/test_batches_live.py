"""Tests of the Files API and the Batch API with the openai library."""

import json
import os
import select
import socket
import time

import httpx
import openai
import pytest
from fakes.batches import CHAT, create, finished, library, line, results
from fakes.fake_backend import FakeBackend
from fakes.fake_pooling import FakePooling
from fakes.live_frontend import live_frontend, wait_for
from nereid_client.batches.stored_files import FileLimits, FileStore


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    backend = FakeBackend()
    folder = tmp_path_factory.mktemp("batches")
    with (
        live_frontend(backend, FakePooling(), batch_folder=str(folder)) as port,
        library(port) as client,
    ):
        yield client, backend, folder


@pytest.fixture
def client(served):
    return served[0]


def test_each_line_of_a_batch_is_answered(client):
    batch = create(client, [line(number) for number in range(20)], metadata={"job": "1"})
    assert (batch.object, batch.endpoint, batch.metadata) == ("batch", CHAT, {"job": "1"})
    batch = finished(client, batch)
    assert batch.status == "completed"
    assert batch.errors is None
    assert batch.error_file_id is None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (20, 20, 0)

    output = results(client, batch.output_file_id)
    ids = sorted(result["custom_id"] for result in output)
    assert ids == sorted(f"line-{number}" for number in range(20))
    for result in output:
        assert result["error"] is None
        assert result["response"]["status_code"] == 200
        completion = result["response"]["body"]
        text = completion["choices"][0]["message"]["content"]
        assert text == result["custom_id"].replace("line-", "word")
        assert result["response"]["request_id"] in completion["id"]
    file = client.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.status) == ("batch_output", "processed")


@pytest.mark.parametrize(
    ("endpoint", "body", "read"),
    [
        ("/v1/completions", {"prompt": "one two"}, lambda body: body["choices"][0]["text"]),
        ("/v1/responses", {"input": "one two"}, lambda body: body["output"][0]["content"]),
        ("/v1/embeddings", {"input": "one"}, lambda body: body["data"][0]["embedding"]),
        ("/v1/rerank", {"query": "a", "documents": ["a"]}, lambda body: body["results"]),
        ("/v1/score", {"text_1": "a", "text_2": "b"}, lambda body: body["data"]),
    ],
)
def test_other_endpoints_have_batches(client, endpoint, body, read):
    batch = finished(client, create(client, [line(1, url=endpoint, **body)], endpoint))
    (result,) = results(client, batch.output_file_id)
    assert read(result["response"]["body"])


def test_the_first_line_after_a_byte_order_mark_is_answered(client):
    batch = finished(client, create(client, b"\xef\xbb\xbf" + json.dumps(line(1)).encode()))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 0)


def test_wrong_lines_are_in_the_error_file_with_their_numbers(client):
    body = {"messages": [{"role": "user", "content": "x"}]}
    lines = [
        line(1),
        b"not json\n",
        b"\n",
        b'\xff\xfe{"custom_id": "x"}\n',
        line(1),
        {**line(6), "url": "/v1/embeddings"},
        {**line(7), "method": "GET"},
        {**line(8), "custom_id": 8},
        {**line(9), "body": []},
        line(10, **body, stream=True),
        line(11, **body, temperature=9),
        line(12, "<fail INVALID_ARGUMENT seed: is odd>"),
        b"[" * 100_000 + b"\n",
        b"[1]",
    ]
    batch = finished(client, create(client, lines))

    counts = batch.request_counts
    assert batch.status == "completed"
    # The empty line of the file is not counted as a request.
    assert (counts.total, counts.completed, counts.failed) == (13, 1, 12)
    failures = results(client, batch.error_file_id)
    unsent = [failure for failure in failures if failure["error"]]
    assert {failure["error"]["line"]: failure["error"]["code"] for failure in unsent} == {
        2: "invalid_json_line",
        4: "invalid_json_line",
        5: "duplicate_custom_id",
        6: "mismatched_url",
        7: "invalid_method",
        8: "invalid_custom_id",
        9: "invalid_body",
        10: "invalid_body",
        13: "invalid_json_line",
        14: "invalid_json_line",
    }
    assert {failure["custom_id"] for failure in unsent} >= {"line-6", "line-1", None}
    refused_params = {
        failure["custom_id"]: failure["response"]["body"]["error"]["param"]
        for failure in failures
        if failure["response"]
    }
    assert refused_params == {"line-11": "temperature", "line-12": "seed"}


@pytest.mark.parametrize(("content", "code"), [(b"", "empty_file"), (b"\n \n", "empty_file")])
def test_a_file_without_lines_fails(client, content, code):
    batch = finished(client, create(client, content))
    assert batch.status == "failed"
    assert batch.errors.data[0].code == code


def test_a_file_with_too_many_lines_fails(client):
    batch = finished(client, create(client, b"{}\n" * 50_001))
    assert batch.status == "failed"
    assert batch.errors.data[0].code == "too_many_lines"


def test_a_cancelled_batch_has_the_responses_so_far(client, tmp_path):
    # The echo model answers a line with <until PATH> as soon as the file PATH exists. Here, the
    # file never exists.
    waiting = [line(number, f"<until {tmp_path / 'gate'}>") for number in range(2, 60)]
    batch = create(client, [line(1), *waiting])
    wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed == 1)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = finished(client, batch)
    assert batch.status == "cancelled"
    assert batch.cancelled_at >= batch.cancelling_at
    (output,) = results(client, batch.output_file_id)
    assert output["custom_id"] == "line-1"
    failures = results(client, batch.error_file_id)
    assert {failure["error"]["code"] for failure in failures} == {"batch_cancelled"}
    ids = [failure["custom_id"] for failure in failures]
    assert sorted(ids) == sorted(line["custom_id"] for line in waiting)
    with pytest.raises(openai.BadRequestError, match="status cancelled"):
        client.batches.cancel(batch.id)


def test_a_line_is_sent_again_if_the_server_could_not_be_reached(client, served, monkeypatch):
    _, backend, _ = served
    # The frontend asks whether the server is ready after the first attempt has failed.
    ready_answers = []
    is_ready = backend.is_ready

    async def record_is_ready():
        ready_answers.append(await is_ready())
        return ready_answers[-1]

    monkeypatch.setattr(backend, "is_ready", record_is_ready)
    backend.is_up = False
    try:
        batch = create(client, [line(1)])
        wait_for(lambda: False in ready_answers)
        assert client.batches.retrieve(batch.id).status == "in_progress"
    finally:
        backend.is_up = True
    assert finished(client, batch).request_counts.completed == 1


def test_lines_have_the_lowest_priority(client, served):
    finished(client, create(client, [line("prio", priority=-5, messages=[
        {"role": "user", "content": "priority"}])]))  # fmt: skip
    generation = served[1].generations[-1]
    assert (generation.priority, generation.client_weight) == (2**31 - 1, 0.001)
    client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "x"}])
    assert served[1].generations[-1].priority is None


def test_live_requests_leave_a_quarter_of_the_slots_to_batches(tmp_path):
    gate, backend = tmp_path / "gate", FakeBackend()
    folder = str(tmp_path / "folder")
    with (
        live_frontend(backend, batch_folder=folder, max_batch_requests=8) as port,
        library(port) as client,
        library(port).with_options(timeout=60) as live,
        live.chat.completions.create(
            model="echo",
            stream=True,
            messages=[{"role": "user", "content": f"now <until {gate}>"}],
        ) as stream,
    ):
        next(iter(stream))  # from here on, a live request is running
        num_before = len(backend.generations)
        batch = create(client, [line(n, f"<until {gate}>") for n in range(20)])
        wait_for(lambda: len(backend.generations) == num_before + 2)
        time.sleep(0.3)
        assert len(backend.generations) == num_before + 2

        gate.touch()
        assert finished(client, batch).request_counts.completed == 20
        assert backend.most_active <= 9  # the live request and eight lines


def test_files_and_batches_are_listed_in_pages(client):
    files = [client.files.create(file=(f"{n}.jsonl", b"{}"), purpose="batch") for n in range(5)]
    listed = [file.id for file in client.files.list(limit=2)][:5]
    assert listed == [file.id for file in reversed(files)]
    ascending = [file.id for file in client.files.list(order="asc", after=files[1].id, limit=3)]
    assert ascending[:3] == [file.id for file in files[2:5]]
    assert all(file.purpose == "batch" for file in client.files.list(purpose="batch"))
    batches = [create(client, [line(n)]).id for n in range(3)]
    assert [batch.id for batch in client.batches.list(limit=2)][:3] == batches[::-1]


def test_a_deleted_file_is_gone_but_its_batch_continues(client, tmp_path):
    gate = tmp_path / "gate"
    batch = create(client, [line(1, f"late <until {gate}>"), line(2)])
    assert client.files.delete(batch.input_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(batch.input_file_id)
    gate.touch()
    assert finished(client, batch).request_counts.completed == 2


@pytest.mark.parametrize(
    ("ranges", "status", "content_range"),
    [
        ("bytes=2-3", 206, "bytes 2-3/10"),
        ("bytes=10-", 416, "bytes */10"),
        ("lines=1-2", 400, None),
        ("bytes=3-1", 400, None),
    ],
)
def test_a_range_of_a_file_is_sent_or_refused_in_the_format_of_the_api(
    client, ranges, status, content_range
):
    file = client.files.create(file=b"0123456789", purpose="batch")
    url = f"{client.base_url}files/{file.id}/content"
    response = httpx.get(url, headers={"Range": ranges})
    assert response.status_code == status
    assert response.headers.get("Content-Range") == content_range
    if status == 206:
        assert response.content == b"23"
    else:
        assert ranges in response.json()["error"]["message"]


def test_files_expire(client, served):
    _, _, folder = served
    hour = {"anchor": "created_at", "seconds": 3600}
    file = client.files.create(file=b"{}", purpose="batch", expires_after=hour)
    assert file.expires_at - file.created_at == 3600

    metadata = folder / "files" / file.id / "metadata.json"
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "expires_at": 1}))
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    FileStore(folder, FileLimits(count=9, num_bytes=9)).delete_expired(time.time())
    assert not metadata.exists()

    minute = {"anchor": "created_at", "seconds": 60}
    with pytest.raises(openai.BadRequestError, match="seconds must be at least 3600"):
        client.files.create(file=b"", purpose="batch", expires_after=minute)


@pytest.mark.parametrize(
    "names", [("expires_after", "expires_after[anchor]"), ("purpose", "purpose[a]")]
)
@pytest.mark.parametrize("order", [1, -1])
def test_a_field_that_is_a_text_and_an_object_is_refused(client, names, order):
    data = {"purpose": "batch"} | dict.fromkeys(names[::order], "batch")
    response = httpx.post(f"{client.base_url}files", data=data, files={"file": b"{}"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == names[0]


def test_an_expired_batch_has_an_error_for_each_unfinished_line(tmp_path):
    gate = tmp_path / "gate"
    folder = tmp_path / "folder"
    with live_frontend(FakeBackend(), batch_folder=str(folder)) as port, library(port) as client:
        batch = create(client, [line(1), line(2, f"<until {gate}>")])
        wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed == 1)

    stored_batch = folder / "batches" / batch.id / "batch.json"
    stored_batch.write_text(json.dumps({**json.loads(stored_batch.read_text()), "expires_at": 1}))
    with live_frontend(FakeBackend(), batch_folder=str(folder)) as port, library(port) as client:
        batch = finished(client, batch)
        (output,) = results(client, batch.output_file_id)
        (failure,) = results(client, batch.error_file_id)

    assert batch.status == "expired"
    assert output["custom_id"] == "line-1"
    assert (failure["custom_id"], failure["error"]["code"]) == ("line-2", "batch_expired")


@pytest.fixture
def frontend_with_keys(tmp_path):
    """The key file of a frontend with the clients `a` and `b`, and an openai client for each."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[a]\nkey = "key-a"\n[b]\nkey = "key-b"\nmax_concurrent_requests = 1\n')
    folder = str(tmp_path / "folder")
    with (
        live_frontend(FakeBackend(), batch_folder=folder, api_key_file=str(keys)) as port,
        library(port, "key-a") as client_a,
        library(port, "key-b") as client_b,
    ):
        yield keys, client_a, client_b


def test_each_key_sees_only_its_own_files_and_batches(frontend_with_keys):
    _, client_a, client_b = frontend_with_keys
    batch = create(client_a, [line(1)])
    assert finished(client_a, batch).request_counts.completed == 1

    assert not list(client_b.files.list())
    assert not list(client_b.batches.list())
    for call in (
        lambda: client_b.files.retrieve(batch.input_file_id),
        lambda: client_b.files.content(batch.input_file_id),
        lambda: client_b.files.delete(batch.input_file_id),
        lambda: client_b.batches.retrieve(batch.id),
        lambda: client_b.batches.cancel(batch.id),
        lambda: client_b.batches.create(
            input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            call()


def test_a_batch_is_cancelled_if_its_key_is_removed(frontend_with_keys, tmp_path):
    keys, _, client = frontend_with_keys
    # These lines are never answered, because the file does not exist.
    batch = create(client, [line(n, f"<until {tmp_path / 'gate'}>") for n in range(3)])
    # The limit max_concurrent_requests = 1 of this client does not count the requests of a batch,
    # so another request is accepted.
    client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "x"}])

    keys.write_text('[a]\nkey = "key-a"\n')
    stored_batch = tmp_path / "folder" / "batches" / batch.id / "batch.json"
    wait_for(lambda: json.loads(stored_batch.read_text())["status"] == "cancelled")


@pytest.mark.parametrize(
    "path",
    ["..", "../batches", "file-../../x", "file-" + "a" * 24, "x" * 5000, "file-\0", "batch.json"],
)
def test_an_id_is_never_a_path(client, path):
    quoted = "".join(f"%{byte:02x}" for byte in path.encode())
    for route in ("files/{}", "files/{}/content", "batches/{}"):
        url = str(client.base_url) + route.format(quoted)
        assert httpx.get(url).status_code == 404
    assert httpx.delete(f"{client.base_url}files/{quoted}").status_code in (404, 405)
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id=path, endpoint=CHAT, completion_window="24h")


def test_a_file_name_is_never_a_path(client, served):
    file = client.files.create(file=("../../../etc/passwd\x00", b"{}"), purpose="batch")
    assert set(os.listdir(served[2] / "files" / file.id)) == {"content", "metadata.json"}


def test_uploads_over_a_limit_leave_nothing_behind(tmp_path):
    folder = tmp_path / "folder"
    limits = {"max_stored_files": 2, "max_stored_file_bytes": 100_000}
    with (
        live_frontend(FakeBackend(), batch_folder=str(folder), **limits) as port,
        library(port) as client,
    ):
        with pytest.raises(openai.APIStatusError, match="max_stored_file_bytes") as raised:
            client.files.create(file=b"x" * 5_000_000, purpose="batch")
        assert raised.value.status_code == 413
        assert not os.listdir(folder / "uploads")
        assert not os.listdir(folder / "files")
        for _ in range(2):
            client.files.create(file=b"{}", purpose="batch")
        with pytest.raises(openai.BadRequestError, match="max_stored_files"):
            client.files.create(file=b"{}", purpose="batch")


@pytest.mark.parametrize("drip", [b"", b"a"])
def test_an_upload_that_stops_or_sends_single_bytes_is_ended(tmp_path, drip):
    folder = tmp_path / "folder"
    settings = {"batch_folder": str(folder), "receive_timeout_s": 1}
    with (
        live_frontend(FakeBackend(), **settings) as port,
        socket.create_connection(("127.0.0.1", port)) as connection,
    ):
        connection.settimeout(30)
        connection.sendall(
            b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999\r\n"
            b"Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
        )
        for _ in range(50):
            connection.sendall(drip)
            if select.select([connection], [], [], 0.2)[0]:
                break
        else:
            pytest.fail("the upload was not ended within ten seconds")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")
        wait_for(lambda: not os.listdir(folder / "uploads"))


def test_a_folder_that_can_no_longer_be_written_is_named(tmp_path):
    folder = tmp_path / "blocked"
    with (
        live_frontend(FakeBackend(), batch_folder=str(folder)) as port,
        library(port) as client,
    ):
        folder.write_text("a file")  # The frontend has checked the folder at its start.
        with pytest.raises(openai.InternalServerError, match="blocked"):
            client.files.create(file=b"{}", purpose="batch")


def test_without_a_folder_the_error_names_the_setting():
    with live_frontend(FakeBackend()) as port, library(port) as client:
        with pytest.raises(openai.NotFoundError, match="NEREID_BATCH_FOLDER"):
            client.files.create(file=b"{}", purpose="batch")
        with pytest.raises(openai.NotFoundError, match="NEREID_BATCH_FOLDER"):
            client.batches.list()
