"""A frontend with the Batch API, and functions that create batches and read batch results."""

import json

import openai
import uvicorn
from nereid_client.app import create_app
from nereid_client.settings import Settings

from fakes.fake_backend import FakeBackend
from fakes.fake_pooling import FakePooling
from fakes.live_frontend import wait_for

CHAT = "/v1/chat/completions"


def serve(port, folder):
    """Run a frontend that serves the echo model until the process is killed."""
    settings = Settings(served_model_name="echo", batch_folder=folder)
    app = create_app(settings, FakeBackend)
    app.state.make_pooling = FakePooling
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


def line(number, text=None, url=CHAT, **body):
    """Return a line of a batch file. Without `body`, the line is a chat with the message `text`."""
    messages = [{"role": "user", "content": text or f"word{number}"}]
    body = body or {"model": "echo", "messages": messages}
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}


def jsonl(lines):
    """Return the content of a batch file. Lines that are bytes are copied without a change."""
    return b"".join(
        each if isinstance(each, bytes) else json.dumps(each).encode() + b"\n" for each in lines
    )


def library(port, key="none"):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)


def create(client, lines, endpoint=CHAT, **fields):
    """Upload the lines (or the bytes of the file), and start a batch."""
    content = lines if isinstance(lines, bytes) else jsonl(lines)
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields
    )


def finished(client, batch, timeout_s=60):
    """Wait until a batch has ended, and return the batch."""
    ends = ("completed", "failed", "expired", "cancelled")
    wait_for(lambda: client.batches.retrieve(batch.id).status in ends, timeout_s)
    return client.batches.retrieve(batch.id)


def results(client, file_id):
    """Return the lines of an output file or error file. There are none if the batch has no file."""
    if file_id is None:
        return []
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
