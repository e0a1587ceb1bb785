"""Tests that the inferred constraint of a template allows the calls that the template renders."""

import ast
import json
import re
from collections import defaultdict

import pytest
from nereid_parsers import ConstraintError, analyze_template, parse
from parsers.support import conformance
from parsers.template.support import (
    CALLS,
    NAMES,
    TOOLS,
    Renderer,
    message_of,
    source,
    tool,
)

xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed")

CANNOT = {
    "nested_elements",  # xgrammar cannot constrain nested elements with this marker.
    "nested_keys",
    # Objects without declared properties cannot be constrained if their keys have no quotes.
    "bare_keys",
    "argument_attributes",  # An attribute with an array contains HTML entities.
    "encoded_arguments",  # The arguments are JSON inside a JSON string.
    "one_tagged_call",  # The template renders arrays as objects.
    "harmony",  # The template renders several calls in a turn, but a call ends the turn.
    "no_switch_prompt",  # The rendered answer does not start with the generation prompt.
    # These templates omit the markup of the arguments if there are none. A constraint requires it.
    "name_alone",
    "optional_arguments",
    "self_closing",
}
# The first template writes arguments on indented lines, but a constraint allows only one character
# of white space at a time. The second template omits the end of the section after a single call.
UNLIKE = {
    "CohereForAI-c4ai-command-r-plus-tool_use.jinja",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja",
}
CASES_PER_TEMPLATE = 4
# A format with unquoted keys can constrain only arguments with declared properties and types.
CALLABLE = [tool("list_all", name="string")]


