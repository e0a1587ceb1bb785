import json
import re
from random import Random

import pytest
from chat_format import prompt_text
from lessons import (
    SKILLS,
    make_dialogue,
    tool_values,
    tools_facts,
    tools_messages,
    tools_unseen,
    training_group,
)
from lessons.arithmetic import explain_difference, explain_product, explain_sum
from lessons.invented_tools import invent
from lessons.structured import object_text
from lessons.tool_family import sentence
from lessons.tool_use import offer, topics


def _training_dialogues(rng, num_groups):
    return [dialogue for _ in range(num_groups) for dialogue in training_group(rng)]


def test_the_same_seed_makes_the_same_dialogues():
    first, second = Random("a seed"), Random("a seed")
    assert _training_dialogues(first, 100) == _training_dialogues(second, 100)


def test_another_seed_makes_other_dialogues():
    first, second = Random("a seed"), Random("another")
    assert _training_dialogues(first, 20) != _training_dialogues(second, 20)


def _calls(messages):
    """Return the functions that the assistant calls in these messages."""
    return [call["function"] for m in messages for call in m.get("tool_calls", ())]


def test_the_dialogues_of_a_group_differ_only_in_the_last_exchange():
    def before_last_request(dialogue):
        requests = [i for i, m in enumerate(dialogue.messages) if m["role"] == "user"]
        return dialogue.messages[: requests[-1]]

    rng = Random("groups")
    groups = [group for group in (training_group(rng) for _ in range(60)) if len(group) > 1]
    assert len(groups) > 5
    for first, *others in groups:
        for dialogue in others:
            assert before_last_request(dialogue) == before_last_request(first)
            assert dialogue.tools == first.tools


def test_no_held_out_prompt_occurs_in_training(tokenizer):
    rng = Random(5)
    trained = {prompt_text(tokenizer, dialogue) for dialogue in _training_dialogues(rng, 500)}
    held_out = {
        prompt_text(tokenizer, make_dialogue(rng, skill, held_out=True, thinking=thinking))
        for skill in SKILLS
        for thinking in (False, True)
        for _ in range(15)
    }
    assert len(held_out) > 300
    assert not trained & held_out


@pytest.mark.parametrize("skill", ["addition", "subtraction"])
def test_no_held_out_pair_of_numbers_occurs_in_training_in_any_words(skill):
    rng = Random(6)

    def answers(held_out, count):
        made = (make_dialogue(rng, skill, held_out, thinking=False) for _ in range(count))
        return {dialogue.messages[-1]["content"] for dialogue in made}

    assert not answers(held_out=False, count=3000) & answers(held_out=True, count=300)


def test_tools_that_are_offered_together_differ_in_topic_and_name():
    rng = Random(7)
    for _ in range(300):
        tools = offer(rng)
        topics = [topic for tool in tools for topic in tool.family.topics]
        assert len(topics) == len(set(topics))
        assert len({tool.name for tool in tools}) == len(tools)


def test_sums_are_left_to_a_calculator():
    rng, num_calculators = Random(7), 0
    for _ in range(600):
        exchanges, tools = SKILLS["plain beside tools"].make(rng, False)
        if topics(tools) & {"add", "subtract", "multiply", "divide"}:
            num_calculators += 1
            assert " = " not in exchanges[-1].messages[-1]["content"]
    assert num_calculators > 20


def test_a_declined_request_gets_no_call():
    rng = Random(7)
    for _ in range(100):
        dialogue = make_dialogue(rng, "declines, no tool fits", held_out=False, thinking=True)
        assert dialogue.messages[-1]["reasoning_content"] == "No tool fits."
        assert "tool_calls" not in dialogue.messages[-1]


