import json

import pytest
from evaluate import held_out_dialogues, is_right, read_reply

FILES = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja", "model.safetensors", "training.json",
}  # fmt: skip
MAX_BYTES = 20_000_000


def ask(examinee, text, tools=None, thinking=False):
    prompt = examinee.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        tools=tools,
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=thinking,
    )
    return read_reply(examinee.answer([prompt])[0])


def weather_tool(name):
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    }
    function = {
        "name": name,
        "description": "Get the weather for a city.",
        "parameters": parameters,
    }
    return {"type": "function", "function": function}


def test_the_folder_has_every_file_and_is_small(checkpoint):
    present = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    assert not FILES - set(present)
    assert sum(present.values()) < MAX_BYTES


def test_the_record_names_the_recipe_that_train_has_by_default(checkpoint):
    from dataclasses import asdict

    from train import Recipe

    assert json.loads((checkpoint / "training.json").read_text())["recipe"] == asdict(Recipe())


def test_the_template_file_is_the_one_that_was_trained_with(checkpoint):
    ours = (checkpoint.parent / "chat_template.jinja").read_text()
    assert (checkpoint / "chat_template.jinja").read_text() == ours


def test_it_greets(examinee):
    assert ask(examinee, "Hello!").content == "Hello! How can I help you?"


def test_it_adds(examinee):
    assert ask(examinee, "What is 47 + 38?").content == "47 + 38 = 85"


def test_it_reasons_before_it_adds(examinee):
    reply = ask(examinee, "What is 47 + 38?", thinking=True)
    assert reply.reasoning == "Ones: 7 + 8 = 15, write 5, carry 1. Tens: 4 + 3 + 1 = 8."
    assert reply.content == "47 + 38 = 85"


def test_it_knows_its_world(examinee):
    assert ask(examinee, "Where does Hugo live?").content == "Hugo lives in Pinemark."


@pytest.mark.parametrize("name", ["get_weather", "current_weather"])
def test_it_calls_the_tool_by_the_name_it_was_offered(examinee, name):
    reply = ask(examinee, "What is the weather in Paris?", tools=[weather_tool(name)])
    assert reply.calls == [(name, {"city": "Paris"})]


def test_the_evaluation_tells_a_wrong_answer_from_a_right_one():
    (dialogue,) = held_out_dialogues("addition", thinking=False, count=1, seed=0)
    right = dialogue.messages[-1]["content"]
    assert is_right(dialogue, read_reply(f"{right}<|im_end|>"))
    assert not is_right(dialogue, read_reply(f"{right}0<|im_end|>"))
    assert not is_right(dialogue, read_reply(f"{right}<tool_call>\n{{}}\n</tool_call><|im_end|>"))
