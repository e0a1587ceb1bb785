"""Tests that the format of a checkpoint is chosen from names or from the checkpoint's files."""

import json
import logging

import pytest
from nereid_parsers import FormatError, UnknownFormatError, get_format
from nereid_parsers.template import format_for_checkpoint
from parsers.template.support import TEMPLATES, source

SPECS = json.loads((TEMPLATES / "response_templates.json").read_text(encoding="utf-8"))


def body_of(chosen):
    """Return the name of the class with which a chosen format describes the bodies of calls."""
    return type(chosen.format.layout.tools.calls[0].body).__name__


def test_a_chosen_name_precedes_the_checkpoints_template(checkpoint):
    folder = checkpoint({"chat_template": source("tag_json")})
    chosen = format_for_checkpoint(folder, name="qwen3_coder")
    assert chosen.source == "chosen"
    assert chosen.format == get_format("qwen3_coder")


def test_two_names_make_one_format(checkpoint):
    chosen = format_for_checkpoint(checkpoint({}), reasoning="qwen3", tools="hermes")
    assert chosen.format == get_format(reasoning="qwen3", tools="hermes")


def test_one_chosen_name_leaves_the_other_part_to_the_template(checkpoint):
    folder = checkpoint({"chat_template": source("name_marker_json")})
    with_tools = format_for_checkpoint(folder, tools="hermes")
    assert with_tools.format.layout.reasoning.open == "[THINK]"
    assert with_tools.format.layout.tools == get_format("hermes").layout.tools
    with_reasoning = format_for_checkpoint(folder, reasoning="qwen3")
    assert with_reasoning.format.layout.reasoning.open == "<think>\n"
    assert body_of(with_reasoning) == "JsonArguments"


def test_a_chosen_format_of_messages_is_used_completely(checkpoint):
    folder = checkpoint({"chat_template": source("tag_json")})
    chosen = format_for_checkpoint(folder, tools="gpt_oss")
    assert chosen.format.layout == get_format("gpt_oss").layout


def test_an_unknown_name_is_an_error(checkpoint):
    with pytest.raises(UnknownFormatError):
        format_for_checkpoint(checkpoint({}), name="no_such_format")


def test_a_response_template_precedes_the_chat_template(checkpoint):
    declared = SPECS["tagged values"]["spec"]
    folder = checkpoint({"chat_template": source("tag_json"), "response_template": declared})
    chosen = format_for_checkpoint(folder)
    assert (chosen.source, body_of(chosen)) == ("response_template", "TaggedArguments")


def test_an_unusable_response_template_falls_back_to_the_chat_template(checkpoint):
    declared = {"start_anchor": "x", "fields": {"mood": {}}}
    folder = checkpoint({"chat_template": source("tag_json"), "response_template": declared})
    chosen = format_for_checkpoint(folder)
    assert (chosen.source, body_of(chosen)) == ("template", "JsonObject")
    assert "mood" in chosen.why


def test_the_template_is_analysed_with_the_tokenizers_own_tokens(checkpoint):
    config = {
        "chat_template": source("reasoning_parts"),
        "eos_token": {"content": "</s>"},
        "bos_token": "<s>",
    }
    chosen = format_for_checkpoint(checkpoint(config))
    assert chosen.source == "template"
    assert chosen.analysis.supports.reasoning == ("parts",)
    assert chosen.format.ends == ("</s>",)


def test_without_a_template_the_format_is_plain_content_with_a_warning(checkpoint, caplog):
    with caplog.at_level(logging.WARNING):
        chosen = format_for_checkpoint(checkpoint({}))
    assert chosen.source == "plain"
    assert "no chat template" in caplog.text


def test_a_template_that_cannot_be_analysed_gives_plain_content_with_a_warning(checkpoint, caplog):
    with caplog.at_level(logging.WARNING):
        chosen = format_for_checkpoint(checkpoint({"chat_template": "{% for %}"}))
    assert chosen.source == "plain"
    assert "does not compile" in caplog.text


def test_a_file_with_a_template_is_accepted():
    chosen = format_for_checkpoint(TEMPLATES / "tag_json.jinja")
    assert (chosen.source, body_of(chosen)) == ("template", "JsonObject")


def test_a_missing_path_is_an_error(tmp_path):
    with pytest.raises(FormatError, match="neither"):
        format_for_checkpoint(tmp_path / "absent")


def test_a_config_that_is_not_valid_json_is_an_error(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(FormatError, match="not a valid JSON file"):
        format_for_checkpoint(tmp_path)
