"""Tests of the programs that build and check the documentation."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from docs_tools import build_site, check_prose  # noqa: E402 - sys.path is changed first


@pytest.fixture
def prose_of(tmp_path):
    """A function that returns the prose of a file with the given text."""

    def read(text, suffix=".py"):
        path = tmp_path / f"file{suffix}"
        path.write_text(text)
        return check_prose.text_of(path)

    return read


def test_only_comments_docstrings_and_messages_are_prose(prose_of):
    source = 'door = "the door"  # a comment\nraise Error(f"the door of {door} is shut")\n'
    first, second = prose_of(source).splitlines()
    assert first.split() == ["#", "a", "comment"]
    assert "the door of" in second
    assert "Error" not in second


def test_prose_keeps_its_line_and_column(prose_of):
    source = 'x = 1\n\n\ndef f():\n    """Return `door` of the text."""\n'
    lines = prose_of(source).splitlines()
    assert lines[4].index("Return") == source.splitlines()[4].index("Return")
    assert "door" not in lines[4]


def test_code_in_markdown_is_no_prose(prose_of):
    text = "See `door` and [the page](door.md).\n```\ndoor\n```\nThe door.\n"
    assert [line.count("door") for line in prose_of(text, ".md").splitlines()] == [0, 0, 0, 0, 1]


def test_private_phrases_are_found_with_the_fields_words():
    found = list(check_prose.phrases("a.md", "one\nThere are so many of these requests in work.\n"))
    assert found == [
        "a.md:2: so many of ==> this number of",
        "a.md:2: in work ==> in progress, running",
    ]


def test_each_private_term_has_a_replacement():
    for line in check_prose.TERMS.read_text().splitlines():
        word, arrow, instead = line.partition("->")
        assert arrow, line
        assert instead.endswith(","), line
        assert word == word.lower()


def test_the_generators_warnings_become_one_line_each():
    output = "Warning: page does not exist\n   ╭─[ index.md:2:41 ]\n   │\nmore\n"
    assert build_site._problems(output) == ["docs/index.md:2:41: page does not exist"]


def test_resources_of_other_servers_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<script src="https://example.org/a.js"></script><a href="https://example.org">link</a>'
        '<link rel="stylesheet" href="assets/site.css">'
    )
    assert build_site.loaded_from_elsewhere(tmp_path) == [
        "a.html: loads https://example.org/a.js from another server"
    ]
