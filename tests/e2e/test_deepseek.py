"""Tests of the chat formats of DeepSeek V3, R1 and V3.1 with the openai library.

A scripted engine returns the output of a model. Each request is sent twice, with and without
streaming, and both answers must contain the same message. The test of one format starts a real
server. The tests of the other formats run the same steps in the test's process.
"""

import json
from contextlib import contextmanager

import openai
import pytest
from e2e.pipeline_backend import PipelineBackend
from e2e.scripted import checkpoint, scripted
from fakes.live_frontend import live_frontend

pytestmark = pytest.mark.triton

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
MARKERS = [
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    *(f"<｜tool▁{part}▁{end}｜>" for part in ("calls", "call") for end in ("begin", "end")),
    "<｜tool▁sep｜>",
]
SECTION = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
FENCED = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
BARE = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
PARIS, ROME = '{"city": "Paris"}', '{"city": "Rome", "days": 3}'
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("get_weather", "get_time")
]


def fenced(*calls):
    return SECTION.format("\n".join(FENCED.format(*call) for call in calls))


def bare(*calls):
    return SECTION.format("".join(BARE.format(*call) for call in calls))


WEATHER, TIME = ("get_weather", PARIS), ("get_time", ROME)

# For each chat template: the user's message -> the output of the model.
SCRIPTS = {
    "deepseek_v3_0324": {
        "plain": "Good day to you.",
        "one call": fenced(WEATHER),
        "two calls": fenced(WEATHER, TIME),
        "content then call": "Let me look. " + fenced(WEATHER),
    },
    "deepseek_r1": {
        "plain": "The user greets me.\n</think>\n\nGood day to you.",
        "one call": "I need the weather.\n</think>\n\n" + fenced(WEATHER),
        "two calls": "I need both.\n</think>\n\n" + fenced(WEATHER, TIME),
        "never closes": "On and on I think about it",
    },
    "deepseek_v31": {
        "plain": "Good day to you.",
        "thinking": "The user greets me.</think>Good day to you.",
        "one call": bare(WEATHER),
        "two calls": bare(WEATHER, TIME),
        "thinking, call": "I need the weather.</think>" + bare(WEATHER),
    },
}
# Cases for the rules of the strict parser policy, in the format of V3.1: the user's message -> the
# output of the model.
STRICT = {
    "a unclosed": "hm " + bare(WEATHER),
    "b second close": "one</think>two</think>three",
    "c text before": "hm</think>Well, " + bare(WEATHER),
    "d blanks before": "hm</think>\n \n" + bare(WEATHER),
    "e text between": "hm</think>"
    + SECTION.format(BARE.format(*WEATHER) + "oops" + BARE.format(*TIME)),
    "f cut off": "hm</think>" + bare(("get_weather", '{"city": "Paris", "days": 1'), TIME),
    "f beyond repair": "hm</think>" + bare(("get_weather", "no json"), TIME),
    "g not thinking": "Well, " + bare(WEATHER),
}


def rules(script):
    """Return the rules of the scripted engine: the text for prompts that contain `when`."""
    return [
        {"when": f"{message}<｜Assistant｜>", "text": text, "tokens_per_step": 3, "delay_ms": 2}
        for message, text in script.items()
    ]


@contextmanager
def on_a_server(folder, template, script):
    """Start `nereid serve` with a chat template and a script, and yield its OpenAI URL."""
    model = checkpoint(folder / "model", template, MARKERS, BOS, EOS)
    with scripted(model, rules(script), folder) as served:
        yield served.openai_url


@contextmanager
def in_this_process(folder, template, script, **settings):
    """Start a frontend whose backend runs in the test's process, and yield its OpenAI URL."""
    model = checkpoint(folder / "model", template, MARKERS, BOS, EOS)
    with (
        PipelineBackend(model, rules(script), folder, **settings) as backend,
        live_frontend(backend) as port,
    ):
        yield f"http://127.0.0.1:{port}/v1"


