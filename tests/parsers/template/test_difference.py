"""Tests that comparisons of texts never cut a marker in two."""

import pytest
from nereid_parsers.template.markup.difference import Comparison, common_prefix, common_suffix
from nereid_parsers.template.markup.marker_pairs import closing_spellings, opening_spellings
from nereid_parsers.template.markup.markers import compound_closing, markers


def test_a_common_prefix_cuts_no_marker():
    assert common_prefix("a<tool_call>x", "a<tool_result>x") == "a"


def test_a_common_suffix_cuts_no_marker():
    assert common_suffix("x</tool_call>", "y</stool_call>") == ""
    assert common_suffix("x</tool_call>\n", "y</tool_call>\n") == "</tool_call>\n"


def test_words_are_kept_whole():
    assert common_prefix("walking", "walker") == ""


@pytest.mark.parametrize(
    ("opened", "closed"),
    [
        ("<think>", "</think>"),
        ("[THINK]", "[/THINK]"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|inner_prefix|>", "<|inner_suffix|>"),
        ("<|channel>", "<channel|>"),
        ("◁think▷", "◁/think▷"),
        ("【思考】", "【/思考】"),
        ("<|think|>", "<|think_end|>"),
        ("<｜think｜>", "<｜end▁of▁think｜>"),
        ("<think>", "<end_think>"),
    ],
)
def test_opening_and_closing_spellings_match(opened, closed):
    assert markers(f"a{opened}b{closed}c") == [opened, closed]
    assert closed in closing_spellings(opened)
    assert opened in opening_spellings(closed)


def test_a_closing_tag_does_not_repeat_the_attributes():
    assert "</think>" in closing_spellings('<think mode="deep">')


def test_only_a_marker_replaces_the_first_marker_of_an_opening_text():
    opening = "<|open|>think<|sep|>"
    assert compound_closing("\n<|close|>think<|sep|>a", opening) == "\n<|close|>think<|sep|>"
    assert compound_closing("I think<|sep|>a", "<|open|> think<|sep|>") == ""


def test_a_comparison_shows_what_changed():
    one = Comparison("x", "y", "<a>left</a>", "<a>right</a>", "")
    assert one.parts() == ("<a>", "left", "right", "</a>")
