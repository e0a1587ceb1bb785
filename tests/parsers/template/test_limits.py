"""Tests that untrusted templates that exceed a limit are rejected in time."""

import contextlib
import itertools
import json
import time
import tracemalloc
from types import SimpleNamespace

import pytest
from nereid_parsers import TemplateError, analyze_template
from nereid_parsers.template.request_template import RequestTemplate
from nereid_parsers.template.sandbox import compile_template, limits
from nereid_parsers.template.sandbox.compile_template import CompiledTemplate, RenderRefused
from nereid_parsers.template.sandbox.limits import Budget, LimitError, Limits, size_of
from parsers.template.support import TEMPLATES, Written, calls_of, stream_written

HOSTILE = json.loads((TEMPLATES / "hostile.json").read_text(encoding="utf-8")) | {
    "text in a loop": "{% for i in range(99999) %}" + "y" * 100_000 + "{% endfor %}",
    "nested too deep to compile": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "too long": "x" * 1_000_001,
}
# In these expressions, `x` is a text of 100_000 characters.
LARGE_RESULTS = [
    "range(2000) | join(x)",
    "range(2000) | map('string') | join(x)",
    "range(2000) | join(d=x)",
    "x.join(range(2000) | map('string'))",
    "range(2000) | map(attribute='a', default=x) | join",
    "range(2000) | map(attribute='a', default=x) | tojson",
    "('a' * 2000) | replace(old='a', new=x)",
    "('a' * 2000).translate({97: x})",
    "('{0}' * 2000).format(x)",
    "('{a}' * 2000).format(a=x)",
    "('{a.b}' * 2000).format_map({'a': x})",
    "('%(a)s' * 2000) | format(a=x)",
    "('%(a)s' * 2000) % {'a': x}",
    "('%9999d' * 2000) % ((1,) * 2000)",
    "('{:>9999}' * 2000).format(*((1,) * 2000))",
    "range(2000) | map(attribute='a', default=[1] * 15000) | sum(start=[])",
]


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_is_rejected_within_limits_of_time_and_memory(text):
    start = time.thread_time()
    with traced_memory() as peak, pytest.raises(TemplateError) as error:
        analyze_template(text)
    assert len(str(error.value)) > 20
    assert time.thread_time() - start < 20
    assert peak.num_bytes < 64_000_000


@contextlib.contextmanager
def traced_memory():
    """Measure the largest size of Python's memory inside the context.

    Yield an object. At the end of the context, its attribute `num_bytes` is set to this size.
    """
    peak = SimpleNamespace(num_bytes=None)
    tracemalloc.start()
    try:
        yield peak
        _, peak.num_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


# This chat template writes the text LONG before each tool call. The tests replace LONG by a long
# text.
LONG_MARKER = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    "{% for c in m.tool_calls or [] %}LONG<call>{{ c.function | tojson }}</call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>PROMPT' }}{% endif %}"
)


@pytest.mark.parametrize("text", ["[", "<a>", "words ", "<|a|> "])
def test_a_very_long_marker_is_rejected_in_time(text):
    start = time.thread_time()
    template = LONG_MARKER.replace("LONG", f"{{{{ '{text}' * 20000 }}}}").replace("PROMPT", "")
    with pytest.raises(LimitError, match="characters, but the limit is 1000: "):
        analyze_template(template)
    assert time.thread_time() - start < 5


def test_a_very_long_generation_prompt_is_analysed_in_time():
    start = time.thread_time()
    template = LONG_MARKER.replace("LONG", "").replace("PROMPT", "' + '[' * 40000 + '")
    analyze_template(template)
    assert time.thread_time() - start < 5


@pytest.mark.parametrize("text", ["I call the tool that is named below. ", "<a>", "x"])
def test_a_long_text_before_a_call_is_a_marker(text):
    marker = text * (600 // len(text))
    template = LONG_MARKER.replace("LONG", marker).replace("PROMPT", "")
    start = time.thread_time()
    fmt = analyze_template(template).format
    assert time.thread_time() - start < 5

    call = f'{marker}<call>{{"name": "f", "arguments": {{"a": 1}}}}</call>'
    for size in (1, 7, 10_000):
        message = stream_written(fmt, Written(None, call), size, tools=None)
        assert calls_of(message) == [("f", {"a": 1})]
        assert not message.content


@pytest.mark.parametrize("expression", LARGE_RESULTS)
def test_a_large_result_is_rejected_before_it_is_made(expression):
    template = CompiledTemplate("{{ " + expression + " }}", Budget())
    with traced_memory() as peak, pytest.raises(LimitError):
        template.render({"x": "x" * 100_000})
    assert peak.num_bytes < 10_000_000


def test_a_long_format_string_is_checked_in_time():
    template = CompiledTemplate("{{ text.format(1) }}", Budget())
    start = time.thread_time()
    with pytest.raises((LimitError, RenderRefused)):
        template.render({"text": "{" + ":" * 100_000})
    assert time.thread_time() - start < 2


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("[1, 2] | map('string') | join(d=', ')", "1, 2"),
        ("[1, 2] | map('abs') | sum", "3"),
        ("'{}{}{a}%'.format(x, 1, a=x) | length", "200002"),
        ("(('%s' * 2000) % ((1,) * 2000)) | length", "2000"),
        ("'abc'.translate({97: 'x'})", "xbc"),
    ],
)
def test_an_operation_with_a_small_result_is_allowed(expression, text):
    template = CompiledTemplate("{{ " + expression + " }}", Budget())
    assert template.render({"x": "x" * 100_000}) == text


