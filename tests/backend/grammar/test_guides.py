"""Tests of grammars: which texts they allow, why they are refused, and limits of compilation."""

import json
import re
import subprocess
import sys
import time

import pytest
from backend.grammar.conftest import MODEL
from nereid_backend.core.grammar import GrammarSpec
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.errors import EngineError, RequestError
from nereid_backend.grammar import Guides
from nereid_backend.grammar.byte_cache import ByteCache
from nereid_backend.grammar.compile_cost import check_cost
from nereid_backend.grammar.request_spec import schema_spec
from nereid_parsers import get_format

EOS = {2, 0}


@pytest.mark.parametrize(
    ("spec", "allowed_text", "forbidden_text"),
    [
        (GrammarSpec("regex", r"[a-c]+-\d{2}/x"), "abc-12/x", "abd-12/x"),
        (GrammarSpec.choice(["red", "green/blue\n", 'a "q" <b>', "überß", "."]), "überß", "x"),
        (GrammarSpec.choice(["red", "green/blue\n", 'a "q" <b>', "."]), "green/blue\n", "x"),
        (GrammarSpec("ebnf", 'root ::= "a" b+\nb ::= "x" | "yz"'), "axyz", "ay "),
        (GrammarSpec("ebnf", 'start: "a" b+\nb: "x" | "yz"'), "axyz", "ay "),
        (GrammarSpec("json_schema", '{"type": "integer", "maximum": 12}'), "12", "13"),
    ],
)
def test_a_grammar_accepts_matching_text_and_no_other_text(
    spec, allowed_text, forbidden_text, guide, vocabulary
):
    state = guide(spec)
    state.accept([*vocabulary.encode(allowed_text), 2])
    with pytest.raises(EngineError, match="not allowed"):
        guide(spec).accept([*vocabulary.encode(forbidden_text), 2])


@pytest.mark.parametrize(
    ("bounds", "number"),
    [
        ({"exclusiveMinimum": 3, "maximum": 3.6}, "3"),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.6}, "0"),
        ({"exclusiveMaximum": -3, "minimum": -3.6}, "-3"),
    ],
)
def test_exclusive_bounds_are_excluded(bounds, number, guide, vocabulary):
    spec = schema_spec({"type": "number", **bounds}, is_strict=True)
    guide(spec).accept([*vocabulary.encode(f"{number}.2"), 2])
    with pytest.raises(EngineError, match="not allowed"):
        guide(spec).accept([*vocabulary.encode(number), 2])


def test_the_stricter_of_two_bounds_of_a_side_is_kept(guide, vocabulary):
    bounds = {"minimum": 3.5, "exclusiveMinimum": 3, "maximum": 3.6}
    spec = schema_spec({"type": "number", **bounds}, is_strict=True)
    guide(spec).accept([*vocabulary.encode("3.55"), 2])
    with pytest.raises(EngineError, match="not allowed"):
        guide(spec).accept([*vocabulary.encode("3.2"), 2])


@pytest.mark.parametrize(
    ("schema", "allowed_text", "forbidden_text"),
    [
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, str(2**63 - 1), "1.5"),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, "5", "-5"),
        ({"type": "number", "minimum": -1e308, "maximum": 1e308}, "-5.5", str(10**309)),
        ({"type": "number", "exclusiveMaximum": 1e300}, "-5.5", str(10**300)),
        ({"type": ["integer", "null"], "maximum": 10**400}, "-5", "1.5"),
        # In JSON Schema, `additionalItems` has no effect if `items` is not a list.
        ({"type": "array", "prefixItems": [{"const": 1}], "additionalItems": False}, "[1]", "[2]"),
    ],
)
def test_a_schema_that_the_library_misreads_is_enforced(
    schema, allowed_text, forbidden_text, guide, vocabulary
):
    spec = schema_spec(schema, is_strict=True)
    guide(spec).accept([*vocabulary.encode(allowed_text), 2])
    with pytest.raises(EngineError, match="not allowed"):
        guide(spec).accept([*vocabulary.encode(forbidden_text), 2])


