import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from nereid_backend import RequestError
from nereid_backend.serving.tokenizer.chat.chat_messages import read_messages
from nereid_backend.serving.tokenizer.chat.chat_template_renderer import ChatTemplateRenderer
from nereid_backend.serving.tokenizer.chat.chat_tools import read_tools
from nereid_backend.serving.tokenizer.prompt_builder import read_flag
from nereid_backend.serving.tokenizer.request_limits import RequestLimits

TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
LIMITS = RequestLimits(
    max_model_len=99,
    max_prompt_bytes=999,
    max_request_bytes=999,
    max_messages=9,
    max_values=99,
)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g", "h")]


def allowed(*names, mode="auto"):
    """Return a `tool_choice` that allows only the tools with the given names."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def offered(**fields):
    """Return the names of the tools in the prompt of a request, or None."""
    tools = read_tools({"tools": TOOLS, **fields})
    return tools and [tool["function"]["name"] for tool in tools]


@pytest.mark.parametrize("choice", [None, "auto", "required", {"type": "function"}])
def test_all_tools_are_offered(choice):
    assert offered(tool_choice=choice) == ["f", "g", "h"]


def test_with_none_no_tools_are_offered():
    assert offered(tool_choice="none") is None


def test_only_allowed_tools_are_offered():
    assert offered(tool_choice=allowed("h", "f")) == ["f", "h"]


def test_a_long_list_of_allowed_tools_is_read_quickly():
    names = [f"tool-{number:09}" for number in range(2048)]
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    choice = allowed(*names * 50)
    started_s = time.process_time()
    assert read_tools({"tools": tools, "tool_choice": choice}) == tools
    assert time.process_time() - started_s < 0.5


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (
            {"type": "allowed_tools", "tools": [{"name": ["f"]}]},
            r'tool_choice: allowed_tools has the function \["f"\], but tools has only f, g, h',
        ),
        (
            allowed("x"),
            'tool_choice: allowed_tools has the function "x", but tools has only f, g, h',
        ),
        (
            {"type": "allowed_tools"},
            "allowed_tools.tools must be a list of functions, but the request has no value",
        ),
    ],
)
def test_allowed_tools_without_a_known_tool_are_refused(choice, said):
    with pytest.raises(RequestError, match=said):
        offered(tool_choice=choice)


@pytest.mark.parametrize("value", [True, "true", " True"])
def test_a_flag_can_be_a_text(value):
    assert read_flag({"x": value}, "x", default=False) is True


def test_a_flag_that_is_not_a_boolean_is_refused():
    with pytest.raises(
        RequestError, match="x: the value must be true or false, but the request has 1"
    ):
        read_flag({"x": 1}, "x", default=False)


def renderer_of(template):
    """Return a renderer whose tokenizer has the given chat template and one special token."""
    return ChatTemplateRenderer(
        SimpleNamespace(chat_template=template, special_tokens_map={"eos": "$"})
    )


def test_a_chat_is_rendered_with_the_special_tokens():
    renderer = renderer_of("{% for m in messages %}{{ m.content }}{{ eos }}{% endfor %}")
    assert renderer.render([{"role": "user", "content": "a"}]) == "a$"


def test_a_template_that_renders_only_lists_of_parts_gets_lists():
    renderer = renderer_of(
        "{% for m in messages %}{{ m.role }}: {% for part in m.content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %};{% endfor %}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
    assert renderer.render(messages) == "user: a;assistant: bc;"

    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert renderer.render([{"role": "user", "content": parts}]) == "user: ab;"

    continued = renderer.render(messages, continue_final_message=True)
    assert continued == "user: a;assistant: bc"


def chat_with_image(role):
    """Return the messages of a chat. The second message has `role`, an image and a text."""
    parts = [{"type": "image"}, {"type": "text", "text": "a"}]
    return [{"role": "user", "content": "Hi"}, {"role": role, "content": parts}]


PARTS = (
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% endif %}"
    "{{ part.text }}{% endfor %}"
)


def test_an_image_in_a_tool_result_is_rendered():
    renderer = renderer_of("{% for m in messages %}{{ m.role }}: " + PARTS + ";{% endfor %}")
    assert renderer.render(chat_with_image("tool")) == "user: Hi;tool: <image>a;"


@pytest.mark.parametrize(
    "text",
    [
        "{{ m.content }}",
        "{{ m.content + '' }}",
        "{{ m.content | tojson }}",
        "{% for part in m.content %}{{ part.text }}{% endfor %}",
    ],
)
def test_an_image_is_refused_in_a_role_in_which_the_template_does_not_render_it(text):
    renderer = renderer_of(
        "{% for m in messages %}"
        f"{{% if m.role == 'user' %}}{PARTS}{{% else %}}{text}{{% endif %}}{{% endfor %}}"
    )
    with pytest.raises(RequestError, match=r"role tool .* type image, .* role user\."):
        renderer.render(chat_with_image("tool"))


@pytest.mark.parametrize(
    "text", ["{{ m.content }}", "{{ m.content + '' }}", "{{ m.content | tojson }}"]
)
def test_a_chat_with_images_keeps_texts_of_roles_whose_lists_the_template_cannot_render(text):
    renderer = renderer_of(  # like the template of GLM-4.1V
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'user' %}{% for part in m.content %}"
        "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
        f"{{% else %}}{text}{{% endif %}};{{% endfor %}}"
    )
    sent_messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    messages = read_messages({"messages": sent_messages}, RequestLimits.derive(4096, 8))
    rendered = renderer.render(messages).replace('"', "")  # The filter `tojson` adds quotes.
    assert rendered == "system: s;user: <image>a;assistant: b;user: c;"


ONLY_KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role in ('system', 'user') %}{{ m.role }}: {{ m.content }};"
    "{% else %}UNKNOWN{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "role"),
    [
        (ONLY_KNOWN_ROLES.replace("UNKNOWN", ""), "system"),
        (ONLY_KNOWN_ROLES.replace("UNKNOWN", "{{ raise_exception(m.role) }}"), "system"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}", "developer"),
    ],
)
def test_a_developer_becomes_a_system_message_if_the_template_would_omit_it(template, role):
    renderer = renderer_of(template)
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "a"}]
    assert renderer.render(messages) == f"{role}: be brief;user: a;"
    assert renderer.render(messages[::-1]) == f"user: a;{role}: be brief;"
    assert messages[0]["role"] == "developer"


def test_the_result_of_a_function_becomes_that_of_a_tool_if_the_template_would_omit_it():
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}result: {{ m.content }};"
        "{% elif m.tool_calls %}{% for call in m.tool_calls %}{{ call.function.name }}"
        "({{ call.function.arguments.a }});{% endfor %}{% elif m.role == 'user' %}"
        "{{ m.content }};{% endif %}{% endfor %}"
    )
    sent_messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "f", "content": "5"},
    ]
    messages = read_messages({"messages": sent_messages}, LIMITS)
    assert renderer_of(template).render(messages) == "x;f(1);result: 5;"

    every_role = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    rendered = renderer_of(every_role).render(messages)
    assert rendered == "user: x;assistant: ;function: 5;"


def test_consecutive_messages_are_merged_if_the_template_requires_alternating_roles():
    alternating = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) or not m.content"
        " %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ m.role }}: {{ m.content }};{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    rendered = renderer_of(alternating).render(messages)
    assert rendered == "user: a\n\nb;assistant: c\n\nd;"
    system = {"role": "system", "content": "s"}
    rendered = renderer_of(alternating).render([system, *messages[3:]])
    assert rendered == "user: s;assistant: c\n\nd;"
    rendered = renderer_of(alternating).render([system, *messages[:4], system])
    assert rendered == "user: s\n\na\n\nb;assistant: c;user: s;"
    every_order = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    rendered = renderer_of(every_order).render(messages)
    assert rendered == "user: a;assistant: ;user: b;assistant: c;assistant: d;"
    with pytest.raises(RequestError, match="roles must alternate"):
        renderer_of(alternating).render(messages[3:])
    # Empty assistant messages are left out. The last message is an exception if the model continues
    # it.
    chat = [messages[0], messages[2], messages[1]]
    rendered = renderer_of(alternating).render(chat, continue_final_message=True)
    assert rendered == "user: a\n\nb;assistant: "


def test_a_text_after_the_result_of_a_tool_is_appended_if_the_template_refuses_it():
    text_after_result_is_refused = (
        "{% for m in messages %}{% if m.role == 'user' and loop.index0 and "
        "messages[loop.index0 - 1].role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.role }}: {{ m.content }};{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "a"},
        {"role": "tool", "tool_call_id": "c", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    rendered = renderer_of(text_after_result_is_refused).render(messages)
    assert rendered == "user: a;tool: b\n\nc\n\nd;"


ONLY_FIRST_SYSTEM_MESSAGE = (
    "{% for m in messages %}{% if loop.first or m.role != 'system' %}{{ m.role }}: "
    "{{ m.content }};{% else %}LATER{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("later", ["", "{{ raise_exception('must be at the beginning') }}"])
def test_system_messages_that_a_template_would_omit_are_merged_or_become_user_messages(later):
    # The template renders `later` in place of each system message except the first message.
    source = ONLY_FIRST_SYSTEM_MESSAGE.replace("LATER", later)
    renderer = renderer_of(source)
    system, user = {"role": "system", "content": "a"}, {"role": "user", "content": "x"}
    assert renderer.render([system, {**system, "content": "b"}, user]) == "system: a\n\nb;user: x;"
    assert renderer.render([user, system]) == "user: x;user: a;"

    # The template of gpt-oss renders a message of the developer, but only at the start of a chat.
    renderer = renderer_of(source.replace("m.role != 'system'", "m.role in ('user', 'assistant')"))
    developer = {"role": "developer", "content": "b"}
    assert renderer.render([developer, user]) == "developer: b;user: x;"
    merged = "system: a\n\nb;user: x;user: b;"
    assert renderer.render([system, developer, user, developer]) == merged


def test_no_system_message_is_lost_if_the_last_one_replaces_the_others():
    renderer = renderer_of(  # like the template of DeepSeek R1
        "{% set ns = namespace(system='') %}{% for m in messages if m.role == 'system' %}"
        "{% set ns.system = m.content %}{% endfor %}{{ ns.system }};"
        "{% for m in messages if m.role != 'system' %}{{ m.content }};{% endfor %}"
    )
    system, user = {"role": "system", "content": "a"}, {"role": "user", "content": "x"}
    assert renderer.render([system, user, {**system, "content": "b"}]) == "a;x;b;"


def test_system_messages_that_a_template_renders_are_not_changed():
    renderer = renderer_of("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}")
    system, user = {"role": "system", "content": "a"}, {"role": "user", "content": "x"}
    expected = "system: a;system: a;user: x;system: a;"
    assert renderer.render([system, system, user, system]) == expected


def test_system_messages_of_a_chat_with_images_are_merged():
    renderer = renderer_of(
        "{% for m in messages %}{% if loop.first or m.role != 'system' %}"
        "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
        "{% endfor %};{% endif %}{% endfor %}"
    )
    system = {"role": "system", "content": [{"type": "text", "text": "a"}]}
    user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}
    assert renderer.render([system, system, user]) == "a\n\na;x;"


def chat_with_call(content=None, **fields):
    """Return the messages of a chat in which the model has called a function.

    The messages have the form in which clients send them. In OpenAI's API, the message with the
    result of a function does not contain the function's name.
    """
    call = {"id": "call1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": content, "tool_calls": [call], **fields},
        {"role": "tool", "tool_call_id": "call1", "content": "5"},
    ]
    return read_messages({"messages": messages}, RequestLimits.derive(4096, 8))


CALLS = (
    "{% for m in messages %}{% if m.tool_calls %}{% for call in m.tool_calls %}{{ CALL }};"
    "{% endfor %}{% else %}{{ m.content }};{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("call", "rendered"),
    [
        ("call.function.name ~ call.function.arguments.a", "f1"),
        ("call.function.name + call.function.arguments", 'f{"a": 1}'),  # as in DeepSeek V3
        ("call.name ~ call.arguments.a", "f1"),
        ("call.name + call.arguments", 'f{"a": 1}'),
    ],
)
def test_a_tool_call_has_the_form_that_the_template_expects(call, rendered):
    renderer = renderer_of(CALLS.replace("CALL", call))
    assert renderer.render(chat_with_call()) == f"x;{rendered};5;"


@pytest.mark.parametrize(("content", "rendered"), [(None, ""), ("Well.", "Well.;")])
def test_a_template_that_renders_either_text_or_calls_gets_two_messages(content, rendered):
    renderer = renderer_of(  # like the template of DeepSeek R1
        "{% for m in messages %}{% if m.content is none %}{% for call in m.tool_calls %}"
        "{{ call.function.name + call.function.arguments }};{% endfor %}"
        "{% else %}{{ m.content }};{% endif %}{% endfor %}"
    )
    assert renderer.render(chat_with_call(content)) == f'x;{rendered}f{{"a": 1}};5;'


@pytest.mark.parametrize(
    # The template of Llama 3.1 refuses a second call, and the template of gpt-oss omits it.
    "second_call",
    ["{{ raise_exception('only single tool-calls') }}", ""],
)
def test_a_template_that_renders_one_call_of_a_message_gets_several_messages(second_call):
    renderer = renderer_of(
        "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{% if m.tool_calls[1] %}"
        f"{second_call}"
        "{% endif %}({{ m.tool_calls[0].function.name }},"
        "{{ m.tool_calls[0].function.arguments.a }}){% endif %};{% endfor %}"
    )
    user, assistant, result = chat_with_call("Well.")
    (call,) = assistant["tool_calls"]
    call_2 = {**call, "id": "call2", "function": {"name": "f", "arguments": {"a": 2}}}
    result_2 = {**result, "tool_call_id": "call2", "content": "6"}
    assistant = {**assistant, "tool_calls": [call, call_2]}

    # The result of the second call comes first. The renderer moves each result behind its call.
    rendered = renderer.render([user, assistant, result_2, result, user])
    assert rendered == "x;Well.(f,1);5;(f,2);6;x;"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_becomes_a_part_of_the_content_if_the_template_renders_only_parts(field):
    source = (TEMPLATES / "reasoning_parts.jinja").read_text(encoding="utf-8")
    chat = chat_with_call("Well.", **{field: "Hm."})
    rendered = renderer_of(source).render(chat)
    assert rendered.startswith('[INST]x[/INST][THINK]Hm.[/THINK]Well.[TOOL_CALLS]f[ARGS]{"a": 1}')
    # A template that also renders a text as content gets the text without the reasoning.
    assert renderer_of("{{ messages[1].content | tojson }}").render(chat) == '"Well."'


@pytest.mark.parametrize("thinking", ["Hm.", [{"type": "text", "text": "Hm."}]])
def test_thinking_in_the_content_is_reasoning_as_in_the_apis_of_anthropic_and_mistral(thinking):
    parts = [{"type": "thinking", "thinking": thinking}, {"type": "text", "text": "Hi"}]
    (message,) = read_messages({"messages": [{"role": "assistant", "content": parts}]}, LIMITS)
    assert message["content"] == "Hi"
    assert message["reasoning"] == message["reasoning_content"] == "Hm."


@pytest.mark.parametrize("part_type", ["input_text", "output_text"])
def test_text_parts_may_have_the_types_of_the_responses_api(part_type):
    content = [{"type": part_type, "text": "Hi"}]
    (message,) = read_messages({"messages": [{"role": "user", "content": content}]}, LIMITS)
    assert message["content"] == "Hi"


def call_with_id(chat, call_id):
    """Return copies of the last two messages of `chat` with another id.

    These messages are a tool call and its result.
    """
    _, assistant, result = chat
    call = {**assistant["tool_calls"][0], "id": call_id}
    return [{**assistant, "tool_calls": [call]}, {**result, "tool_call_id": call_id}]


def test_ids_of_calls_are_short_if_the_template_refuses_others():
    renderer = renderer_of(  # like the templates of Mistral 7B and Mistral Nemo
        "{% for m in messages %}{% for id in [m.tool_call_id] if id is defined %}"
        "{% if id | length != 9 %}{{ raise_exception('length 9') }}{% endif %}{{ id }}={% endfor %}"
        "{{ m.content }}{% for call in m.tool_calls or [] %}{% if call.id | length != 9 %}"
        "{{ raise_exception('length 9') }}{% endif %}({{ call.id }},{{ call.function.name }},"
        "{{ call.function.arguments.a }}){% endfor %};{% endfor %}"
    )
    chat = chat_with_call()  # The id "call1" has a length that the template refuses.
    assert renderer.render(chat) == "x;(000000000,f,1);000000000=5;"

    rendered = renderer.render([*chat, *call_with_id(chat, "abcDEF123")])
    assert rendered.endswith("(abcDEF123,f,1);abcDEF123=5;")


def test_ids_of_calls_contain_the_name_if_the_template_renders_the_id_instead_of_the_name():
    renderer = renderer_of(  # like the template of Kimi K2
        "{% for m in messages %}{{ m.tool_call_id }}={{ m.content }}"
        "{% for call in m.tool_calls or [] %}({{ call.id }},{{ call.function.arguments.a }})"
        "{% endfor %};{% endfor %}"
    )
    chat = chat_with_call()
    assert renderer.render(chat) == "=x;=(functions.f:0,1);functions.f:0=5;"

    rendered = renderer.render([*chat, *call_with_id(chat, "functions.f:7")])
    assert rendered.endswith("=(functions.f:7,1);functions.f:7=5;")


def test_text_is_appended_to_the_reasoning_if_the_template_refuses_both_beside_calls():
    renderer = renderer_of(  # like the template of gpt-oss
        "{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.thinking %}"
        "{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}"
        "<{{ m.content or m.thinking }}>{{ m.tool_calls[0].function.name }}"
        "{{ m.tool_calls[0].function.arguments.a }};"
        "{% else %}{{ m.content }};{% endif %}{% endfor %}"
    )
    assert renderer.render(chat_with_call("Well.", reasoning="Hm.")) == "x;<Hm.\n\nWell.>f1;5;"
    assert renderer.render(chat_with_call("Well.")) == "x;<Well.>f1;5;"
    assert renderer.render(chat_with_call(reasoning="Hm.")) == "x;<Hm.>f1;5;"


def test_the_effort_high_becomes_xhigh_if_the_template_refuses_it():
    renderer = renderer_of(  # like the template of Qwen 3.8
        "{% if reasoning_effort not in ('xhigh', 'low') %}"
        "{{ raise_exception('Unexpected reasoning effort ' ~ reasoning_effort) }}{% endif %}"
        "{{ reasoning_effort }}"
    )
    assert renderer.render([], reasoning_effort="high") == "xhigh"
    assert renderer.render([], reasoning_effort="low") == "low"
    with pytest.raises(RequestError, match="Unexpected reasoning effort medium"):
        renderer.render([], reasoning_effort="medium")
    assert renderer_of("{{ reasoning_effort }}").render([], reasoning_effort="high") == "high"


def test_a_tool_without_description_and_parameters_is_rendered_by_each_template():
    renderer = renderer_of(
        "{% for t in tools %}{{ t.function.name + t.function.description }}"
        "{% for name in t.function.parameters.properties %}{{ name }}{% endfor %};{% endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert renderer.render([{"role": "user", "content": "x"}], tools=tools) == "f;"

    as_json = renderer_of("{{ tools | tojson }}").render([], tools=tools)
    assert as_json == '[{"type": "function", "function": {"name": "f"}}]'


def test_parameters_without_a_description_are_rendered_by_each_template():
    renderer = renderer_of(
        "{% for t in tools %}{% set parameters = t.function.parameters %}"
        "{% for name, schema in parameters.properties | items %}{{ name + schema.description }}"
        "{% if 'required' in parameters and name in parameters.required %}!{% endif %};"
        "{% endfor %}{% endfor %}"
    )
    properties = {"a": {"type": "string"}, "b": {"description": None}, "c": {"description": "x"}}
    parameters = {"type": "object", "properties": properties, "required": None}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert renderer.render([{"role": "user", "content": "x"}], tools=tools) == "a;b;cx;"


def test_the_result_of_a_tool_has_the_name_of_the_function():
    renderer = renderer_of("{% for m in messages %}{{ m.name }}={{ m.content }};{% endfor %}")
    assert renderer.render(chat_with_call("a")) == "=x;=a;f=5;"


def test_a_developer_message_of_parts_becomes_a_system_message():
    renderer = renderer_of(
        "{% for m in messages if m.role != 'developer' %}{{ m.role }}: "
        "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
        "{% endfor %};{% endfor %}"
    )
    assert renderer.render([{"role": "developer", "content": "a"}]) == "system: a;"


def test_a_checkpoint_may_have_a_template_for_tools():
    renderer = renderer_of({"default": "plain", "tool_use": "tools"})
    messages = [{"role": "user", "content": "a"}]
    assert renderer.render(messages) == "plain"
    assert renderer.render(messages, tools=TOOLS) == "tools"


@pytest.mark.parametrize("tools", ["", "{% for tool in tools %}{% endfor %}"])
def test_the_template_for_tools_renders_earlier_calls_if_a_request_has_no_tools(tools):
    without_calls = "{% for m in messages %}{{ m.content }};{% endfor %}"
    with_calls = CALLS.replace("CALL", "call.function.name ~ call.function.arguments.a")
    renderer = renderer_of({"default": without_calls, "tool_use": tools + with_calls})
    assert renderer.render(chat_with_call()) == "x;f1;5;"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no') }}", "messages: the chat template refuses this chat: no"),
        (
            "{{ messages[0].content + 1 }}",
            "messages: the chat template cannot render this chat: Type",
        ),
        ("{{ 'x' * 10 ** 9 }}", "messages: the chat template exceeds a limit"),
        (
            "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
            "messages: the chat template exceeds a limit",
        ),
        ("{% if %}", "messages: the chat template cannot be used"),
    ],
)
def test_a_template_that_cannot_render_a_request_gives_an_error_soon(template, message):
    started_s = time.thread_time()
    with pytest.raises(RequestError, match=message):
        renderer_of(template).render([{"role": "user", "content": "a"}])
    assert time.thread_time() - started_s < 6


def test_a_message_without_content_cannot_be_continued():
    renderer = renderer_of("{{ messages[0].content }}")
    with pytest.raises(RequestError, match="continue_final_message: the last message has no"):
        renderer.render([{"role": "assistant"}], continue_final_message=True)
