"""Tests that a coding agent for Anthropic's API works with the frontend without changes."""

import json
import os
import shutil
import subprocess

import pytest
from fakes.fake_backend import FakeBackend
from fakes.live_frontend import live_frontend

AGENT = shutil.which("claude")

pytestmark = [
    pytest.mark.long,  # the agent takes several seconds to start
    pytest.mark.skipif(
        AGENT is None, reason="needs the agent: npm install -g @anthropic-ai/claude-code"
    ),
]


def run_agent(port, folder, prompt):
    """Run the agent with a prompt, and return the events that the agent prints."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{port}",
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "echo",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    command = [AGENT, "-p", prompt, "--model=echo", "--output-format=stream-json", "--verbose"]
    finished = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    return [json.loads(line) for line in finished.stdout.splitlines()]


def test_the_agent_runs_a_tool_and_reads_its_result(tmp_path):
    note = tmp_path / "note.txt"
    note.write_text("The answer is 42.")
    call = {"name": "Read", "arguments": {"file_path": str(note)}}
    backend = FakeBackend()
    with live_frontend(backend) as port:
        events = run_agent(port, tmp_path, f"<tool_call>{json.dumps(call)}</tool_call>")
        run_agent(port, tmp_path, "Hello")
    assert events[-1]["subtype"] == "success"
    # The echo model repeats the last message, which is the result of the tool.
    assert "The answer is 42." in events[-1]["result"]
    chats = [json.loads(generation.chat_request) for generation in backend.generations]
    roles = [[message["role"] for message in chat["messages"]] for chat in chats]
    assert ["system", "user", "assistant", "tool"] in roles
    # The system prompt and the tools of both conversations must be equal, so that the second
    # conversation reuses the prefix cache of the first one.
    assert len({chat["messages"][0]["content"] for chat in chats}) == 1
    assert len({json.dumps(chat["tools"]) for chat in chats}) == 1