# A grammar that matches a single text: "ab", repeated 2**24 times. Each of the rules r0 to r23
# repeats the next rule twice.
DOUBLED = "\n".join(
    ["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(24)), 'r24 ::= "ab"']
)


@pytest.mark.parametrize(
    "node",
    [
        {"type": "grammar", "grammar": DOUBLED},
        {"type": "regex", "pattern": "((a{99}){99}){99}"},
        {
            "type": "json_schema",
            "json_schema": {"type": "string", "pattern": "^((a{99}){99}){99}$"},
        },
        {"type": "repeat", "content": {"type": "const_string", "value": "a"}, "min": 9, "max": 9},
    ],
)
def test_a_text_that_may_be_huge_is_not_forced(node, guide, vocabulary):
    elements = [{"type": "const_string", "value": "x"}, node]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    state = guide(GrammarSpec("structural_tag", json.dumps(tag)))
    state.accept(vocabulary.encode("x"))
    assert state.fork().forced() == []


def test_the_text_of_an_ebnf_grammar_is_not_forced(guide, vocabulary):
    state = guide(GrammarSpec("ebnf", DOUBLED))
    state.accept(vocabulary.encode("a")[:1])
    assert state.fork().forced() == []


def test_a_complete_grammar_leaves_only_stop_tokens(guide, allowed, vocabulary):
    state = guide(GrammarSpec.choice(["yes"]))
    state.accept(vocabulary.encode("yes"))
    assert allowed(state) == EOS

    with_other_stop = guide(GrammarSpec.choice(["yes"]), stops=frozenset({7}))
    with_other_stop.accept(vocabulary.encode("yes"))
    assert allowed(with_other_stop) == {7}
    with_other_stop.accept([7])
    assert allowed(with_other_stop) == {7}


def test_without_stop_tokens_the_checkpoints_stop_tokens_end_the_answer(guide, allowed, vocabulary):
    state = guide(GrammarSpec.choice(["yes"]), stops=frozenset())
    state.accept(vocabulary.encode("yes"))
    assert allowed(state) == EOS


def test_markup_is_never_text(guide, allowed, vocabulary):
    free = {"type": "structural_tag", "format": {"type": "any_text"}}
    state = guide(GrammarSpec("structural_tag", json.dumps(free)))
    assert 1 not in allowed(state)  # Token 1 is <|im_start|>.
    assert vocabulary.encode("hello")[0] in allowed(state)

    text = guide(GrammarSpec("json_schema", '{"type": "string"}'))
    text.accept(vocabulary.encode('"a'))
    assert not allowed(text) & {0, 1, 2}


def test_markup_that_a_tag_names_may_be_written(guide, allowed):
    tag = {"type": "tag", "begin": "<|im_start|>", "content": {"type": "any_text"}, "end": "!"}
    source = json.dumps({"type": "structural_tag", "format": tag})
    assert 1 in allowed(guide(GrammarSpec("structural_tag", source)))


def test_strings_of_bounded_length_in_a_tag_hold_no_control_characters(guide, vocabulary):
    schema = {"type": "string", "minLength": 1, "maxLength": 5}
    node = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<a>", "content": node, "end": "</a>"}
    spec = GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": tag}))
    guide(spec).accept([*vocabulary.encode('<a>"x y"</a>'), 2])
    for wrong in ('<a>"x\ty"</a>', '<a>"123456"</a>', '<a>""</a>'):
        with pytest.raises(EngineError, match="not allowed"):
            guide(spec).accept([*vocabulary.encode(wrong), 2])


def test_forced_text_has_the_tokens_that_the_tokenizer_returns(guide, vocabulary):
    schema = {
        "type": "object",
        "properties": {"temperature": {"const": "unknown"}},
        "required": ["temperature"],
        "additionalProperties": False,
    }
    tag = {
        "type": "tag",
        "begin": '<tool_call>\n{"name": "get_weather", "arguments": ',
        "content": {"type": "json_schema", "json_schema": schema},
        "end": "}\n</tool_call>",
    }
    state = guide(
        GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": tag}))
    )
    forced = state.forced()
    assert forced == vocabulary.encode('<tool_call>\n{"name": "get_weather", "arguments": {')[:-1]
    state.accept(forced)


def test_nothing_is_forced_where_the_answer_may_end(guide, vocabulary):
    state = guide(GrammarSpec("regex", "ab(cdefgh)?"))
    state.accept(vocabulary.encode("ab"))
    assert state.forced() == []


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("regex", "ab[z-a]", r"column 4"),
        ("regex", "(ab", r"unclosed group \(column 1\)"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("regex", "ab\\", r"^regex: .* incomplete escape sequence \(column 3\)"),
        ("regex", "\ud800", "^regex: the grammar is not valid: .* surrogates not allowed"),
        ("ebnf", 'root ::= "a" b', "line 1, column 14"),
        ("ebnf", "start: nowhere", "nowhere"),
        ("choice", "[]", "at least one string"),
        ("choice", '["a", 1]', "member 1"),
        ("json_schema", "[]", "^json_schema: the grammar is not valid: Expecting object schema"),
        (
            "json_schema",
            '{"const": "\\ud800"}',
            "^json_schema: the grammar is not valid: .* escape",
        ),
        (
            "json_schema",
            '{"minLength": 1e400}',
            "^json_schema: the grammar is not valid: .* infinity",
        ),
        ("json_schema", "{", "not JSON. The parser stopped at column 2"),
        (
            "json_schema",
            '{"properties": {"a": {"type": "x"}}}',
            r"\$\.properties\.a is not valid: Invalid type",
        ),
        (
            "json_schema",
            '{"properties": {"a": {"items": {"not": {}}}}}',
            r"\$\.properties\.a\.items has keywords that cannot be enforced: not\.",
        ),
        (
            "json_schema",
            '{"properties": {"b": {}, "a": {"pattern": "a("}}}',
            r"\$\.properties\.a is not valid: unclosed group",
        ),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "x"}}', "not recognized"),
        ("regex", "^ab(c$", r"unclosed group \(column 4\)"),
        ("regex", r"a[^\s\S]", "no text that the model can write matches"),
        ("json_schema", '{"$ref": "#"}', "no text that the model can write matches"),
        ("ebnf", "start: start", "no text that the model can write matches"),
        ("regex", "a" * 300_000, "300000 bytes long, but the limit is 262144 bytes"),
        (
            "json_schema",
            '{"a":' * 300 + "1" + "}" * 300,
            "levels deep, but the limit is 128 levels",
        ),
    ],
)
def test_an_invalid_grammar_is_refused_with_the_position_of_the_error(
    kind, source, message, problem
):
    error = problem(kind, source)
    assert isinstance(error, RequestError)
    assert re.search(message, str(error)), error


