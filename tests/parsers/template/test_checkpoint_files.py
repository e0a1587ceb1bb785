"""The chat template is read from the files of a checkpoint."""

import json

from nereid_parsers.template import read_checkpoint


def test_chat_template_jinja_precedes_the_config(checkpoint):
    folder = checkpoint({"chat_template": "old"}, chat_template_DOT_jinja="new")
    assert read_checkpoint(folder).template == "new"


def test_chat_template_json_precedes_the_config(checkpoint):
    new = json.dumps({"chat_template": "new"})
    folder = checkpoint({"chat_template": "old"}, chat_template_DOT_json=new)
    assert read_checkpoint(folder).template == "new"


def test_the_template_named_tool_use_is_selected(checkpoint):
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assert read_checkpoint(checkpoint({"chat_template": named})).template == "b"


def test_additional_templates_are_found(checkpoint):
    folder = checkpoint(
        {}, chat_template_DOT_jinja="a", additional_chat_templates__tool_use_DOT_jinja="b"
    )
    assert read_checkpoint(folder).template == "b"
