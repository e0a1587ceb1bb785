import json

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


def tool(name, *keys):
    parameters = {
        "type": "object",
        "properties": {key: {"type": "string"} for key in keys},
        "required": list(keys),
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = tool("get_weather", "city")
WEATHER["function"]["parameters"]["properties"]["unit"] = {
    "type": "string",
    "enum": ["celsius", "fahrenheit"],
}


def test_the_folder_has_every_file_and_is_small(checkpoint):
    present = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    assert not FILES - set(present)
    assert sum(present.values()) < MAX_BYTES


def test_the_record_has_every_field_of_the_recipe(checkpoint):
    from dataclasses import asdict

    from train import Recipe

    record = json.loads((checkpoint / "training.json").read_text())
    assert set(record["recipe"]) == set(asdict(Recipe()))
    assert record["num_tokens"] > 0


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


def test_it_calls_a_tool(examinee):
    reply = ask(examinee, "What is the weather in Paris?", tools=[WEATHER])
    assert reply.calls == [("get_weather", {"city": "Paris"})]


def test_it_calls_two_at_once(examinee):
    reply = ask(examinee, "What is the weather in Paris and Rome?", tools=[WEATHER], thinking=True)
    assert reply.calls == [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]


def test_it_chooses_among_tools(examinee):
    tools = [WEATHER, tool("calculate", "expression")]
    reply = ask(examinee, "Calculate 312 * 47.", tools=tools, thinking=True)
    assert reply.calls == [("calculate", {"expression": "312 * 47"})]


def test_it_declines_when_no_tool_fits(examinee):
    reply = ask(examinee, "Set a timer for 12 minutes.", tools=[WEATHER], thinking=True)
    assert not reply.calls
    assert reply.content.startswith("Sorry")


def test_the_evaluation_tells_a_wrong_answer_from_a_right_one():
    (dialogue,) = held_out_dialogues("addition", thinking=False, count=1, seed=0)
    right = dialogue.messages[-1]["content"]
    assert is_right(dialogue, read_reply(f"{right}<|im_end|>"))
    assert not is_right(dialogue, read_reply(f"{right}0<|im_end|>"))
    assert not is_right(dialogue, read_reply(f"{right}<tool_call>\n{{}}\n</tool_call><|im_end|>"))
