"""Helpers for the tests of the parsers: transcripts, formats, and the markers of a format."""

import itertools
import json
import os
from dataclasses import fields, is_dataclass
from pathlib import Path

from nereid_parsers import (
    ArgumentsDelta,
    Format,
    StreamParser,
    ToolCallEnd,
    ToolCallStart,
    fold,
    get_format,
)
from nereid_parsers.formats import registry

DATA = Path(__file__).parents[1] / "data" / "transcripts"
REPOSITORY = Path(__file__).parents[2]
SIZES = (1, 2, 3, 5, 11, 10**9)

PAIRS = (
    ("qwen3", "hermes"),
    ("deepseek_r1", "deepseek_v31"),
    ("glm45", "glm45"),
    ("kimi_k3", "kimi_k3"),
    ("qwen3", "llama3_json"),
    ("nemotron_v3", "qwen3_coder"),
    ("qwen3", "pythonic"),
)


def conformance() -> Path | None:
    """Return the folder of the conformance cases, or None if there is none."""
    configured = os.environ.get("NEREID_CONFORMANCE")
    folder = Path(configured) if configured else REPOSITORY.parent / "shared" / "conformance"
    return folder if (folder / "roundtrip.jsonl").is_file() else None


def all_formats() -> list[Format]:
    """Return the formats of all registered names, and of some pairs of names."""
    names = sorted({*registry.REASONING, *registry.TOOLS})
    return [
        *(get_format(name) for name in names),
        *(get_format(reasoning=reasoning, tools=tools) for reasoning, tools in PAIRS),
    ]


def transcripts() -> list[tuple[str, dict]]:
    """Return all recorded transcripts, each with a name for its test."""
    return [
        (f"{path.stem}[{number}]", case)
        for path in sorted(DATA.glob("*.json"))
        for number, case in enumerate(json.loads(path.read_text(encoding="utf-8")))
    ]


def tool(name, required=None, **properties):
    """Return the declaration of a tool in OpenAI's format.

    `properties` contains the schema of each argument. If `required` is a list of arguments, the
    tool requires these arguments and accepts no arguments without a schema.
    """
    schema = {"type": "object", "properties": properties}
    if required is not None:
        schema |= {"required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    tool(
        "f",
        a={"type": "string"},
        b={"type": "integer"},
        c={"type": ["string", "null"]},
        d={"type": "array", "items": {"type": "string"}},
    ),
    tool("g"),
]


def counted_ids():
    """Return a function that generates the ids id0, id1 and so on."""
    numbers = itertools.count()
    return lambda: f"id{next(numbers)}"


def stream(fmt, text, size=10**9, **kwargs):
    """Return the events of a text that arrives in pieces of `size` characters."""
    return stream_at(fmt, text, range(size, len(text), size), **kwargs)


def stream_at(fmt, text, cuts, **kwargs):
    """Return the events of a text that arrives in pieces, split at the positions `cuts`."""
    parser = StreamParser(fmt, new_id=counted_ids(), **kwargs)
    events, start = [], 0
    for end in [*sorted(set(cuts)), len(text)]:
        events += parser.feed(text[start:end])
        start = end
    return events + parser.finish()


def parsed(fmt, text, size=10**9, **kwargs):
    """Return the message of a text that arrives in pieces of `size` characters."""
    return fold(stream(fmt, text, size, **kwargs))


def calls(message):
    """Return the name and the decoded arguments of each call of a message."""
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


def check_order(events):
    """Assert that calls start in order, and that arguments come between a call's start and end."""
    started_calls, ended_calls = [], []
    for event in events:
        if isinstance(event, ToolCallStart):
            assert event.index == len(started_calls), events
            started_calls.append(event.index)
        elif isinstance(event, ArgumentsDelta):
            assert event.index in started_calls, events
            assert event.index not in ended_calls, events
        elif isinstance(event, ToolCallEnd):
            ended_calls.append(event.index)
    assert started_calls == ended_calls, events


def markers_of(fmt: Format) -> list[str]:
    """Return all markers of a format. Replace placeholders in them by example values.

    Example: the marker "<function={name}>" becomes "<function=f>".
    """
    markers: set[str] = set()

    def collect(part):
        """Add the markers in a part of a format: a text, or all texts in a tuple or a dataclass."""
        if isinstance(part, str):
            markers.add(part)
        elif isinstance(part, tuple):
            for item in part:
                collect(item)
        elif is_dataclass(part):
            for attribute in fields(part):
                if attribute.name not in ("id", "order", "extra"):
                    collect(getattr(part, attribute.name))

    collect(fmt.layout)
    collect(fmt.ends)
    values = {"{name}": "f", "{key}": "a", "{number}": "0", "{id}": "x1", "{string}": "true",
              "{type}": "string", "{word}": "w", "{rest}": ""}  # fmt: skip
    for slot, value in values.items():
        markers = {marker.replace(slot, value) for marker in markers}
    return sorted(marker for marker in markers if marker)
