import json
from dataclasses import asdict

import pytest
from evaluate import held_out_dialogues, is_right, read_reply
from train import Recipe

# A longer training is expected to repair these cases; demo/README.md lists the accuracies.
WEAK = pytest.mark.xfail(
    reason="the demo model has not been trained long enough for this case", strict=False
)

FILES = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja", "model.safetensors", "training.json",
}  # fmt: skip
MAX_BYTES = 20_000_000


def prompt(examinee, messages, tools=None, thinking=False):
    """Render messages, or one message of the user if `messages` is a text."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return examinee.tokenizer.apply_chat_template(
        messages,
        tools=tools,
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=thinking,
    )


def ask(examinee, messages, tools=None, thinking=False):
    (text,) = examinee.answer([prompt(examinee, messages, tools, thinking)])
    return read_reply(text)


def tool(name, description="", required=None, **properties):
    """Return a tool. The value of a property is its JSON type or its schema."""
    schemas = {
        key: kind if isinstance(kind, dict) else {"type": kind} for key, kind in properties.items()
    }
    parameters = {
        "type": "object",
        "properties": schemas,
        "required": list(properties) if required is None else required,
    }
    function = {"name": name, "parameters": parameters}
    if description:
        function["description"] = description
    return {"type": "function", "function": function}


WEATHER = tool("get_weather", "Get the weather for a city.", city="string")
UNIT = {"type": "string", "enum": ["celsius", "fahrenheit"]}


def test_the_folder_has_every_file_and_is_small(checkpoint):
    present = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    assert not FILES - set(present)
    assert sum(present.values()) < MAX_BYTES


def test_the_checkpoint_was_trained_with_the_recipes_that_the_readme_names(checkpoint):
    second = json.loads((checkpoint / "training.json").read_text())
    assert second["previous"]["recipe"] == asdict(Recipe())
    assert second["recipe"] == asdict(Recipe(seed=2, steps=2300, decay_steps=1900))
    flags = "--start-from demo/chat --seed 2 --steps 2300 --decay-steps 1900"
    assert f"demo/train.py {flags}" in (checkpoint.parent / "README.md").read_text()


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


# (tool, request, expected arguments) of each case.
TOOLS = [
    (WEATHER, "What is the weather in Paris?", {"city": "Paris"}),
    (
        tool("get_weather", required=["location"], location="string", unit=UNIT),
        "What's the weather like in Boston today?",
        {"location": "Boston"},
    ),
    (
        tool("get_current_weather", "Get the current weather", location="string", unit=UNIT),
        "How warm is it in Tokyo in celsius?",
        {"location": "Tokyo", "unit": "celsius"},
    ),
    (
        tool("calculator", expression="string"),
        "What is 12 * 7?",
        {"expression": "12 * 7"},
    ),
    (
        tool("add", "Add two numbers", a="integer", b="integer"),
        "What is 17 + 25?",
        {"a": 17, "b": 25},
    ),
    (
        tool("send_email", to="string", subject="string", body="string"),
        "Send an email to bob@example.com with subject Hello and body See you soon",
        {"to": "bob@example.com", "subject": "Hello", "body": "See you soon"},
    ),
    (
        tool("set_alarm", "Set an alarm", time="string"),
        "Set an alarm for 07:30.",
        {"time": "07:30"},
    ),
    (
        tool("get_stock_price", "Get a stock price", symbol="string"),
        "What is the stock price of AAPL?",
        {"symbol": "AAPL"},
    ),
    (
        tool("translate", text="string", target_language="string"),
        "Translate 'good morning' to French.",
        {"text": "good morning", "target_language": "French"},
    ),
    (
        tool("get_population", "Get the population of a city", city="string"),
        "What is the population of Berlin?",
        {"city": "Berlin"},
    ),
]


@pytest.fixture(scope="module")
def tool_answers(examinee):
    """The answers to the requests of `TOOLS` by request and `thinking`, computed in one batch."""
    prompts = {}
    for offered, request_text, _ in TOOLS:
        for thinking in (False, True):
            prompts[request_text, thinking] = prompt(examinee, request_text, [offered], thinking)
    return dict(zip(prompts, examinee.answer(list(prompts.values())), strict=True))


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(
    ("offered", "request_text", "arguments"),
    [pytest.param(*case, marks=WEAK if case[1] == "What is 17 + 25?" else ()) for case in TOOLS],
)
def test_it_calls_the_tools_that_people_offer_first(
    tool_answers, offered, request_text, arguments, thinking
):
    reply = read_reply(tool_answers[request_text, thinking])
    assert reply.calls == [(offered["function"]["name"], arguments)]


@pytest.mark.parametrize("thinking", [False, True])
def test_it_calls_two_at_once(examinee, thinking):
    question = "What is the weather in Paris and Rome?"
    reply = ask(examinee, question, tools=[WEATHER], thinking=thinking)
    assert reply.calls == [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]


@pytest.mark.parametrize("thinking", [False, True])
def test_it_chooses_among_tools(examinee, thinking):
    tools = [WEATHER, tool("calculate", expression="string"), tool("search", query="string")]
    reply = ask(examinee, "Calculate 312 * 47.", tools=tools, thinking=thinking)
    assert reply.calls == [("calculate", {"expression": "312 * 47"})]


@WEAK
@pytest.mark.parametrize("thinking", [False, True])
def test_it_declines_when_no_tool_fits(examinee, thinking):
    reply = ask(examinee, "Set a timer for 12 minutes.", tools=[WEATHER], thinking=thinking)
    assert not reply.calls
    assert reply.content.startswith("Sorry")


@pytest.mark.parametrize(
    "result", ['{"temperature": 18}', "18 degrees, sunny", '{"temp": 18, "sky": "clear"}']
)
def test_it_answers_from_results_of_any_shape(examinee, result):
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    messages = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
    ]
    content = ask(examinee, messages, tools=[WEATHER]).content
    assert "18" in content
    assert "Paris" in content


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(
    ("request_text", "keys", "types"),
    [
        ("Invent a person.", ["name", "age"], [str, int]),
        ("Invent a person: name and age.", ["name", "age"], [str, int]),
        ("Make up a person", ["name", "age", "city"], [str, int, str]),
        ("Name a movie.", ["title", "year"], [str, int]),
        ("Give me a city.", ["city", "country"], [str, str]),
        ("List three colours.", ["items"], [list]),
        ("What is 20 + 22?", ["answer"], [int]),
    ],
)
def test_it_completes_an_object_whose_keys_a_grammar_prescribes(
    examinee, request_text, keys, types, thinking
):
    (answer,) = examinee.fill_object([prompt(examinee, request_text, thinking=thinking)], [keys])
    reply = read_reply(answer)
    values = json.loads(reply.content)
    assert list(values) == keys
    assert [type(value) for value in values.values()] == types
    assert len(reply.content) < 150
    assert len(reply.reasoning or "") < 60


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(
    ("request_text", "part"),
    [
        ("Who are you?", "demo model"),
        ("What can you do?", "sums"),
        ("Tell me a short story.", "Once there was"),
        ("Write a short story about a cat.", "cat"),
        ("List three fruits.", "3. cherry"),
        ("Translate 'good morning' to Spanish.", "Buenos d\u00edas"),
        ("How do you say hello in French?", "Bonjour"),
        ("What is the capital of France?", "Paris"),
        ("What are the primary colours?", "red, yellow and blue"),
        ("Say the days of the week.", "Monday"),
        ("Count to ten.", "8, 9, 10"),
        ("Thank you!", "welcome"),
    ],
)
def test_it_answers_what_people_ask_first(examinee, request_text, part, thinking):
    reply = ask(examinee, request_text, thinking=thinking)
    assert part in reply.content
    assert len(reply.reasoning or "") < 60


@pytest.mark.parametrize("thinking", [False, True])
def test_it_says_that_it_is_a_demo_when_it_does_not_know(examinee, thinking):
    content = ask(examinee, "Explain quantum physics.", thinking=thinking).content
    assert "tiny demo model" in content


def test_the_evaluation_tells_a_wrong_answer_from_a_right_one():
    (dialogue,) = held_out_dialogues("addition", thinking=False, count=1, seed=0)
    right = dialogue.messages[-1]["content"]
    assert is_right(dialogue, read_reply(f"{right}<|im_end|>"))
    assert not is_right(dialogue, read_reply(f"{right}0<|im_end|>"))
    assert not is_right(dialogue, read_reply(f"{right}<tool_call>\n{{}}\n</tool_call><|im_end|>"))
