"""Tests of the image worker, whose child processes prepare images within limits.

Other tests here check that the images in a request are found and packed.
"""

import os
import signal
import time

import msgpack
import pytest
import torch
from nereid_backend import RequestError
from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.serving.tokenizer.image_prompts import (
    has_image_parts,
    may_accept_media,
    take_media,
)
from nereid_backend.vision.image_worker import _MAX_REQUESTS, ChildProcesses
from nereid_backend.vision.image_worker_handle import ImageWorkerHandle
from nereid_backend.vision.large_messages import Message
from nereid_backend.vision.packed_tensors import pack_images, unpack_images

from loadtest.bench.bench_large_images import SEE


@pytest.fixture
def ask():
    """A function that sends a request to the child process of a worker, and returns the answer.

    To answer, the child process calls the function `prepare` with the request's text and images.
    """
    workers = {}

    def send(prepare, image=b"image", timeout_s=5.0):
        if prepare not in workers:
            workers[prepare] = ChildProcesses(prepare, timeout_s)
        request = Message(msgpack.packb(["text", [image]]))
        return msgpack.unpackb(workers[prepare].answer(request).read())

    yield send
    for children in workers.values():
        children.end_child()


def answer_pid(text, images):
    """Return the process id of the child. The image b"refuse" is refused, and b"crash" crashes."""
    if images == [b"refuse"]:
        raise RequestError("image 1: it is broken.")
    if images == [b"crash"]:
        os._exit(3)
    return ["done", [os.getpid()], b""]


def test_a_child_answers_several_requests_and_is_then_replaced(ask):
    pids = [ask(answer_pid)[1][0] for _ in range(_MAX_REQUESTS + 1)]
    assert len(set(pids[:_MAX_REQUESTS])) == 1
    assert pids[-1] != pids[0]


@pytest.mark.parametrize("image", [b"refuse", b"crash"])
def test_a_child_that_refused_a_request_or_crashed_is_not_used_again(ask, image):
    (first_pid,) = ask(answer_pid)[1]
    assert ask(answer_pid, image)[0] == "refused"
    (second_pid,) = ask(answer_pid)[1]
    assert second_pid != first_pid


def test_a_request_is_sent_to_a_new_child_if_the_old_child_has_ended(ask):
    (first_pid,) = ask(answer_pid)[1]
    os.kill(first_pid, signal.SIGKILL)
    kind, (second_pid,), _ = ask(answer_pid)
    assert (kind, second_pid != first_pid) == ("done", True)


def test_a_worker_that_has_ended_between_two_requests_is_started_again():
    process = ImageWorkerHandle("nereid_backend.vision.image_worker", str(SEE))
    try:
        for _ in range(2):
            with pytest.raises(RequestError, match="image 1: the file is not an image"):
                process.call(["", [b""]])
            worker = process._kill_process.peek()[2][0]
            worker.kill()
            worker.wait()
    finally:
        process.close()


def test_a_child_that_hangs_is_ended(ask):
    start = time.monotonic()
    kind, message = ask(lambda text, images: time.sleep(60), timeout_s=0.3)
    assert (kind, message) == (
        "refused",
        "messages: the images or the audio were not prepared within 0.3 seconds. Send smaller or "
        "fewer files.",
    )
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("prepare", [lambda *_: os._exit(3), lambda *_: bytes(20 * 2**30)])
def test_a_child_that_crashes_or_needs_too_much_memory_refuses_the_images(ask, prepare):
    assert ask(prepare)[1].startswith("messages: the images or the audio need too much memory")


def test_an_error_of_a_child_is_a_refusal(ask):
    assert ask(answer_pid, b"refuse") == ["refused", "messages: image 1: it is broken."]


def test_a_refusal_keeps_the_example_at_the_end_of_its_message(ask):
    def refuse(text, images):
        raise RequestError("image 1: send a data URL such as data:image/png;base64,...")

    message = "messages: image 1: send a data URL such as data:image/png;base64,..."
    assert ask(refuse) == ["refused", message]


def test_a_field_of_an_image_part_that_is_null_is_ignored():
    part = {"type": "image", "image_url": None, "image": "data:image/png;base64,iVBO"}
    body = {"messages": [{"role": "user", "content": [part]}]}
    assert take_media(body) == [b"data:image/png;base64,iVBO"]


def test_images_of_messages_are_replaced_by_placeholders():
    url = "data:image/png;base64,iVBO"
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"image_url": {"url": url}},
    ]
    body = {"messages": [{"role": "user", "content": parts}, {"role": "user", "content": "b"}]}
    assert has_image_parts(body)
    assert take_media(body) == [url.encode()] * 3
    assert body["messages"][0]["content"][1:] == [{"type": "image"}] * 3
    assert body["messages"][1]["content"] == "b"


@pytest.mark.parametrize("part", [{"type": "image"}, {"type": "image_url", "image_url": {}}])
def test_an_image_part_without_a_url_is_refused(part):
    with pytest.raises(RequestError, match=r"must have image_url.url"):
        take_media({"messages": [{"role": "user", "content": [part]}]})


def test_a_checkpoint_for_text_reads_no_images(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert not may_accept_media(str(tmp_path))


def test_packed_images_are_unpacked_unchanged():
    arguments = {
        "pixel_values": torch.randn(1, 3, 4, 4).bfloat16(),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
        "sizes": [torch.zeros(2, dtype=torch.bool), 3, "a"],
    }
    images = unpack_images(pack_images(ImageInputs(arguments, b"d" * 32, 7, ("videos",))))
    assert (images.digest, images.first_token, images.kinds) == (b"d" * 32, 7, ("videos",))
    assert torch.equal(images.arguments["pixel_values"], arguments["pixel_values"])
    assert torch.equal(images.arguments["image_grid_thw"], arguments["image_grid_thw"])
    assert images.arguments["sizes"][1:] == [3, "a"]


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        msgpack.packb([1, 2, 3]),
        msgpack.packb([{"use_cache": True}, b"", 0, False]),
        msgpack.packb([{"a": {"dtype": "x", "shape": [1], "bytes": b"1"}}, b"", 0, False]),
        msgpack.packb([{"a": {"dtype": "float32", "shape": [9], "bytes": b"1234"}}, b"", 0, False]),
        msgpack.packb(
            [{"a": {"dtype": "quint8", "shape": [1], "bytes": b"1"}}, b"", 0, ["images"]]
        ),
        msgpack.packb([{"a": {"dtype": "uint8", "shape": [2**33], "bytes": b""}}, b"", 0, []]),
        msgpack.packb([{"a": {"dtype": "uint8", "shape": [1], "bytes": 2**40}}, b"", 0, []]),
        msgpack.packb([{"a": {"shape": [1]}}, b"", 0, ["images"]]),
        msgpack.packb([{}, 2**40, 0, ["images"]]),
        msgpack.packb([{}, bytes(65), 0, ["images"]]),
        msgpack.packb([{}, b"", float("inf"), ["images"]]),
    ],
)
def test_damaged_images_are_refused(data):
    with pytest.raises(RequestError, match="the images are damaged"):
        unpack_images(data)