@pytest.mark.parametrize(
    ("name", "place"),
    [
        (
            "hermes",
            r"'<tool_call>\\n{\"name\": \"bad\", .*', in the schema at \$.properties.unit\)",
        ),
        ("qwen3_coder", r"'<tool_call>\\n<function=bad>\\n<parameter=city>.*<parameter=unit>"),
    ],
)
def test_an_invalid_schema_of_a_tool_is_refused_with_the_name_of_the_tool(name, place, problem):
    def tool(name, unit):
        properties = {"city": {"type": "integer"}, "unit": unit}
        parameters = {"type": "object", "properties": properties, "required": ["city", "unit"]}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    tools = [tool("good", {"enum": ["C"]}), tool("bad", {"enum": []})]
    tag = get_format(tools=name).structural_tag(tools, "required")
    error = problem("structural_tag", json.dumps(tag))
    assert re.search(f"the text {place}.*: enum array must not be empty", str(error)), error


def test_a_schema_that_is_not_strict_ignores_keywords_that_cannot_be_enforced(guide, vocabulary):
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    with pytest.raises(RequestError, match="cannot be enforced: uniqueItems"):
        guide(schema_spec(schema, is_strict=True))
    guide(schema_spec(schema, is_strict=False)).accept([*vocabulary.encode("[1, 1]"), 2])


