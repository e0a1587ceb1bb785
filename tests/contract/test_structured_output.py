"""Tests of structured output with the openai library: pydantic models as answers and as tools.

A test sends the JSON of a pydantic object to the echo model, which repeats the JSON. The openai
library must parse the answer to the same object. In addition, the grammar that the backend compiles
from the schema in the request must allow the JSON.
"""

import datetime
import enum
import json
import uuid
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import openai
import pytest
from fakes.fake_backend import FakeBackend
from fakes.live_frontend import live_frontend
from nereid_backend.core.grammar import GrammarSpec
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.grammar import Guides
from nereid_backend.grammar.request_spec import schema_spec
from nereid_parsers import get_format
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

CHECKPOINT = Path(__file__).parents[2] / "demo" / "chat"
VOCAB_SIZE, EOS = 2048, 2  # of the checkpoint's tokenizer
BEGIN, END = "<tool_call>\n", "\n</tool_call>"


class Color(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Address(BaseModel):
    street: str
    code: str | None


class Customer(BaseModel):
    address: Address
    others: list[Address]


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Owner(BaseModel):
    pet: Cat | Dog


class TaggedOwner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Paint(BaseModel):
    color: Color
    level: Level


class Defaults(BaseModel):
    count: int | None = None
    text: str = "x"


class Scores(BaseModel):
    scores: dict[str, int]


class Homes(BaseModel):
    homes: dict[str, Address]


class Tree(BaseModel):
    value: int
    children: list["Tree"]


class Chain(BaseModel):
    value: int
    next: "Chain | None"


class Bounds(BaseModel):
    even: Annotated[int, Field(multiple_of=2)]
    share: Annotated[float, Field(ge=0, le=1)]
    word: Annotated[str, Field(pattern=r"^[a-z]+$", max_length=30)]
    numbers: Annotated[list[int], Field(min_length=1, max_length=3)]


class Pair(BaseModel):
    pair: tuple[int, str]


class Event(BaseModel):
    day: datetime.date
    id: uuid.UUID


class AnyScalar(BaseModel):
    value: int | float | str | bool | None


CASES = [
    (
        Customer,
        {"address": {"street": "a", "code": None}, "others": [{"street": "b", "code": "1"}]},
    ),
    (Owner, {"pet": {"kind": "dog", "name": "Rex"}}),
    (TaggedOwner, {"pet": {"kind": "cat", "lives": 9}}),
    (Paint, {"color": "red", "level": 2}),
    (Defaults, {"count": None, "text": "y"}),
    (Scores, {"scores": {"a": 1}}),
    (Homes, {"homes": {"a": {"street": "s", "code": None}}}),
    (Tree, {"value": 1, "children": [{"value": 2, "children": []}]}),
    (Chain, {"value": 1, "next": {"value": 2, "next": None}}),
    (Bounds, {"even": 4, "share": 0.5, "word": "abc", "numbers": [1, 2]}),
    (Pair, {"pair": [1, "a"]}),
    (Event, {"day": "2026-01-02", "id": "12345678-1234-5678-1234-567812345678"}),
    (AnyScalar, {"value": 1.5}),
    (AnyScalar, {"value": None}),
]
each_case = pytest.mark.parametrize(("model_class", "value"), CASES)


@pytest.fixture(scope="module")
def backend():
    return FakeBackend()


@pytest.fixture(scope="module")
def client(backend):
    with (
        live_frontend(backend) as port,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as opened,
    ):
        yield opened.with_options(max_retries=0)


@pytest.fixture(scope="module")
def allows():
    """A function that returns whether a grammar allows a text as the whole answer."""
    guides = Guides(str(CHECKPOINT), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    # On a busy machine, loading the grammar libraries takes long.
    guides.warm_up().result(timeout=300)
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))

    def is_allowed(spec, text):
        params = SamplingParams(grammar=spec)
        guide = guides.prepare(params, frozenset({EOS})).result(timeout=300)
        mask = np.zeros(VOCAB_SIZE // 32, np.int32)  # one bit for each token
        for token in [*tokenizer.encode(text, add_special_tokens=False).ids, EOS]:
            has_mask = guide.fill(mask)  # without a mask, all tokens are allowed
            if has_mask and not mask[token // 32] >> (token % 32) & 1:
                return False
            guide.accept([token])
        return True

    yield is_allowed
    guides.close()


def tool_spec(schema):
    """Return the grammar of a tool call whose arguments have this JSON schema."""
    content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
    tag = {"type": "tag", "begin": BEGIN, "content": content, "end": END}
    return GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": tag}))


@each_case
def test_a_model_as_response_format_is_parsed_and_its_schema_allows_it(
    client, backend, allows, model_class, value
):
    text = json.dumps(value, separators=(",", ":"))

    completion = client.chat.completions.parse(
        model="echo", messages=[{"role": "user", "content": text}], response_format=model_class
    )

    assert completion.choices[0].message.parsed == model_class.model_validate(value)
    sent_request = json.loads(backend.generations[-1].chat_request)
    sent_schema = sent_request["response_format"]["json_schema"]
    assert sent_schema["strict"] is True
    assert allows(schema_spec(sent_schema["schema"], is_strict=True), text)


@each_case
def test_a_model_as_strict_tool_is_parsed_and_its_schema_allows_it(
    client, backend, allows, model_class, value
):
    arguments = json.dumps(value, separators=(",", ":"))
    call = f'<tool_call>{{"name": "{model_class.__name__}", "arguments": {arguments}}}</tool_call>'

    completion = client.chat.completions.parse(
        model="echo",
        messages=[{"role": "user", "content": call}],
        tools=[openai.pydantic_function_tool(model_class)],
        tool_choice="required",
    )

    (parsed_call,) = completion.choices[0].message.tool_calls
    assert parsed_call.function.parsed_arguments == model_class.model_validate(value)
    sent_tool = json.loads(backend.generations[-1].chat_request)["tools"][0]["function"]
    assert sent_tool["strict"] is True
    assert allows(tool_spec(sent_tool["parameters"]), f"{BEGIN}{arguments}{END}")


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"type": "integer", "multipleOf": 5}, "10", "11"),
        ({"type": "integer", "multipleOf": 5.0}, "10", "11"),
        ({"type": "integer", "minimum": 1.0, "maximum": 30.0}, "30", "31"),
        ({"type": "string", "minLength": 2.0, "maxLength": 3.0}, '"abc"', '"abcd"'),
        ({"items": {"type": "integer"}, "type": "array", "maxItems": 2.0}, "[1,2]", "[1,2,3]"),
        ({"type": "object", "minProperties": 1.0}, '{"a":1}', "{}"),
        ({"type": "integer", "enum": [30.0, 40.0]}, "30", "31"),
        ({"type": "number", "multipleOf": 0.5}, "1.5", "1.2"),
        ({"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 5}]}, "3", "9"),
        (
            {
                "allOf": [
                    {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                    {"properties": {"b": {"type": "string"}}, "required": ["b"]},
                ],
                "type": "object",
            },
            '{"a":1,"b":"x"}',
            '{"a":1}',
        ),
    ],
)
def test_multiple_of_and_several_parts_of_all_of_are_enforced(allows, schema, allowed, forbidden):
    spec = schema_spec(schema, is_strict=True)
    assert allows(spec, allowed)
    assert not allows(spec, forbidden)


@pytest.mark.parametrize(
    ("parameters", "allowed", "forbidden"),
    [
        (
            {
                "allOf": [
                    {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                    {"properties": {"b": {"$ref": "#/$defs/even"}}, "required": ["b"]},
                ],
                "type": "object",
                "$defs": {"even": {"type": "number", "multipleOf": 2.0}},
            },
            {"a": 1, "b": 4},
            ({"a": 1}, {"a": 1, "b": 3}),
        ),
        (
            {
                "type": "object",
                "properties": {
                    "n": {"allOf": [{"type": "integer", "minimum": 10.0}, {"maximum": 30.0}]},
                    "step": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 90},
                },
                "required": ["n", "step"],
            },
            {"n": 30, "step": 15},
            ({"n": 31, "step": 15}, {"n": 9, "step": 15}, {"n": 30, "step": 14}),
        ),
    ],
)
def test_strict_tools_may_have_all_of_and_multiple_of(allows, parameters, allowed, forbidden):
    function = {"name": "f", "parameters": parameters, "strict": True}
    tag = get_format("hermes").structural_tag(
        [{"type": "function", "function": function}], "required", parallel_tool_calls=False
    )
    spec = GrammarSpec("structural_tag", json.dumps(tag))

    def call(arguments):
        return f'{BEGIN}{{"name": "f", "arguments": {json.dumps(arguments)}}}{END}'

    assert allows(spec, call(allowed))
    for arguments in forbidden:
        assert not allows(spec, call(arguments)), arguments


def test_instructor_reads_nested_models_from_content_and_from_tool_calls(client):
    instructor = pytest.importorskip("instructor", reason="needs the package instructor")
    value = {"address": {"street": "a", "code": None}, "others": [{"street": "b", "code": "1"}]}
    text = json.dumps(value)
    call = f'<tool_call>{{"name": "Customer", "arguments": {text}}}</tool_call>'
    # The echo model repeats the prompt as the answer's content or as a tool call.
    for mode, prompt in ((instructor.Mode.JSON_SCHEMA, text), (instructor.Mode.TOOLS, call)):
        customer = instructor.from_openai(client, mode=mode).chat.completions.create(
            model="echo",
            messages=[{"role": "user", "content": prompt}],
            response_model=Customer,
            max_retries=0,
        )
        assert customer.model_dump() == value


def test_a_tool_whose_integer_is_written_with_a_fraction_of_zero_is_parsed(client):
    call = '<tool_call>{"name": "Scores", "arguments": {"scores": {"a": 30.0}}}</tool_call>'
    completion = client.chat.completions.parse(
        model="echo",
        messages=[{"role": "user", "content": call}],
        tools=[openai.pydantic_function_tool(Scores)],
        tool_choice="required",
    )
    (parsed_call,) = completion.choices[0].message.tool_calls
    assert parsed_call.function.parsed_arguments == Scores(scores={"a": 30})
