"""Tests of the command that shows the analysis of a chat template."""

import argparse
import json
from html.parser import HTMLParser

import pytest
from nereid_parsers import FormatError
from nereid_parsers.errors import NereidParsersError
from nereid_parsers.template import command
from parsers.template.support import TEMPLATES


def run(*words):
    """Run the command with the arguments `words`, and return its exit status."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options = parser.parse_args([str(word) for word in words])
    return options.run(options)


@pytest.mark.parametrize(
    "words",
    ["R1 reasoning presence", "T2 two calls", "JsonObject", "parsed correctly", "Constraint"],
)
def test_it_prints_comparisons_format_samples_and_constraint(words, capsys):
    assert run("inspect", TEMPLATES / "tag_json.jinja") == 0
    text = capsys.readouterr().out
    assert words in text
    assert "\x1b[" not in text  # The text has no colours.


def test_the_option_colour_always_prints_colours(capsys):
    run(TEMPLATES / "tag_json.jinja", "--colour", "always")
    assert "\x1b[" in capsys.readouterr().out


def test_the_option_json_prints_the_report_as_json(capsys):
    assert run(TEMPLATES / "tag_json.jinja", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["format"]["part"] == "Format"
    assert [sample["differs"] for sample in report["samples"]] == [[]] * len(report["samples"])


class Page(HTMLParser):
    """A parser that collects information about an HTML page.

    Attributes:
        open_tags: the names of the elements that are opened and not closed yet.
        loaded_files: the files that the page loads.
        text: the visible text.
    """

    def __init__(self):
        super().__init__()
        self.open_tags = []
        self.loaded_files = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.loaded_files += [value for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open_tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open_tags.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_loads_no_file_and_is_well_formed(tmp_path, capsys):
    file = tmp_path / "page.html"
    assert run(TEMPLATES / "tagged_section.jinja", "--html", file) == 0
    assert capsys.readouterr().out == ""

    html = file.read_text(encoding="utf-8")
    page = Page()
    page.feed(html)
    assert page.open_tags == []
    assert page.loaded_files == []
    assert "<script" not in html
    assert '<invoke name="zqFirstTool">' in page.text
    assert "T5 two arguments" in page.text


def test_a_checkpoint_without_a_template_is_shown_as_plain(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert run(tmp_path) == 0
    assert (
        "Source of the format: plain. The checkpoint has no chat template."
        in capsys.readouterr().out
    )


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(FormatError, match=r"has no chat template and no config\.json\. Give"):
        run(tmp_path)


def test_more_than_one_path_is_rejected(capsys):
    assert run("a", "b") == 2
    assert "exactly one file or checkpoint, but 2 were given: a, b" in capsys.readouterr().err


def test_a_missing_path_is_an_error(tmp_path):
    with pytest.raises(FormatError):
        run(tmp_path / "absent")


def test_a_path_that_cannot_be_read_is_named():
    # This test also runs as root, who may read every file. The path is therefore too long, which
    # the system refuses in the same way as a path that a user may not read.
    path = "/" + "a" * 300
    with pytest.raises(FormatError, match=rf"^{path} cannot be read \(File name too long\)"):
        run(path)


def test_a_file_that_is_not_utf_8_is_named(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF\xff\xfe")
    with pytest.raises(FormatError, match=r"model\.gguf is not a text in UTF-8"):
        run(file)


def test_a_page_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(NereidParsersError, match=r"--html: the file .* cannot be written"):
        run(TEMPLATES / "tag_json.jinja", "--html", tmp_path)
