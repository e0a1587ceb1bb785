"""Tests that the markup of a list is inferred from the texts around two items."""

from nereid_parsers.template.list_markup import list_markup


def test_list_markup_separates_section_call_and_separator():
    found = list_markup("<all><one>", "</one>, <one>", "</one></all>")
    assert (found.open, found.item_open) == ("<all>", "<one>")
    assert (found.item_close, found.separator, found.close) == ("</one>", ", ", "</all>")


def test_list_markup_without_a_section_has_no_open_marker():
    found = list_markup("<one>", "</one>\n<one>", "</one>")
    assert (found.open, found.separator, found.close) == ("", "\n", "")