@pytest.fixture(scope="module")
def compiler():
    """A grammar compiler for a tokenizer that has one token for each byte."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"</s>"]
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, stop_token_ids=[256])
    return xgrammar.GrammarCompiler(info, max_threads=1)


def refusal(compiler, tag, text):
    """Return where a structural tag forbids a text, or None if it allows the whole text.

    Example: in b'<call>{"name": >>> 3}</call>', the byte after ">>> " is forbidden.
    """
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(json.dumps(tag)))
    data = text.encode()
    for index, byte in enumerate(data):
        if not matcher.accept_token(byte):
            return data[:index][-40:] + b" >>> " + data[index:][:40]
    return None if matcher.is_completed() else b"not complete: " + data[-40:]


def strict(tools):
    """Return copies of the tools in which `strict` is true."""
    return [{**t, "function": {**t["function"], "strict": True}} for t in tools]


def without_ends(text, fmt):
    """Return a rendered message without the markers that end the turn."""
    ends = [*fmt.ends, *getattr(fmt.layout, "ends", ()), "</s>"]
    return re.sub(f"(?:(?:{'|'.join(map(re.escape, ends))})\\s*)+$", "", text)


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_a_small_template_renders_is_allowed_beside_strict_tools(name, compiler):
    analysis = analyze_template(source(name))
    if analysis.supports.calls == "none":
        pytest.skip("no calls")
    message = message_of("It is four.", supports=analysis.supports)
    written = Renderer(source(name)).written(message, TOOLS)
    if written is None:
        pytest.skip("the rendered answer does not start with the prompt")
    try:
        tag = analysis.format.structural_tag(strict(CALLABLE), "auto", prompt=written.prompt)
    except ConstraintError as error:
        pytest.skip(str(error))
    assert refusal(compiler, tag, without_ends(written.text, analysis.format)) is None


@pytest.mark.parametrize("name", ["channel_calls", "segments"])
def test_the_header_of_a_call_is_allowed_after_reasoning(name, compiler):
    analysis = analyze_template(source(name))
    call = ("list_all", {})
    message = message_of(reasoning="Hm.", calls=[call], supports=analysis.supports)
    message["tool_calls"][0]["id"] = "callid000"
    written = Renderer(source(name)).written(message, TOOLS)
    tag = analysis.format.structural_tag(TOOLS, "required", prompt=written.prompt)
    assert refusal(compiler, tag, without_ends(written.text, analysis.format)) is None


@pytest.mark.parametrize("name", NAMES)
def test_calls_that_a_small_template_renders_are_allowed(name, compiler):
    analysis = analyze_template(source(name))
    supports = analysis.supports
    if supports.calls == "none" or name in CANNOT:
        pytest.skip("no calls, or none that can be constrained")
    lists_of_calls = [[call] for call in CALLS]
    if supports.parallel_calls:
        lists_of_calls.append(CALLS)
    for calls in lists_of_calls:
        message = message_of(calls=calls, supports=supports)
        if supports.ids != "numbered":
            for number, call in enumerate(message["tool_calls"]):
                call["id"] = f"callid{number:03}"
        written = Renderer(source(name)).written(message, TOOLS)
        if written is not None:
            text = without_ends(written.text, analysis.format)
            tag = analysis.format.structural_tag(TOOLS, "required", prompt=written.prompt)
            assert refusal(compiler, tag, text) is None


@pytest.mark.skipif(conformance() is None, reason="there are no conformance cases")
def test_calls_that_real_templates_render_are_allowed(compiler):
    num_cases, failures = 0, defaultdict(list)
    for name, cases in sorted(load_cases_with_calls().items()):
        text = (conformance() / "templates" / name).read_text(encoding="utf-8")
        fmt = analyze_template(text, eos_token=cases[0]["eos"]).format
        for case in cases[:CASES_PER_TEMPLATE]:
            num_cases += 1
            place = refusal_of_case(compiler, fmt, case)
            if place is not None:
                failures[name].append((case["id"], place))
    assert {name: places for name, places in failures.items() if name not in UNLIKE} == {}
    assert sum(map(len, failures.values())) <= 0.05 * num_cases


def load_cases_with_calls():
    """Return a dict from the name of each template to its conformance cases with tool calls."""
    cases = defaultdict(list)
    for line in (conformance() / "roundtrip.jsonl").read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        if case["expected"]["tool_calls"] and case["tools"] and not case.get("ambiguous"):
            cases[case["template"]].append(case)
    return cases


def refusal_of_case(compiler, fmt, case):
    """Return where the structural tag of `fmt` forbids the text of a case. See `refusal`."""
    # If calls are required, the tag forbids content. A case with content therefore needs optional
    # calls. Optional calls are constrained only if their tools are strict.
    if (case["expected"]["content"] or "").strip():
        tag = fmt.structural_tag(strict(case["tools"]), "auto", prompt=case["prompt"])
    else:
        tag = fmt.structural_tag(case["tools"], "required", prompt=case["prompt"])
    return refusal(compiler, tag, case["output"])


@pytest.mark.parametrize("text", ["Hi.", "Hi.<go>list_all {}</go>", "<go>list_all {}</go>"])
def test_an_answer_is_allowed_beside_strict_tools_if_its_markers_surround_calls_too(text, compiler):
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}<response>"
        "{{ m.content }}{% for c in m.tool_calls %}{{ '<go>' + c.function.name + ' ' }}"
        "{{ c.function.arguments | tojson }}</go>{% endfor %}</response>{% else %}{{ m.content }}"
        "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    fmt = analyze_template(template).format
    prompt = "<|user|>Hi.<|end|><|assistant|>"
    tag = fmt.structural_tag(strict(CALLABLE), "auto", prompt=prompt)
    assert refusal(compiler, tag, f"<response>{text}</response>") is None
    assert refusal(compiler, tag, "<response>Hi.<go>no_tool {}</go></response>") is not None


@pytest.mark.parametrize("separator", [";\\n", "\\n---\\n"])
def test_line_breaks_before_calls_are_allowed(separator, compiler):
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% if m.tool_calls %}"
        "{{ '<calls>\n' }}{% for c in m.tool_calls %}{{ c.function.name + ' ' }}"
        "{{ c.function.arguments | tojson }}{% if not loop.last %}{{ 'SEPARATOR' }}{% endif %}"
        "{% endfor %}{{ '\n</calls>' }}{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ).replace("SEPARATOR", separator)
    calls = [("list_all", {}), ("list_all", {"name": "a"})]
    written = Renderer(template).written(message_of(calls=calls), CALLABLE)
    fmt = analyze_template(template).format
    tag = fmt.structural_tag(CALLABLE, "required", prompt=written.prompt)
    assert refusal(compiler, tag, without_ends(written.text, fmt)) is None


FLAGS = [
    {
        "type": "function",
        "function": {
            "name": "set_flags",
            "parameters": {
                "type": "object",
                "properties": {"on": {"type": "boolean"}, "note": {"type": ["integer", "null"]}},
                "required": ["on"],
            },
        },
    },
    {"type": "function", "function": {"name": "list_all", "parameters": {"type": "object"}}},
]


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        (
            "tagged_parameters",
            "<tool_call>\n<function=set_flags>\n<parameter=on>\nTrue\n</parameter>\n"
            "<parameter=note>\nNone\n</parameter>\n</function>\n</tool_call>",
            {"on": True, "note": None},
        ),
        (
            "tagged_parameters",
            "<tool_call>\n<function=list_all>\n\n</function>\n</tool_call>",
            {},
        ),
        (
            "python_list",
            "<|tool_call_start|>[set_flags(on=true, note=null)]<|tool_call_end|>",
            {"on": True, "note": None},
        ),
        (
            "prompt_or_nothing",
            '</think><call name="list_all">{}</call>',
            {},
        ),
    ],
)
def test_variants_that_models_write_are_allowed_and_parsed(name, text, arguments, compiler):
    fmt = analyze_template(source(name)).format
    prompt = Renderer(source(name)).render([{"role": "user", "content": "Hi"}], FLAGS, prompt=True)
    tag = fmt.structural_tag(FLAGS, "required", prompt=prompt)
    assert refusal(compiler, tag, text) is None
    message = parse(text, format=fmt, tools=FLAGS, prompt=prompt)
    assert [json.loads(call.arguments) for call in message.tool_calls] == [arguments]
    assert not message.content


@pytest.mark.parametrize("value", ["'Gare du Nord'", "'it\\'s \"here\"'", '"Gare"'])
def test_python_strings_may_have_single_or_double_quotes(value, compiler):
    fmt = analyze_template(source("python_list")).format
    text = f"<|tool_call_start|>[get_Station(name={value})]<|tool_call_end|>"
    assert refusal(compiler, fmt.structural_tag(TOOLS, "required"), text) is None
    message = parse(text, format=fmt, tools=TOOLS)
    assert json.loads(message.tool_calls[0].arguments) == {"name": ast.literal_eval(value)}
