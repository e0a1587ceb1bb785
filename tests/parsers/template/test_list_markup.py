"""Tests that the markup of a list is inferred from the texts around two items."""

from nereid_parsers.template.markup.list_markup import list_markup


def test_list_markup_separates_section_call_and_separator():
    markup = list_markup("<all><one>", "</one>, <one>", "</one></all>")
    assert (markup.open, markup.item_open) == ("<all>", "<one>")
    assert (markup.item_close, markup.separator, markup.close) == ("</one>", ", ", "</all>")


def test_list_markup_without_a_section_has_no_open_marker():
    markup = list_markup("<one>", "</one>\n<one>", "</one>")
    assert (markup.open, markup.separator, markup.close) == ("", "\n", "")
