"""Tests of the translation of a request of Anthropic's API to a chat completion request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nereid_client.anthropic.chat_translation import chat_request
from nereid_client.anthropic.messages_request import (
    REFUSED_IN_MESSAGES,
    CountTokensRequest,
    MessagesRequest,
)
from nereid_client.errors import ApiError
from nereid_client.request_context import validate

USER = {"role": "user", "content": "Hi"}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "ok"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def translate(**fields):
    body = {"max_tokens": 5, "messages": [USER], **fields}
    return chat_request(validate(MessagesRequest, body), body)


def messages_of(*messages, **fields):
    return translate(messages=list(messages), **fields)["messages"]


def refusal(**fields):
    with pytest.raises(ApiError) as raised:
        translate(**fields)
    return raised.value.message


def blocks(*texts):
    return [{"type": "text", "text": text} for text in texts]


def test_the_system_prompt_is_a_text_or_blocks():
    system = {"role": "system", "content": "Be brief.\nBe kind."}
    for given_system in ("Be brief.\nBe kind.", blocks("Be brief.", "Be kind.")):
        assert messages_of(USER, system=given_system) == [system, USER]
    leading = {"role": "system", "content": "Be kind."}
    assert messages_of(leading, USER, system="Be brief.") == [system, USER]


@pytest.mark.parametrize("value", ["cc_version=2.1; cch=0a1;", ""])
def test_the_billing_line_of_an_agent_does_not_change_the_prompt(value):
    line = f"x-anthropic-billing-header: {value}"
    for system in (f"{line}\nBe brief.", blocks(line, "Be brief.")):
        assert messages_of(USER, system=system)[0]["content"] == "Be brief."
    assert messages_of(USER, system=blocks(line)) == [USER]
    later = f"Be brief.\n{line}"
    assert messages_of(USER, system=later)[0]["content"] == later


def test_a_later_system_message_becomes_part_of_the_user_s_turn():
    note = {"role": "system", "content": "The file has changed."}
    reminder = "<system-reminder>\nThe file has changed.\n</system-reminder>"
    assert messages_of(USER, note) == [{"role": "user", "content": f"Hi\n{reminder}"}]


def test_blocks_of_an_answer_become_one_message():
    thinking = {"type": "thinking", "thinking": "Hm", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    answer = {"role": "assistant", "content": [thinking, hidden, *blocks("Let me see."), USE]}
    chat = messages_of(USER, answer, {"role": "user", "content": [*blocks("And?"), RESULT]})
    assert chat[1] == {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning": "Hm",
        "reasoning_content": "Hm",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
        ],
    }
    assert chat[2] == {"role": "tool", "content": "ok", "tool_call_id": "a", "name": "f"}
    assert chat[3] == {"role": "user", "content": "And?"}


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"content": "ok"}, "ok"),
        ({"content": blocks("a", "b")}, "a\nb"),
        ({"content": []}, ""),
        ({"content": None}, ""),
        ({}, ""),
        ({"content": "no file", "is_error": True}, "Error: no file"),
        ({"content": "ok", "is_error": False}, "ok"),
    ],
)
def test_the_result_of_a_tool_is_a_text_or_blocks(result, text):
    given_result = {"type": "tool_result", "tool_use_id": "a", **result}
    turns = [USER, {"role": "assistant", "content": [USE]}]
    assert messages_of(*turns, {"role": "user", "content": [given_result]})[-1]["content"] == text


def test_consecutive_messages_of_one_role_become_one_message():
    first, second = ({"role": "assistant", "content": text} for text in ("a", "b"))
    chat = messages_of(USER, USER, first, second, USER)
    assert [message["content"] for message in chat] == ["Hi\nHi", "ab", "Hi"]


def test_the_answer_continues_a_last_message_of_the_assistant():
    chat = translate(messages=[USER, {"role": "assistant", "content": "The answer is"}])
    assert chat["continue_final_message"] is True
    assert chat["add_generation_prompt"] is False


def test_an_image_of_the_user_becomes_an_image_part():
    source = {"type": "base64", "media_type": "image/png", "data": "iVBO"}
    content = [*blocks("Look"), {"type": "image", "source": source}]
    chat = translate(messages=[{"role": "user", "content": content}])
    url = "data:image/png;base64,iVBO"
    assert chat["messages"][-1]["content"] == [
        {"type": "text", "text": "Look"},
        {"type": "image_url", "image_url": {"url": url}},
    ]


@pytest.mark.parametrize("source", [{}, {"type": "file", "file_id": "x"}, {"type": "base64"}])
def test_an_image_without_a_url_or_data_is_refused(source):
    block = {"type": "image", "source": source}
    assert refusal(messages=[{"role": "user", "content": [block]}]).startswith(
        "messages[0].content[0].source must have the type 'base64'"
    )


@pytest.mark.parametrize("is_error", [False, True])
def test_an_image_in_a_tool_result_becomes_an_image_part(is_error):
    image = {"type": "image", "source": {"type": "url", "url": "data:x"}}
    result = {**RESULT, "content": [*blocks("Seen"), image], "is_error": is_error}
    turns = [USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
    message = translate(messages=turns)["messages"][-1]
    assert message["role"] == "tool"
    *error, text, part = message["content"]
    assert error == ([{"type": "text", "text": "Error: "}] if is_error else [])
    assert text == {"type": "text", "text": "Seen"}
    assert part == {"type": "image_url", "image_url": {"url": "data:x"}}


@pytest.mark.parametrize("kind", ["document", "search_result"])
def test_blocks_that_are_not_text_are_refused_by_name(kind):
    block = {"type": kind, "source": {}}
    place = "messages[0].content[1]"
    message = refusal(messages=[{"role": "user", "content": [*blocks("Look"), block]}])
    assert message.startswith(f"{place} has the type {kind}, which is not supported: ")
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
    turns = [USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
    assert refusal(messages=turns).startswith(
        f"messages[2].content[0].content[0] has the type {kind}"
    )


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "tool", "content": "x"}], "messages[0].role must be 'user', 'assistant' or"),
        ([{"role": "user"}], "messages[0].content is required"),
        ([{"role": "user", "content": 5}], "messages[0].content must be a string or a list"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0] must be a block"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text is"),
        ([{"role": "user", "content": [USE]}], "block of the type text or image or tool_result"),
        ([{"role": "user", "content": [RESULT]}], 'but the request has "a"'),
        ([{"role": "user", "content": []}], "messages[0].content must have at least one block"),
        ([{"role": "system", "content": "x"}], "messages must contain at least one message of"),
        ([USER, {"role": "assistant", "content": [USE]}], "messages must not end with a tool_use"),
        ([{"role": "assistant", "content": [USE | {"input": "x"}]}], "input must be an object"),
    ],
)
def test_wrong_messages_are_refused_with_their_place(messages, words):
    assert words in refusal(messages=messages)


def test_tools_are_translated():
    tool = TOOL | {"description": "Do.", "strict": True, "cache_control": {"type": "ephemeral"}}
    function = {"name": "f", "description": "Do.", "parameters": TOOL["input_schema"]}
    chat = translate(tools=[tool])
    assert chat["tools"] == [{"type": "function", "function": function | {"strict": True}}]


@pytest.mark.parametrize(
    ("kind", "choice"),
    [
        ("auto", "auto"),
        ("any", "required"),
        ("none", "none"),
        ("tool", {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_tool_choices_are_translated(kind, choice):
    chat = translate(tools=[TOOL], tool_choice={"type": kind, "name": "f"})
    assert chat["tool_choice"] == choice
    assert "parallel_tool_calls" not in chat


def test_a_tool_choice_forbids_parallel_calls():
    choice = {"type": "any", "disable_parallel_tool_use": True}
    assert translate(tools=[TOOL], tool_choice=choice)["parallel_tool_calls"] is False


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "s"}]}, "tools[0] has the type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0] has the type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is required"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading=true"),
        ({"tool_choice": {"type": "any"}}, 'tool_choice={"type": "any"} requires tools'),
        ({"tool_choice": {"type": "tool", "name": "g"}}, '{"type": "tool", "name": "g"} requires'),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool"}},
            "tool_choice.name must be the name of a tool if tool_choice.type is tool, but the "
            "request has null",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, '"g"'),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type must be"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type must be"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort must be"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type must be"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "edits must"),
        ({"stop": ["x"]}, "stop_sequences"),
        ({"max_tokens": None}, "max_tokens must be an integer"),
        ({"temperature": 3}, "temperature must be at most 2"),
        ({"stop_sequence": ["x"]}, 'Did you mean "stop_sequences"?'),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields, words):
    assert words in refusal(**fields)


@pytest.mark.parametrize("name", REFUSED_IN_MESSAGES)
def test_refused_fields_name_themselves(name):
    assert refusal(**{name: "x"}).startswith(f'{name}="x" is not supported: ')


def test_thinking_and_effort_set_variables_of_the_chat_template():
    on = {"enable_thinking": True, "thinking": True}
    off = {"enable_thinking": False, "thinking": False}
    chat = translate(thinking={"type": "enabled", "budget_tokens": 2000})
    assert chat["chat_template_kwargs"] == on
    assert chat["thinking_token_budget"] == 2000
    assert translate(thinking={"type": "adaptive"})["chat_template_kwargs"] == on
    assert translate(thinking={"type": "disabled"})["chat_template_kwargs"] == off
    assert "chat_template_kwargs" not in translate()

    efforts_of_template = {"low": "low", "high": "high", "xhigh": "high", "max": "high"}
    for effort, effort_of_template in efforts_of_template.items():
        chat = translate(output_config={"effort": effort})
        assert chat["chat_template_kwargs"] == {"reasoning_effort": effort_of_template}


def test_sampling_fields_are_passed_on_and_anthropic_s_own_fields_are_not():
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 1, "stop_sequences": ["x"]}
    ignored = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "speed": "standard",
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "stream": True,
        "model": "echo",
    }
    chat = translate(**fields, **ignored)
    del fields["stop_sequences"]
    assert chat == {"messages": [USER], "max_tokens": 5, "stop": ["x"], **fields}


def test_tokens_are_counted_without_max_tokens():
    body = {"messages": [USER], "system": "Be brief.", "tools": [TOOL]}
    chat = chat_request(validate(CountTokensRequest, body), body)
    assert [message["role"] for message in chat["messages"]] == ["system", "user"]
    assert len(chat["tools"]) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
KINDS = st.sampled_from(["text", "tool_result", "tool_use", "thinking", "image", "x"])
BLOCK = st.fixed_dictionaries(
    {},
    optional={
        name: JSON | st.just("a") for name in ("text", "id", "tool_use_id", "name", "thinking")
    }
    | {"type": KINDS, "content": JSON, "input": JSON, "is_error": JSON},
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "tool"]),
        "content": JSON | st.lists(BLOCK, max_size=3),
    },
)


@given(st.lists(MESSAGE, max_size=4), JSON | st.lists(BLOCK, max_size=2))
def test_any_conversation_is_translated_or_refused(messages, system):
    body = {"max_tokens": 5, "messages": messages, "system": system}
    try:
        chat = chat_request(validate(MessagesRequest, body), body)
    except ApiError:
        return
    for message in chat["messages"]:
        assert message["role"] in ("system", "user", "assistant", "tool")
        assert isinstance(message["content"], str)
