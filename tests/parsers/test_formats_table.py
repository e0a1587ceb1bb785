"""Tests of the table of formats in the documentation."""

from parsers.formats_table import TARGET, text


def test_the_table_agrees_with_the_registry():
    assert TARGET.read_text(encoding="utf-8") == text()