@pytest.mark.parametrize(
    "text",
    [
        "{% if a == 1 %}x{{ b }}{% endif %}" * 9_000,
        "{{ a + b * c }}" * 20_000,
        "{{ [" + ",".join(["1"] * 60_000) + "] }}",
    ],
    ids=["conditions", "expressions", "a list"],
)
def test_the_compilation_of_a_long_template_is_interrupted(text):
    start = time.thread_time()
    with pytest.raises(LimitError, match=r"more than 0\.1 seconds"):
        CompiledTemplate(text, Budget(Limits(seconds=0.1)))
    # Without a limit, each compilation takes more than a second of processor time.
    assert time.thread_time() - start < 0.4


def test_a_template_with_too_much_code_is_rejected(monkeypatch):
    monkeypatch.setattr(compile_template, "MAX_CODE", 10_000)
    with pytest.raises(LimitError, match="characters of Python code"):
        CompiledTemplate("{{ a + b * c }}" * 50, Budget())


def test_time_of_other_programs_does_not_count_against_a_template(monkeypatch):
    hours = itertools.count(step=3600)
    clock = SimpleNamespace(thread_time=time.thread_time, monotonic=lambda: next(hours))
    monkeypatch.setattr(limits, "time", clock)
    template = CompiledTemplate("{% for i in range(999) %}x{% endfor %}", Budget())
    assert template.render({}) == "x" * 999


def test_the_limits_apply_to_all_renderings_together():
    template = CompiledTemplate("{{ 'x' * 200000 }}", Budget())

    def render_often():
        for _ in range(200):
            template.render({})

    with pytest.raises(LimitError, match="all renderings"):
        render_often()


def test_a_syntax_error_names_its_line():
    with pytest.raises(TemplateError, match="line 2"):
        analyze_template("a\n{% if %}")


def test_a_template_that_refuses_every_message_is_still_analysed():
    analysis = analyze_template("{{ raise_exception('never') }}")
    assert "never" in analysis.undecided[0]
    assert analysis.format.layout.tools is None


def test_the_message_of_a_refusal_is_kept():
    template = CompiledTemplate("{{ raise_exception('roles must alternate') }}", Budget())
    with pytest.raises(RenderRefused, match="roles must alternate"):
        template.render({})


def test_a_list_that_is_contained_twice_counts_twice():
    shared = ["abc"]
    assert size_of([shared, shared], max_size=1000) > 2 * len("abc")


# ---- the requests of a server --------------------------------------------------------------------


def test_a_request_template_renders_long_conversations():
    template = RequestTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    long_message = {"role": "user", "content": "x" * 400_000}
    short_message = {"role": "assistant", "content": "y"}
    text = template.render({"messages": [long_message, *[short_message] * 10_000]})
    assert text == "<user>" + "x" * 400_000 + "<assistant>y" * 10_000


def test_a_request_may_have_256_nested_lists():
    nested = []
    for _ in range(255):
        nested = [nested]
    messages = [{"role": "user", "content": [{"text": nested}]}]
    text = RequestTemplate("{{ messages[0].content[0].text | tojson }}").render(
        {"messages": messages}
    )
    assert text == "[" * 256 + "]" * 256


def test_a_template_may_not_make_too_many_nested_lists():
    source = (
        "{% set ns = namespace(x=[]) %}"
        "{% for i in range(999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}"
    )
    with pytest.raises(LimitError, match="a value of the template has more than 300 nested lists"):
        RequestTemplate(source).render({})


def test_a_request_template_writes_the_current_date():
    template = RequestTemplate("{{ strftime_now('%Y') }}")
    assert int(template.render({})) >= 2026


def test_each_request_has_its_own_limits():
    template = RequestTemplate("{% for i in range(n) %}{{ i }}{% endfor %}")
    assert template.render({"n": 3}) == "012"
    loop = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    hostile = RequestTemplate(f"{{% if hostile %}}{loop}{{% endif %}}done")
    with pytest.raises(LimitError, match="steps"):
        hostile.render({"hostile": True})
    assert hostile.render({"hostile": False}) == "done"
