"""Tests that random chat templates are analysed or refused in time, without a crash."""

import contextlib
import re
from pathlib import Path

import pytest
import torch  # noqa: F401 - load_tokenizer prevents a later import
from fuzz.values import damaged, mutated, odd
from nereid_backend.errors import RequestError
from nereid_backend.serving.tokenizer.prompt_builder import PromptBuilder, load_tokenizer
from nereid_parsers import NereidParsersError
from nereid_parsers.template import analyze_template

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = sorted((ROOT / "tests" / "data" / "templates").glob("*.jinja"))
_TAG = re.compile(r"(\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\})", re.DOTALL)
_REPLACEMENTS = (
    *("{{ messages }}", "{{ messages[9].content }}", "{{ 1 // 0 }}", "{{ [][3] }}", "{{ x.y.z }}"),
    *("{{ messages | tojson | fromjson }}", "{{ ''.__class__.__mro__ }}", "{{ 10 ** 10 ** 6 }}"),
    *(
        "{% for a in range(10 ** 9) %}x{% endfor %}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ '%99999999d' % 1 }}",
    ),
    *("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% include 'x' %}", "{% set a = a.b %}"),
    *("{{ messages.append(messages) }}", "{{ raise_exception(messages) }}", "{% endif %}", "{%"),
    *(
        "{{ messages | sum }}",
        "{{ none + 1 }}",
        "{{ messages[0]['content'][10 ** 30] }}",
        "\0",
        "}}",
    ),
)
HOSTILE = (
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{% for a in range(999) %}{% set x = 'y' * 9999 %}{{ x * 999 }}{% endfor %}",
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 2) }}{% endmacro %}{{ f(0) }}",
    "{% set ns = namespace(a='x') %}{% for m in range(64) %}{% set ns.a = ns.a * 2 %}{% endfor %}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ (1).__class__.__bases__[0].__subclasses__() }}",
    "{{ 9 ** 9 ** 9 ** 9 }}",
    "{{ '{0.__class__}'.format(1) }}",
    "(" * 5000,
    "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
    "{% if a %}" * 500 + "{% endif %}" * 500,
    "{{ " + "-" * 3000 + "1 }}",
)
CHATS = (
    {"messages": [{"role": "user", "content": "Hello!"}]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "Rain."},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "chat_template_kwargs": {"enable_thinking": True},
    },
)


def template(rng):
    """Return a random template of `TEMPLATES` in which pieces are deleted, repeated or moved.

    Pieces may also be replaced by others, and in some templates bytes are changed at random.
    """
    pieces = _TAG.split(rng.choice(TEMPLATES).read_text())
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(pieces))
        change = rng.choice(("replace", "repeat", "move", "delete"))
        if change == "replace":
            pieces[at] = rng.choice(_REPLACEMENTS)
        elif change == "repeat":
            pieces[at] *= 2
        elif change == "move":
            pieces.insert(at, pieces.pop(rng.randrange(len(pieces))))
        else:
            pieces[at] = ""
    text = "".join(pieces)
    if rng.random() < 0.3:
        return damaged(rng, text.encode()).decode(errors="replace")
    return text


def refusal(source):
    """Analyse a template. Return the reason why it is refused, or None if it is accepted."""
    try:
        analyze_template(source).explain()
    except NereidParsersError as error:
        return str(error)
    return None


def test_any_template_is_analysed_or_refused_in_time(random_cases, errors_with_case):
    for number, rng in random_cases("template", default_number=150):
        source = template(rng)
        with errors_with_case(number, source):
            assert refusal(source) != ""


@pytest.mark.parametrize("source", HOSTILE)
def test_a_hostile_template_is_refused_or_harmless(errors_with_case, source):
    with errors_with_case(0, source):
        assert refusal(source) != ""


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(ROOT / "demo" / "chat"))


def random_chat(rng):
    """Return a chat request. Some of the results are wrong."""
    chat = rng.choice(CHATS)
    if rng.random() < 0.3:
        chat = mutated(rng, chat, ("tools", "documents", "chat_template_kwargs", "thinking"))
    if rng.random() < 0.1:
        chat = chat | {"chat_template_kwargs": {"enable_thinking": odd(rng)}}
    return chat


def test_any_template_renders_a_chat_or_refuses_it(random_cases, errors_with_case, tokenizer):
    builder = PromptBuilder(tokenizer, max_model_len=4096)
    for number, rng in random_cases("rendering", default_number=150):
        tokenizer.chat_template = source = template(rng)
        chat = random_chat(rng)
        # A server does not start with a refused template, so it renders no chats.
        if refusal(source) is None:
            with errors_with_case(number, (chat, source)), contextlib.suppress(RequestError):
                builder.from_chat(chat)


def test_a_template_that_fails_in_its_own_way_refuses_the_messages(tokenizer):
    for source in ("{{ 1 // 0 }}", "{{ [][3].x }}", "{% for a in range(10 ** 7) %}{% endfor %}"):
        tokenizer.chat_template = source
        builder = PromptBuilder(tokenizer, max_model_len=4096)
        with pytest.raises(RequestError, match=r"^messages: .*"):
            builder.from_chat(CHATS[0])
