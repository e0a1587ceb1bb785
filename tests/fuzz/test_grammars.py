"""Tests that random schemas, regular expressions and grammars are answered with 200 or 400."""

import json

import httpx
import pytest
from fuzz.values import odd

pytestmark = pytest.mark.triton

_HEADERS = {"Content-Type": "application/json"}
_KEYS = (
    *("type", "properties", "items", "required", "enum", "const", "anyOf", "allOf", "oneOf"),
    *("additionalProperties", "pattern", "minLength", "maxLength", "minItems", "maxItems", "$ref"),
    *("minimum", "maximum", "exclusiveMinimum", "multipleOf", "format", "patternProperties", "not"),
    *("$defs", "prefixItems", "uniqueItems", "minProperties", "if", "then", "propertyNames"),
)
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null", "pet", ["string"])
_ATOMS = (
    *("a", "b+", "[a-z]", "[^x]", ".", "\\d{2}", "(", ")", "|", "*", "?", "{3,1}", "{1000}", "$"),
)
_RULES = ("root", "x", "::=", '"a"', '"', "|", "(", ")", "*", "\n", "[a-z]", "/", "#", "start:")


def schema(rng, depth=0):
    """Return a random value that resembles a JSON schema."""
    if depth > 3 or rng.random() < 0.1:
        return rng.choice((True, False, {}, {"type": rng.choice(_TYPES)}, odd(rng)))
    keywords = {"type": rng.choice(_TYPES)} if rng.random() < 0.6 else {}
    for _ in range(rng.randrange(4)):
        keywords[rng.choice(_KEYS)] = _keyword_value(rng, depth)
    return keywords


def _keyword_value(rng, depth):
    """Return a random value for a keyword of a schema. Most values do not fit the keyword."""
    kind = rng.choice(("schema", "properties", "list", "text", "number", "odd value"))
    if kind == "schema":
        return schema(rng, depth + 1)
    if kind == "properties":
        return {name: schema(rng, depth + 1) for name in rng.sample("abcd", 2)}
    if kind == "list":
        return [schema(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == "text":
        return rng.choice(("#", "#/$defs/a", "http://example.com", "^a+$", "(", "date", "uuid"))
    if kind == "number":
        return rng.choice((0, 1, 3, -1, 2.5, 10**9))
    return odd(rng)


def pattern(rng):
    """Return a random string that resembles a regular expression."""
    return "".join(rng.choice(_ATOMS) for _ in range(rng.randrange(8)))


def grammar(rng):
    """Return a random string that resembles a grammar in the format of GBNF or Lark."""
    return " ".join(rng.choice(_RULES) for _ in range(rng.randrange(12)))


def constraint(rng):
    """Return random fields of a request that constrain its answer."""
    kind = rng.choice(("answer", "answer", "tool", "regex", "grammar", "json"))
    if kind == "answer":
        json_schema = {"name": "s", "schema": schema(rng), "strict": rng.random() < 0.5}
        return {"response_format": {"type": "json_schema", "json_schema": json_schema}}
    if kind == "tool":
        function = {"name": "f", "parameters": schema(rng), "strict": rng.random() < 0.5}
        tools = [{"type": "function", "function": function}]
        return {"tools": tools, "tool_choice": rng.choice(("required", "auto"))}
    values = {"regex": pattern(rng), "grammar": grammar(rng), "json": schema(rng)}
    value = odd(rng) if rng.random() < 0.1 else values[kind]
    return {"structured_outputs": {kind: value}}


def test_any_constraint_is_kept_or_refused(server, random_cases, check_server):
    url = f"{server.openai_url}/chat/completions"
    chat = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
    with httpx.Client(timeout=120, trust_env=False) as client:
        for number, rng in random_cases("constraint", default_number=120):
            fields = constraint(rng)
            try:
                response = client.post(url, content=json.dumps(chat | fields), headers=_HEADERS)
            except httpx.HTTPError as error:
                pytest.fail(f"case {number}: {error!r} after {fields!r}")
            case = f"case {number}: {response.status_code} {response.text} after {fields!r}"
            assert response.status_code in (200, 400), case
    check_server()
