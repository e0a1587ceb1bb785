"""Tests that the chat template is read from the files of a checkpoint."""

import json

import pytest
from nereid_parsers import FormatError
from nereid_parsers.template import read_checkpoint


def test_chat_template_jinja_precedes_the_config(checkpoint):
    folder = checkpoint({"chat_template": "old"}, chat_template_DOT_jinja="new")
    assert read_checkpoint(folder).template == "new"


def test_chat_template_json_precedes_the_config(checkpoint):
    new = json.dumps({"chat_template": "new"})
    folder = checkpoint({"chat_template": "old"}, chat_template_DOT_json=new)
    assert read_checkpoint(folder).template == "new"


def test_the_template_in_the_config_of_a_processor_is_read(checkpoint):
    new = json.dumps({"chat_template": "new"})
    folder = checkpoint({"chat_template": "old"}, processor_config_DOT_json=new)
    assert read_checkpoint(folder).template == "new"


def test_the_template_named_tool_use_is_selected(checkpoint):
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assert read_checkpoint(checkpoint({"chat_template": named})).template == "b"


def test_additional_templates_are_found(checkpoint):
    folder = checkpoint(
        {}, chat_template_DOT_jinja="a", additional_chat_templates__tool_use_DOT_jinja="b"
    )
    assert read_checkpoint(folder).template == "b"


def test_the_template_in_the_config_is_found_beside_additional_templates(checkpoint):
    folder = checkpoint({"chat_template": "a"}, additional_chat_templates__rag_DOT_jinja="b")
    assert read_checkpoint(folder).template == "a"


def test_a_byte_order_mark_is_no_part_of_a_template(checkpoint):
    assert read_checkpoint(checkpoint({}, chat_template_DOT_jinja="\ufeffa")).template == "a"


def test_a_template_file_that_cannot_be_read_is_an_error(checkpoint):
    folder = checkpoint({}, additional_chat_templates__default_DOT_jinja="a")
    (folder / "additional_chat_templates" / "tool_use.jinja").symlink_to(folder / "absent")
    with pytest.raises(FormatError, match=r"tool_use\.jinja cannot be read"):
        read_checkpoint(folder)