# Each chat template is tested with both servers.
PLACES = [
    *((name, in_this_process) for name in SCRIPTS),
    ("deepseek_v31", on_a_server),
    pytest.param(("deepseek_v3_0324", on_a_server), marks=pytest.mark.long),
    pytest.param(("deepseek_r1", on_a_server), marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=PLACES, ids=lambda place: f"{place[0]} {place[1].__name__}")
def family(request, tmp_path_factory):
    """The name of one of the three templates, and a function that sends a chat request."""
    name, start_server = request.param
    with start_server(tmp_path_factory.mktemp(name), name, SCRIPTS[name]) as url:
        yield name, asker(url)


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    """A function that sends a chat request to a server with the strict parser policy."""
    folder = tmp_path_factory.mktemp("strict")
    with in_this_process(folder, "deepseek_v31", STRICT, parser_policy="strict") as url:
        yield asker(url)


def asker(url):
    """Return a function that sends chat requests to the server at this URL."""

    def ask(content, **fields):
        """Send a request with and without streaming. Return the message, if both are equal."""
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            body = {
                "model": client.models.list().data[0].id,
                "messages": [{"role": "user", "content": content}],
                "tools": TOOLS,
            } | fields
            whole = message_of(client.chat.completions.create(**body).choices[0])
            chunks = client.chat.completions.create(**body, stream=True)
            assert message_of_stream(chunks) == whole
        return whole

    return ask


def message_of(choice):
    message = choice.message
    return {
        "reasoning": getattr(message, "reasoning", None) or "",
        "content": message.content or "",
        "calls": [
            (call.function.name, call.function.arguments) for call in message.tool_calls or []
        ],
        "finish_reason": choice.finish_reason,
    }


def message_of_stream(chunks):
    """Join the chunks of a stream. Return the same value as `message_of` for the whole answer."""
    message = {"reasoning": "", "content": ""}
    names, arguments, finish_reasons = [], [], []
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        for field in message:
            message[field] += getattr(choice.delta, field, None) or ""
        for piece in choice.delta.tool_calls or []:
            if piece.index == len(names):  # the first piece of a call has the name
                names.append(piece.function.name)
                arguments.append("")
            arguments[piece.index] += piece.function.arguments or ""
        if choice.finish_reason:
            finish_reasons.append(choice.finish_reason)
    (finish_reason,) = finish_reasons
    calls = list(zip(names, arguments, strict=True))
    return {**message, "calls": calls, "finish_reason": finish_reason}


def thinking(is_on):
    return {"extra_body": {"chat_template_kwargs": {"thinking": is_on}}}


def expected(reasoning="", content="", calls=()):
    return {
        "reasoning": reasoning,
        "content": content,
        "calls": list(calls),
        "finish_reason": "tool_calls" if calls else "stop",
    }


def without_blanks(message):
    return message | {name: message[name].strip() for name in ("reasoning", "content")}


def test_text_alone_is_content(family):
    name, ask = family
    reasoning = "The user greets me." if name == "deepseek_r1" else ""
    assert without_blanks(ask("plain")) == expected(reasoning, "Good day to you.")


def test_one_call(family):
    name, ask = family
    reasoning = "I need the weather." if name == "deepseek_r1" else ""
    assert without_blanks(ask("one call")) == expected(reasoning, calls=[WEATHER])


def test_several_calls(family):
    name, ask = family
    reasoning = "I need both." if name == "deepseek_r1" else ""
    assert without_blanks(ask("two calls")) == expected(reasoning, calls=[WEATHER, TIME])


# For each chat template: the user's message, the request's fields and the expected answer.
OUTPUTS_OF_ONE_FORMAT = {
    "deepseek_v3_0324": [("content then call", {}, expected("", "Let me look.", [WEATHER]))],
    "deepseek_r1": [("never closes", {}, expected("On and on I think about it"))],
    "deepseek_v31": [
        ("thinking", thinking(True), expected("The user greets me.", "Good day to you.")),
        ("thinking, call", thinking(True), expected("I need the weather.", "", [WEATHER])),
    ],
}


def test_outputs_that_only_some_formats_have(family):
    name, ask = family
    for user_message, fields, expected_answer in OUTPUTS_OF_ONE_FORMAT[name]:
        assert ask(user_message, **fields) == expected_answer


def test_effort_switches_the_thinking_where_the_template_can(family):
    name, ask = family
    if name == "deepseek_v31":
        with_effort = ask("thinking", reasoning_effort="high")
        assert with_effort["reasoning"] == "The user greets me."
        without_effort = ask("plain", reasoning_effort="none")
        assert without_effort == expected("", "Good day to you.")
    else:
        with pytest.raises(openai.BadRequestError, match="reasoning_effort") as caught:
            ask("plain", reasoning_effort="high")
        assert caught.value.param == "reasoning_effort"


def test_with_tool_choice_none_calls_are_text(family):
    name, ask = family
    message = ask("one call", tool_choice="none")
    assert (message["calls"], message["finish_reason"]) == ([], "stop")
    written = fenced(WEATHER) if name != "deepseek_v31" else bare(WEATHER)
    assert message["content"].strip() == written


@pytest.mark.parametrize(
    ("user_message", "expected_answer"),
    [
        ("a unclosed", expected("hm " + bare(WEATHER))),
        ("b second close", expected("one", "two</think>three")),
        ("c text before", expected("hm", "Well, " + bare(WEATHER))),
        ("d blanks before", expected("hm", "", [WEATHER])),
    ],
)
def test_strict_rules_of_reasoning_and_text(strict, user_message, expected_answer):
    assert strict(user_message, **thinking(True)) == expected_answer


def test_strict_text_between_calls_ends_them(strict):
    message = strict("e text between", **thinking(True))
    assert message["calls"] == [WEATHER]
    assert message["content"].startswith("oops")
    assert BARE.format(*TIME) in message["content"]


def test_strict_broken_arguments_are_repaired_or_their_call_dropped(strict):
    repaired = strict("f cut off", **thinking(True))["calls"]
    assert [name for name, _ in repaired] == ["get_weather", "get_time"]
    assert json.loads(repaired[0][1])["city"] == "Paris"
    assert repaired[1] == TIME
    assert strict("f beyond repair", **thinking(True))["calls"][-1:] == [TIME]


def test_strict_without_thinking_text_before_a_call_makes_all_of_it_content(strict):
    message = strict("g not thinking", **thinking(False))
    assert message == expected("", "Well, " + bare(WEATHER))
