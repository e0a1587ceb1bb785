"""Tests of constrained Python calls with markers around each call: `<call>f()</call>`."""

import json

import pytest
from nereid_parsers import analyze_template, parse
from parsers.template.support import calls_of, tool

xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed")

TOOLS = [tool("f", a="integer"), tool("g")]
# A template that writes all tool calls between OPEN and CLOSE, and each call as in CALL.
TEMPLATE = (
    "{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{%- for m in messages %}{{ '<|' + m.role + '|>' + (m.content or '') }}"
    "{%- if m.tool_calls %}{{- 'OPEN' }}{% for c in m.tool_calls %}CALL"
    "{%- if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}{{- 'CLOSE' }}{% endif %}"
    "{{- '<|end|>' }}{% endfor %}{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PYTHON_CALL = (
    "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})"
)


def is_allowed(fmt, text):
    """Return whether the constraint of a format allows a text if a tool call is required."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"</s>"]
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, stop_token_ids=[256])
    tag = fmt.structural_tag(TOOLS, "required")
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(json.dumps(tag)))
    return all(map(matcher.accept_token, text.encode())) and matcher.is_completed()


@pytest.mark.parametrize(
    ("opening", "before", "after", "closing"),
    [("", "<call>", "</call>", ""), ("<code>", "await ", "", "</code>")],
    ids=["markers around each call", "a word before each call"],
)
def test_each_constrained_python_call_has_its_own_markers(opening, before, after, closing):
    call = f"{before}{PYTHON_CALL}{after}"
    text = TEMPLATE.replace("OPEN", opening).replace("CALL", call).replace("CLOSE", closing)
    fmt = analyze_template(text).format
    two_calls = f"{opening}{before}f(a=1){after}\n{before}g(){after}{closing}"
    assert is_allowed(fmt, two_calls)
    assert calls_of(parse(two_calls, format=fmt, tools=TOOLS)) == [("f", {"a": 1}), ("g", {})]
    without_markers_between = f"{opening}{before}f()g(){after}{closing}"
    assert not is_allowed(fmt, without_markers_between)
