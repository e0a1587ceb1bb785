"""Tests that requests are rendered as transformers renders them, within limits."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nereid_parsers.template import ContinuationRefused, LimitError, RequestTemplate
from parsers.template.support import TEMPLATES

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
TRIMMED = CHAT.replace("m.content", "m.content | trim")
PARTS = "{% for p in messages[-1].content %}{{ p.text }}{% endfor %}"
ENDLESS = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"


def continued(source, content, **message):
    """Render a conversation whose last message is continued. `content` is its text so far."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "a", "content": content, **message}]
    return RequestTemplate(source).render({"messages": messages}, continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "content", "end"),
    [(CHAT, "Well, ", "<a>Well, "), (TRIMMED, " Well, ", "<a>Well,"), (CHAT, "", "<a>")],
)
def test_a_continued_message_stays_open(source, content, end):
    assert continued(source, content) == "<user>Hi</user>" + end


@pytest.mark.parametrize("content", [None, 7, [], [{"type": "image"}]])
def test_a_message_without_text_cannot_be_continued(content):
    with pytest.raises(ContinuationRefused):
        continued(CHAT, content)


def test_content_that_the_template_does_not_write_cannot_be_continued():
    with pytest.raises(ContinuationRefused, match="does not write"):
        continued("{{ messages[-1].content[:2] }}", "a long answer")


@settings(max_examples=15, deadline=None)
@given(st.text(max_size=30), st.sampled_from([CHAT, TRIMMED, PARTS]))
def test_a_continuation_is_equal_to_that_of_transformers(text, source):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.utils.chat_template_utils import render_jinja_template

    content = [{"type": "text", "text": text}] if source is PARTS else text
    messages = [{"role": "a", "content": content}]
    rendered, _ = render_jinja_template(
        [messages], chat_template=source, continue_final_message=True
    )
    template = RequestTemplate(source)
    assert template.render({"messages": messages}, continue_final_message=True) == rendered[0]


@pytest.mark.parametrize("sent", ["reasoning", "reasoning_content", "thinking"])
@pytest.mark.parametrize("read", ["reasoning", "reasoning_content", "thinking", "tool_plan"])
def test_the_reasoning_has_the_names_that_templates_read(sent, read):
    template = RequestTemplate(f"{{{{ messages[0].{read} }}}}")
    assert template.render({"messages": [{sent: "a", "content": None}]}) == "a"


def test_an_endless_request_ends_and_does_not_delay_others():
    template = RequestTemplate(f"{{% if hostile %}}{ENDLESS}{{% endif %}}done")
    errors = []

    def render_hostile_request():
        try:
            template.render({"hostile": True})
        except LimitError as error:
            errors.append(error)

    thread = threading.Thread(target=render_hostile_request)
    thread.start()
    start = time.thread_time()
    assert [template.render({"hostile": False}) for _ in range(50)] == ["done"] * 50
    assert time.thread_time() - start < 1.0
    thread.join(timeout=30)
    assert errors


def test_a_huge_string_is_refused():
    with pytest.raises(LimitError):
        RequestTemplate("{{ 'x' * n }}").render({"n": 10**9})


def test_example_templates_compile():
    for path in sorted(TEMPLATES.glob("*.jinja"))[:5]:
        RequestTemplate(path.read_text(encoding="utf-8"))