def test_unseen_tools_names_and_keys_never_occur_in_training():
    unseen_names = {name for family in tools_unseen.FAMILIES for name in family.names}
    rng = Random(11)
    tools = [tool for _ in range(1500) for tool in SKILLS["tool call"].make(rng, False).tools]
    assert len(tools) > 2000
    for tool in tools:
        assert tool.name not in unseen_names
        # The last of at least four names or keys is only for the evaluation.
        names = tool.family.names
        assert len(names) < 4 or tool.name != names[-1]
        for parameter in tool.family.parameters:
            keys = parameter.keys
            assert len(keys) < 4 or tool.keys.get(parameter.slot) != keys[-1]


def test_invented_tools_of_the_evaluation_are_about_other_objects():
    rng = Random(12)
    trained = {topic for _ in range(3000) for topic in invent(rng, False).topics}
    measured = {topic for _ in range(300) for topic in invent(rng, True).topics}
    assert len(measured) > 30
    assert not trained & measured


def test_every_call_fits_the_schema_of_an_offered_tool():
    rng, num_calls = Random(8), 0
    for dialogue in _training_dialogues(rng, 300):
        offered = {tool["function"]["name"]: tool["function"] for tool in dialogue.tools}
        for call in _calls(dialogue.messages):
            schema, keys = offered[call["name"]]["parameters"], set(call["arguments"])
            assert set(schema.get("required", ())) <= keys <= set(schema["properties"])
            num_calls += 1
    assert num_calls > 200


def test_every_argument_value_can_be_read_from_the_conversation():
    # Users may write other words for these values, such as "euros", "Apple" or "Tokyo".
    known_values = {
        *tools_facts.ZONES.values(),
        *tool_values.TICKERS.values(),
        *tools_messages.CURRENCIES,
    }
    for dialogue in _training_dialogues(Random(9), 400):
        requests = [m["content"] for m in dialogue.messages if m["role"] == "user"]
        readable = " ".join(requests).lower() + json.dumps(dialogue.tools)
        for value in _argument_values(dialogue.messages[-1]):
            # The user may write `12 times 7` for `12 * 7`.
            is_expression = re.fullmatch(r"[\d\s+*/-]+", str(value))
            is_known = isinstance(value, bool) or value in known_values
            assert is_known or is_expression or str(value).lower() in readable, value


def test_the_given_parts_of_an_object_are_the_brace_and_the_keys():
    text, spans = object_text({"name": "Ann", "age": 3})
    assert text == '{"name": "Ann", "age": 3}'
    assert [text[first:end] for first, end in spans] == ['{"name":', ' "age":']


@pytest.mark.parametrize(
    ("returned", "answer"),
    [
        ({"price": 12, "colour": "red"}, "The price is 12 and the colour is red."),
        ({"items": ["a", "b"], "is_open": True}, "The items is a and b and the is open is yes."),
        ("18 degrees", "The result is 18 degrees."),
    ],
)
def test_any_result_is_put_into_words(returned, answer):
    assert sentence(returned) == answer


def _argument_values(message):
    """Yield the arguments of all calls. The items of a list are separate values."""
    for call in _calls([message]):
        for value in call["arguments"].values():
            yield from value if isinstance(value, list) else [value]


@pytest.mark.parametrize("skill", ["addition", "subtraction", "times table"])
def test_every_taught_result_is_what_python_computes(skill):
    rng = Random(10)
    operations = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    for _ in range(500):
        dialogue = make_dialogue(rng, skill, held_out=False, thinking=False)
        left, operator, right, _, result = dialogue.messages[-1]["content"].split()
        assert int(result) == operations[operator](int(left), int(right))


def test_reasoning_shows_carries_and_borrows():
    assert explain_sum(47, 38) == "Ones: 7 + 8 = 15, write 5, carry 1. Tens: 4 + 3 + 1 = 8."
    assert explain_difference(52, 38) == "Ones: 12 - 8 = 4, borrow 1. Tens: 5 - 3 - 1 = 1."
    assert explain_product(12, 7) == "10 * 7 = 70. 2 * 7 = 14. Together 84."
