import ast
import json
from random import Random

import pytest
from chat_format import prompt_text
from lessons import SKILLS, make_dialogue, training_dialogue
from lessons.arithmetic import explain_difference, explain_product, explain_sum


def _user_words(dialogue):
    return tuple(m["content"] for m in dialogue.messages if m["role"] == "user")


def test_the_same_seed_makes_the_same_dialogues():
    first, second = Random("a seed"), Random("a seed")
    assert [training_dialogue(first) for _ in range(200)] == [
        training_dialogue(second) for _ in range(200)
    ]


def test_another_seed_makes_other_dialogues():
    first, second = Random("a seed"), Random("another")
    assert [training_dialogue(first) for _ in range(20)] != [
        training_dialogue(second) for _ in range(20)
    ]


def test_no_held_out_prompt_occurs_in_training(tokenizer):
    rng = Random(5)
    trained = {prompt_text(tokenizer, training_dialogue(rng)) for _ in range(1000)}
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


def test_a_request_that_is_declined_fits_none_of_the_offered_tools():
    from lessons.toolbox import FAMILIES

    purposes = {family.name: family.purpose for family in FAMILIES}
    rng = Random(7)
    for _ in range(200):
        dialogue = make_dialogue(rng, "declines, no tool fits", held_out=False, thinking=True)
        offered = {purposes[tool["function"]["name"]] for tool in dialogue.tools}
        reasoning = dialogue.messages[-1]["reasoning_content"]
        assert reasoning.endswith("none fits.")
        assert not any(f"wants {purpose}:" in reasoning for purpose in offered)


def test_every_call_fits_the_schema_of_an_offered_tool():
    rng, num_calls = Random(8), 0
    for _ in range(600):
        dialogue = training_dialogue(rng)
        offered = {tool["function"]["name"]: tool["function"] for tool in dialogue.tools}
        for message in dialogue.messages:
            for call in message.get("tool_calls", ()):
                schema = offered[call["function"]["name"]]["parameters"]
                given = call["function"]["arguments"]
                assert set(schema.get("required", ())) <= set(given) <= set(schema["properties"])
                num_calls += 1
    assert num_calls > 200


def test_every_argument_value_can_be_read_from_the_conversation():
    rng = Random(9)
    for _ in range(600):
        dialogue = training_dialogue(rng)
        said = " ".join(_user_words(dialogue)).lower() + json.dumps(dialogue.tools)
        for call in dialogue.messages[-1].get("tool_calls", ()):
            for key, value in call["function"]["arguments"].items():
                if key != "expression":
                    assert str(value).lower() in said


@pytest.mark.parametrize("skill", ["addition", "subtraction", "times table"])
def test_every_taught_result_is_what_python_computes(skill):
    rng = Random(10)
    for _ in range(500):
        dialogue = make_dialogue(rng, skill, held_out=False, thinking=False)
        asked, result = dialogue.messages[-1]["content"].split(" = ")
        left, operator, right = asked.split()
        computed = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[operator]
        assert computed(int(left), int(right)) == ast.literal_eval(result)


def test_reasoning_shows_carries_and_borrows():
    assert explain_sum(47, 38) == "Ones: 7 + 8 = 15, write 5, carry 1. Tens: 4 + 3 + 1 = 8."
    assert explain_difference(52, 38) == "Ones: 12 - 8 = 4, borrow 1. Tens: 5 - 3 - 1 = 1."
    assert explain_product(12, 7) == "10 * 7 = 70. 2 * 7 = 14. Together 84."
