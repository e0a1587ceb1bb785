"""Whatever a model writes: nothing raises, nothing is lost, and the cuts do not matter.

`NEREID_EXAMPLES` sets how many texts each format is tried on (default: few, to stay quick).
"""

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nereid_parsers import STRICT, Policy, fold
from nereid_parsers.format import BrokenArguments, StrayClose, UnknownTool
from parsers.support import TOOLS, all_formats, check_order, markers_of, stream_at

EXAMPLES = int(os.environ.get("NEREID_EXAMPLES", "12"))
FORMATS = all_formats()

BITS = [
    "{", "}", "[", "]", '"', "\\", '\\"', ",", ":", " ", "\n", "\n\n", "a", "f", "g", '"name"',
    '"arguments"', '"parameters"', '{"name": "f", "arguments": {"a": "x"}}', '{"a": 1}', "f(a=1)",
    "f(", "a=", "'x'", ")", "=", "null", "nul", "true", "12", "hello", "é", "</", "<", "<|", "(",
    "functions.f", "```", "text", ".", "{}", ";", "\\u00e9", "\\ud83d", "'''", "\u3000", "\x00",
]  # fmt: skip

POLICIES = st.sampled_from(
    [
        None,
        STRICT,
        Policy(unknown_tool=UnknownTool.CONTENT),
        Policy(unknown_tool=UnknownTool.DROP),
        Policy(broken_arguments=BrokenArguments.REPAIR_OR_RAW),
        Policy(stray_close=StrayClose.REASONING),
    ]
)


def garbage(fmt):
    """Text made of the format's own markers, whole and cut short, and of what stands between."""
    marker = st.sampled_from(markers_of(fmt))
    cut = st.tuples(marker, st.integers(1, 20)).map(lambda pair: pair[0][: pair[1]])
    piece = st.one_of(marker, marker, cut, st.sampled_from(BITS), st.sampled_from(BITS), st.text())
    return st.lists(piece, max_size=14).map("".join)


def kept_text(spans, kind):
    return "".join(text for found, text in spans if found == kind)


@pytest.mark.parametrize("fmt", FORMATS, ids=[fmt.name for fmt in FORMATS])
def test_garbage_is_never_lost_never_raises_and_reads_the_same_however_cut(fmt):
    shows_inline = "append_think" in fmt.name

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def run(data):
        text = data.draw(garbage(fmt))
        kwargs = {
            "policy": data.draw(POLICIES),
            "tools": data.draw(st.sampled_from([TOOLS, TOOLS, None, []])),
            "prompt": data.draw(st.one_of(st.none(), st.just("x"), garbage(fmt))),
        }
        whole = fold(stream_at(fmt, text, [], **kwargs))
        cuts = data.draw(st.one_of(st.just(range(1, len(text))), st.sets(st.integers(1, 60))))
        spans = []
        events = stream_at(
            fmt,
            text,
            [cut for cut in cuts if cut < len(text)],
            trace=lambda kind, piece: spans.append((kind, piece)),
            **kwargs,
        )
        check_order(events)
        assert fold(events) == whole
        assert "".join(piece for _, piece in spans) == text
        assert kept_text(spans, "reasoning") == (whole.reasoning or "")
        if not shows_inline:  # there the prompt's marker is repeated in the content
            assert kept_text(spans, "content") == (whole.content or "")

    run()


@pytest.mark.parametrize("fmt", FORMATS, ids=[fmt.name for fmt in FORMATS])
def test_repaired_arguments_are_always_json_objects(fmt):
    policy = Policy(broken_arguments=BrokenArguments.REPAIR_OR_DROP)

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(text=garbage(fmt))
    def run(text):
        message = fold(stream_at(fmt, text, [], tools=TOOLS, policy=policy))
        for call in message.tool_calls:
            assert isinstance(json.loads(call.arguments), dict)

    run()


@pytest.mark.parametrize("fmt", FORMATS, ids=[fmt.name for fmt in FORMATS])
def test_plain_prose_is_content_to_the_letter(fmt):
    text = "Well: 3 < 5, and so on.\n\n  Indented, \"quoted\" & 'single'.\n"
    message = fold(stream_at(fmt, text, range(1, len(text)), tools=TOOLS, prompt="x"))
    if message.reasoning is None:  # a forced opener says that all of it is reasoning
        assert message.content == text
    else:
        assert (message.reasoning, message.content) == (text, None)
