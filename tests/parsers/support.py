"""What the parsers' tests share: transcripts, formats to try, garbage made of their own markers."""

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
from nereid_parsers.formats.names import REASONING_MODULES, TOOL_MODULES

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
    """The folder of conformance cases beside the repository, or where the environment says."""
    named = os.environ.get("NEREID_CONFORMANCE")
    found = Path(named) if named else REPOSITORY.parent / "shared" / "conformance"
    return found if (found / "roundtrip.jsonl").is_file() else None


def all_formats() -> list[Format]:
    """Every registered name once, and some pairs of names."""
    names = sorted({*REASONING_MODULES, *TOOL_MODULES})
    return [
        *(get_format(name) for name in names),
        *(get_format(reasoning=one, tools=other) for one, other in PAIRS),
    ]


def transcripts() -> list[tuple[str, dict]]:
    """Every recorded transcript, with a name for its test."""
    return [
        (f"{path.stem}[{number}]", case)
        for path in sorted(DATA.glob("*.json"))
        for number, case in enumerate(json.loads(path.read_text(encoding="utf-8")))
    ]


def tool(name, required=None, **properties):
    """An OpenAI tool."""
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
    """Ids that are the same at every run."""
    numbers = itertools.count()
    return lambda: f"id{next(numbers)}"


def stream(fmt, text, size=10**9, **kwargs):
    """The events of a text fed in pieces of one size."""
    return stream_at(fmt, text, range(size, len(text), size), **kwargs)


def stream_at(fmt, text, cuts, **kwargs):
    """The events of a text cut at the given places."""
    parser = StreamParser(fmt, new_id=counted_ids(), **kwargs)
    events, at = [], 0
    for cut in [*sorted(set(cuts)), len(text)]:
        events += parser.feed(text[at:cut])
        at = cut
    return events + parser.finish()


def parsed(fmt, text, size=10**9, **kwargs):
    """The message of a text fed in pieces of one size."""
    return fold(stream(fmt, text, size, **kwargs))


def calls(message):
    """(name, arguments as values) of a message's calls."""
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


def check_order(events):
    """Calls begin in order, arguments belong to an open call, and every call ends once."""
    begun, ended = [], []
    for event in events:
        if isinstance(event, ToolCallStart):
            assert event.index == len(begun), events
            begun.append(event.index)
        elif isinstance(event, ArgumentsDelta):
            assert event.index in begun, events
            assert event.index not in ended, events
        elif isinstance(event, ToolCallEnd):
            ended.append(event.index)
    assert begun == ended, events


def markers_of(fmt: Format) -> list[str]:
    """Every string that a format's declaration holds, fields filled in."""
    found: set[str] = set()

    def visit(part):
        if isinstance(part, str):
            found.add(part)
        elif isinstance(part, tuple):
            for inner in part:
                visit(inner)
        elif is_dataclass(part):
            for one in fields(part):
                if one.name not in ("id", "order", "extra"):
                    visit(getattr(part, one.name))

    visit(fmt.layout)
    visit(fmt.ends)
    values = {"{name}": "f", "{key}": "a", "{number}": "0", "{id}": "x1", "{string}": "true",
              "{type}": "string", "{word}": "w", "{rest}": ""}  # fmt: skip
    for slot, value in values.items():
        found = {marker.replace(slot, value) for marker in found}
    return sorted(marker for marker in found if marker)
