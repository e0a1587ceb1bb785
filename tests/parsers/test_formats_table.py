"""The table in the documentation."""

from parsers.formats_table import TARGET, text


def test_the_table_is_what_the_registry_says():
    assert TARGET.read_text(encoding="utf-8") == text()