def test_a_schema_that_is_not_strict_ignores_patterns_that_are_not_supported(guide, vocabulary):
    patterns = {"a": "^(?!x)", "b": r"^\bb", "c": r"^(c)\1$", "d": "^e$"}
    properties = {name: {"type": "string", "pattern": patterns[name]} for name in patterns}
    schema = {"type": "object", "properties": properties, "required": list(patterns)}
    with pytest.raises(RequestError, match=r"\$\.properties\.a is not valid: look-around"):
        guide(schema_spec(schema, is_strict=True))
    text = '{"a": "x", "b": "", "c": "x", "d": "e"}'
    guide(schema_spec(schema, is_strict=False)).accept([*vocabulary.encode(text), 2])
    # An invalid pattern is an error, even if the schema is not strict.
    properties["d"]["pattern"] = "("
    with pytest.raises(RequestError, match=r"\$\.properties\.d is not valid: unclosed group"):
        guide(schema_spec(schema, is_strict=False))


def test_only_the_first_200_schemas_are_searched_for_the_place_of_an_error(guide):
    refused = {"type": "array", "uniqueItems": True}
    strings = {f"p{number}": {"type": "string"} for number in range(250)}
    few = {"type": "object", "properties": {"last": refused}}
    many = {"type": "object", "properties": {**strings, "last": refused}}
    with pytest.raises(RequestError, match=r"\$\.properties\.last"):
        guide(schema_spec(few, is_strict=True))
    with pytest.raises(RequestError, match="uniqueItems") as error:
        guide(schema_spec(many, is_strict=True))
    assert "properties" not in str(error.value)


def test_a_schema_cannot_bring_options_of_its_own(guide):
    schema = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    with pytest.raises(RequestError, match="uniqueItems"):
        guide(schema_spec(schema, is_strict=True))


def test_bounds_whose_compilation_would_take_minutes_are_refused():
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": "ab.{0,2000}"}}
    with pytest.raises(
        RequestError, match=r"10 s\. The bound in \$\.format\.pattern, column 4 asks for 2000"
    ):
        check_cost("structural_tag", json.dumps(tag), 150_000, 10.0)
    check_cost("structural_tag", json.dumps(tag), 2_000, 10.0)


def test_wide_regexes_compile_at_once(guide):
    started_s = time.perf_counter()
    guide(GrammarSpec("regex", ".{0,20000}x{3}"))
    guide(schema_spec({"type": "string", "maxLength": 50_000}, is_strict=True))
    assert time.perf_counter() - started_s < 20


def test_preparing_never_blocks_and_equal_grammars_are_compiled_once(guides):
    params = SamplingParams(grammar=schema_spec({"type": "boolean"}, is_strict=True))
    guides.prepare(params, frozenset(EOS)).result(60)
    second = guides.prepare(params, frozenset(EOS))
    assert second.done()
    assert second.result().fork() is not second.result()


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path):
    guides = Guides(str(tmp_path), vocab_size=10, eos_token_ids=[1])
    params = SamplingParams(grammar=GrammarSpec("regex", "a"))
    assert "tokenizer cannot be loaded" in str(guides.prepare(params, frozenset()).exception(60))
    guides.close()


def test_a_checkpoint_without_an_end_of_sequence_token_is_refused_with_the_remedy():
    guides = Guides(MODEL, vocab_size=2048, eos_token_ids=[])
    params = SamplingParams(grammar=GrammarSpec("regex", "a"))
    error = guides.prepare(params, frozenset({5})).exception(60)
    assert "no end-of-sequence token. Set eos_token_id" in str(error)
    guides.close()


# ---- the cache and the imports -------------------------------------------------------------------


def test_the_cache_evicts_the_least_recently_used_item():
    cache = ByteCache(10)
    for name in "ab":
        cache.put(name, name, 4)
    assert cache.get("a") == "a"
    cache.put("c", "c", 4)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == ("a", None, "c")
    cache.put("d", "d", 11)
    assert cache.get("d") is None
    assert cache.num_bytes == 8


def test_the_modules_for_stubs_import_neither_torch_nor_a_grammar_library():
    code = (
        "import sys; from nereid_backend import grammar; "
        "from nereid_backend.grammar import request_spec, validate_answer; "
        "request_spec.schema_spec({}, is_strict=True); "
        "validate_answer.describe_violation('1', {'type': 'integer'}); "
        "print(sorted({'torch', 'xgrammar', 'llguidance', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
