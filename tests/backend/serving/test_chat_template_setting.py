"""Tests of the settings `chat_template` and `chat_template_kwargs`, and of damaged templates."""

import json
import shutil

import pytest
from backend.serving.fake_server import DEMO
from backend.serving.pipeline import Pipeline, chat
from nereid_backend.errors import ConfigError, ModelError
from nereid_backend.serving.chat_format import choose_format
from nereid_backend.serving.chat_template import read_chat_template, read_template_defaults
from nereid_backend.serving.serving_settings import ServingSettings
from nereid_backend.serving.tokenizer.prompt_builder import PromptBuilder, load_tokenizer

MODEL = str(DEMO / "chat")
# The variable `style` is the beginning of the answer. Its value comes from chat_template_kwargs.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ style }}{% endif %}"
)


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "server.jinja"
    path.write_text(TEMPLATE)
    return path


def test_the_template_and_its_defaults_apply_to_chats(template, tmp_path, monkeypatch):
    pipeline = Pipeline(
        DEMO / "chat",
        [{"when": "", "text": "yes"}],
        tmp_path,
        monkeypatch,
        chat_template=str(template),
        chat_template_kwargs=json.dumps({"style": "Short: "}),
    )

    def prompt_of(**fields):
        (first_reply, *_) = pipeline.ask(**chat("Hi", return_token_ids=True, **fields))
        return pipeline.tokenizer._tokenizer.decode(first_reply["delta"][0]["prompt_token_ids"])

    turns = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_of() == turns + "Short: "
    assert prompt_of(chat_template_kwargs={"style": "Long: "}) == turns + "Long: "


@pytest.mark.parametrize("name", ["chat_template.json", "processor_config.json"])
@pytest.mark.parametrize(
    "stored", ["JSON", {"default": "JSON"}, [{"name": "default", "template": "JSON"}]]
)
def test_a_template_in_a_file_of_a_processor_applies_to_chats(stored, name, tmp_path):
    folder = tmp_path / "chat"
    shutil.copytree(MODEL, folder)
    (folder / name).write_text(json.dumps({"chat_template": stored}))
    body = {"messages": [{"role": "user", "content": "Hi"}]}

    def rendered_prompt():
        return PromptBuilder(load_tokenizer(str(folder)), max_model_len=4096).render_chat(body)

    # The template in chat_template.jinja has precedence over the template "JSON".
    assert "Hi" in rendered_prompt()
    (folder / "chat_template.jinja").unlink()
    assert rendered_prompt() == "JSON"


@pytest.mark.parametrize("name", ["tokenizer_config.json", "processor_config.json"])
def test_the_default_template_may_be_in_a_json_file_beside_additional_templates(name, tmp_path):
    folder = tmp_path / "chat"
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("TOOLS")
    file = folder / name
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | {"chat_template": "NO TOOLS"}))
    builder = PromptBuilder(load_tokenizer(str(folder)), max_model_len=4096)
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert builder.render_chat(body) == "NO TOOLS"
    assert builder.render_chat(body | {"tools": [tool]}) == "TOOLS"


def test_a_byte_order_mark_at_the_start_of_a_template_is_no_part_of_the_prompt(tmp_path):
    folder = tmp_path / "chat"
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").write_text("Hello", encoding="utf-8-sig")
    builder = PromptBuilder(load_tokenizer(str(folder)), max_model_len=4096)
    assert builder.render_chat({"messages": [{"role": "user", "content": "Hi"}]}) == "Hello"


@pytest.mark.parametrize("content", ["{", "[1]", '{"chat_template": [1]}'])
def test_a_damaged_chat_template_json_is_an_error_of_the_checkpoint(content, tmp_path):
    folder = tmp_path / "chat"
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(content)
    with pytest.raises(ModelError, match=r"model: .*chat_template.json cannot be read"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("stored", [5, {"default": 5}, [{"name": "default", "template": None}]])
def test_a_template_with_a_wrong_type_is_an_error_of_the_checkpoint(stored, tmp_path):
    folder = tmp_path / "chat"
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": stored}))
    with pytest.raises(ModelError, match=r"chat_template in .*chat_template.json must be a text"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eos_token": {"content": "<|im_end|>"}}, "Special token eos_token has to be"),
        ({"added_tokens_decoder": []}, "'list' object has no attribute 'items'"),
        ({"chat_template": 5}, "chat_template in .*tokenizer_config.json must be a text"),
    ],
)
def test_a_tokenizer_config_with_a_wrong_type_is_an_error_of_the_checkpoint(
    change, message, tmp_path
):
    folder = tmp_path / "chat"
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=f"model: .*{message}"):
        load_tokenizer(str(folder))


def test_the_format_is_derived_from_the_template_of_the_server(template):
    format_of_checkpoint = choose_format(ServingSettings(model=MODEL))
    format_of_server = choose_format(ServingSettings(model=MODEL, chat_template=str(template)))
    assert format_of_checkpoint.layout.tools is not None
    assert format_of_server.layout.tools is None


def test_a_byte_order_mark_is_no_part_of_the_template(template):
    template.write_text(TEMPLATE, encoding="utf-8-sig")
    settings = ServingSettings(model=MODEL, chat_template=str(template))
    assert read_chat_template(settings) == TEMPLATE


def test_a_missing_template_and_wrong_defaults_are_refused(tmp_path):
    settings = ServingSettings(model=MODEL, chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(ConfigError, match=r"chat_template: the file .* cannot be read"):
        read_chat_template(settings)

    for wrong_defaults in ("[1]", "{", "5"):
        settings = ServingSettings(model=MODEL, chat_template_kwargs=wrong_defaults)
        with pytest.raises(ConfigError, match="chat_template_kwargs: the value must be"):
            read_template_defaults(settings)

    with pytest.raises(ConfigError, match="the name messages is reserved"):
        PromptBuilder(load_tokenizer(MODEL), 4096, {"messages": []})
