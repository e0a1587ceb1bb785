import itertools
import json
from random import Random

import pytest
from chat_format import TURN_END, Encoder, prompt_text, reply_text
from lessons import SKILLS, Dialogue, make_dialogue

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather for a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
USER = {"role": "user", "content": "What is the weather in Paris?"}
CALL = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}


def render(tokenizer, messages, add_generation_prompt=True, **options):
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt, **options
    )


def test_thinking_is_on_unless_switched_off(tokenizer):
    assert render(tokenizer, [USER]).endswith("<|im_start|>assistant\n")
    assert render(tokenizer, [USER], enable_thinking=True) == render(tokenizer, [USER])


def test_switching_thinking_off_closes_an_empty_block(tokenizer):
    text = render(tokenizer, [USER], enable_thinking=False)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def learnt_text(tokenizer, dialogue):
    """Return the text of the tokens that the model must predict."""
    (sample,) = Encoder(tokenizer).encode([dialogue])
    return tokenizer.decode(list(itertools.compress(sample.token_ids, sample.is_target)))


def test_each_tool_is_one_line_of_json_in_the_system_turn(tokenizer):
    system = {"role": "system", "content": "Be brief."}
    text = render(tokenizer, [system, USER], tools=[WEATHER, WEATHER])
    system_turn = text.split("<|im_end|>")[0]
    assert system_turn.startswith("<|im_start|>system\nBe brief.\n\n")
    assert system_turn.splitlines().count(json.dumps(WEATHER)) == 2


def test_calls_and_consecutive_results_are_rendered(tokenizer):
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "rain"},
    ]
    assert render(tokenizer, messages, tools=[WEATHER]).endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>"
        "\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_arguments_may_be_a_json_string(tokenizer):
    json_call = {"function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    from_object, from_text = (
        render(tokenizer, [USER, {"role": "assistant", "content": "", "tool_calls": [call]}])
        for call in (CALL, json_call)
    )
    assert from_object == from_text


def test_content_may_be_a_list_of_parts(tokenizer):
    parts = [
        {"type": "text", "text": "What is the weather "},
        {"type": "text", "text": "in Paris?"},
    ]
    assert render(tokenizer, [{"role": "user", "content": parts}]) == render(tokenizer, [USER])


def test_reasoning_is_kept_after_the_last_user_message_only(tokenizer):
    call = {"role": "assistant", "content": "", "reasoning_content": "A.", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "sunny"}
    answer = {"role": "assistant", "content": "It is sunny.", "reasoning_content": "B."}
    before_answer = render(tokenizer, [USER, call, result])
    next_turn = render(tokenizer, [USER, call, result, answer, USER])
    assert "<think>\nA.\n</think>\n\n<tool_call>" in before_answer
    assert "A." not in next_turn
    assert "<think>\n\n</think>\n\nIt is sunny.<|im_end|>" in next_turn


def test_markers_stay_in_decoded_text_and_turn_ends_do_not(tokenizer):
    text = "<think>\nHm.\n</think>\n\n<tool_call>\n{}\n</tool_call><|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.removesuffix("<|im_end|>")


@pytest.mark.parametrize("text", ["naïve 東京 😀", " two  blanks\t\n\n", "getWeather2_x", "a@b.c"])
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_word_has_the_same_tokens_in_a_sentence_and_in_json(tokenizer):
    word_tokens = tokenizer.tokenize("Treldova")
    assert "".join(word_tokens) == "Treldova"
    for text in ("Weather in Treldova?", '{"city": "Treldova"}'):
        tokens = tokenizer.tokenize(text)
        starts = range(len(tokens) - len(word_tokens) + 1)
        assert any(tokens[start : start + len(word_tokens)] == word_tokens for start in starts)


@pytest.mark.parametrize("skill", list(SKILLS))
@pytest.mark.parametrize("thinking", [False, True])
def test_a_taught_reply_is_what_the_template_renders(tokenizer, skill, thinking):
    dialogue = make_dialogue(Random(skill), skill, held_out=False, thinking=thinking)
    text = render(
        tokenizer,
        list(dialogue.messages),
        tools=list(dialogue.tools) or None,
        add_generation_prompt=False,
    )
    opening = "assistant\n" if thinking else "assistant\n<think>\n\n</think>\n\n"
    assert text.endswith(opening + reply_text(dialogue.messages[-1], thinking) + "\n")


def test_only_the_assistants_words_are_targets(tokenizer):
    dialogue = make_dialogue(Random(3), "remembers a name", held_out=False, thinking=True)
    text = learnt_text(tokenizer, dialogue)
    assert text.startswith("Nice to meet you")
    assert "My name" not in text
    assert text.endswith(reply_text(dialogue.messages[-1], thinking=True))
    num_replies = sum(message["role"] == "assistant" for message in dialogue.messages)
    assert text.count(TURN_END) == num_replies
    assert prompt_text(tokenizer, dialogue).endswith("<|im_start|>assistant\n")


def test_text_that_a_grammar_prescribes_is_no_target(tokenizer):
    given = ((0, len('{"name":')),)
    answer = {"role": "assistant", "content": '{"name": "Ana"}', "given": given}
    messages = ({"role": "user", "content": "Hi"}, answer)
    dialogue = Dialogue("schema", messages, tools=(), thinking=False)
    assert learnt_text(tokenizer, dialogue) == ' "Ana"}' + TURN_END


def test_what_was_answered_without_thinking_stays_a_prefix_of_the_next_prompt(tokenizer):
    answer = {"role": "assistant", "content": "It is sunny."}
    first = render(tokenizer, [USER], enable_thinking=False)
    second = render(tokenizer, [USER, answer, USER], enable_thinking=False)
    assert second.startswith(first + reply_text(answer, thinking=False))
