"""Tests of the modules of the Batch API that parse forms and lines, and write result files."""

import contextlib
import json
import subprocess
import sys
import textwrap
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nereid_client.batches.batch_lines import (
    InputLine,
    LineError,
    LineParser,
    ResultFile,
    count_lines,
    custom_id_in,
    read_lines,
    result_line,
)
from nereid_client.batches.multipart import FormReader
from nereid_client.errors import ApiError

BOUNDARY = b"---xyz"
CONTENT_TYPE = "multipart/form-data; boundary=" + BOUNDARY.decode()


def form(parts):
    body = b""
    for name, filename, value in parts:
        disposition = f'form-data; name="{name}"'
        disposition += "" if filename is None else f'; filename="{filename}"'
        body += b"--" + BOUNDARY + b"\r\nContent-Disposition: " + disposition.encode()
        body += b"\r\n\r\n" + value + b"\r\n"
    return body + b"--" + BOUNDARY + b"--\r\n"


@given(content=st.binary(max_size=300), size=st.integers(1, 400))
@settings(max_examples=50, deadline=None)
def test_a_form_is_the_same_in_pieces_of_any_size(content, size):
    body = form([("purpose", None, b"batch"), ("file", "a.jsonl", content)])
    received = bytearray()
    reader = FormReader(CONTENT_TYPE, received.extend)
    for at in range(0, len(body), size):
        reader.feed(body[at : at + size])
    reader.finish()
    assert (bytes(received), reader.filename) == (content, "a.jsonl")
    assert reader.fields == {"purpose": "batch"}


def test_a_boundary_that_is_too_long_is_a_wrong_request():
    with pytest.raises(ApiError, match="invalid boundary") as error:
        FormReader("multipart/form-data; boundary=" + "b" * 3000, lambda data: None)
    assert error.value.status == 400


@pytest.mark.parametrize(
    ("written", "name"), [("100%25.jsonl", "100%25.jsonl"), ("a%22b%0Ac.jsonl", 'a"b\nc.jsonl')]
)
def test_only_the_characters_that_browsers_escape_are_decoded_in_a_file_name(written, name):
    reader = FormReader(CONTENT_TYPE, lambda data: None)
    reader.feed(form([("file", written, b"{}")]))
    assert reader.filename == name


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "ends in the middle"),
        (b"nonsense", "not a valid form"),
        (form([("file", "a", b"x")])[:-9], "ends in the middle"),
        (form([("purpose", None, b"batch")]), "file is required"),
        (form([("file", "a", b"x"), ("file", "b", b"x")]), "has two"),
        (form([(f"a{n}", None, b"x") for n in range(99)]), "more than 16 parts"),
        (form([("purpose", None, b"x" * 5000)]), "at most 4096 bytes"),
    ],
)
def test_a_wrong_form_is_refused(body, words):
    reader = FormReader(CONTENT_TYPE, lambda data: None)

    def read():
        reader.feed(body)
        reader.finish()

    with pytest.raises(ApiError, match=words) as raised:
        read()
    assert raised.value.status == 400


@pytest.mark.parametrize("content_type", ["", "application/json", "multipart/form-data", "\xff"])
def test_a_body_that_is_no_form_is_refused(content_type):
    with pytest.raises(ApiError, match="multipart/form-data"):
        FormReader(content_type, lambda data: None)


LINES = st.binary(max_size=40) | st.text(" \r\t", max_size=20).map(str.encode)


@given(st.lists(LINES.map(lambda line: line.replace(b"\n", b"")), max_size=20))
@settings(max_examples=60, deadline=None)
def test_lines_keep_their_numbers_and_long_lines_are_not_read(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("lines") / "input"
    path.write_bytes(b"\n".join(lines))
    with path.open("rb") as file:
        lines_by_number = dict(read_lines(file, 10))
    for number, line in enumerate(lines, 1):
        if not line.strip():
            assert number not in lines_by_number
        elif len(line) > 10:
            assert lines_by_number[number] is None
        else:
            assert lines_by_number[number].rstrip(b"\n") == line


def test_millions_of_blank_lines_are_skipped_quickly(tmp_path):
    path = tmp_path / "input"
    path.write_bytes(b"a\n" + b" \n" * 10_000_000 + b"  b\n")
    start = time.process_time()
    assert count_lines(path, max_bytes=10) == 2
    assert time.process_time() - start < 1
    with path.open("rb") as file:
        *_, last_line = read_lines(file, 10)
    assert last_line == InputLine(10_000_002, b"  b\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": }', "The line is not valid JSON at column 7: Expecting value."),
        (b"[" * 100_000, "The JSON of the line is nested too deeply."),
        (b'{"a": ' + b"9" * 5000 + b"}", "The line has an integer with more than 4300 digits."),
        (b'{"a": "\xff"}', "The line is not valid UTF-8 at byte 7."),
    ],
)
def test_the_error_for_a_line_that_is_not_json_names_no_python_function(content, message):
    with pytest.raises(LineError) as error:
        LineParser("/v1/completions", 10**6).parse(InputLine(1, content))
    assert str(error.value).startswith(message)


@given(st.binary(max_size=200) | st.from_type(object).map(lambda value: repr(value).encode()))
@settings(max_examples=80, deadline=None)
def test_any_line_is_a_request_or_a_line_error(line):
    with contextlib.suppress(LineError):
        LineParser("/v1/embeddings", 1000).parse(InputLine(1, line))
    custom_id_in(line)


def content_of(path):
    """Return the content of a file, or empty bytes if the file does not exist."""
    return path.read_bytes() if path.exists() else b""


@given(num_missing_bytes=st.integers(0, 400), num_lines=st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_a_result_file_that_was_cut_anywhere_continues(
    tmp_path_factory, num_missing_bytes, num_lines
):
    path = tmp_path_factory.mktemp("results") / "output" / "content"
    result_lines = {
        number: result_line("batch_00ff", number, f"id {number}", error={})
        for number in range(1, num_lines + 1)
    }
    with ResultFile(path) as file:
        for line in result_lines.values():
            file.append(line)
    complete_content = content_of(path)

    if complete_content:  # a file exists only if it has lines
        path.write_bytes(complete_content[: max(len(complete_content) - num_missing_bytes, 0)])
    with ResultFile(path) as file:
        for number in sorted(result_lines.keys() - file.answered_lines):
            file.append(result_lines[number])

    assert content_of(path) == complete_content


def test_a_full_disk_leaves_whole_lines_only(tmp_path):
    # The limit on the size of a file simulates a full disk: a write fails after some of its bytes.
    program = textwrap.dedent("""
        import resource, signal, sys
        from pathlib import Path
        from nereid_client.batches.batch_lines import ResultFile, result_line
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        with ResultFile(Path(sys.argv[1])) as file:
            number = 0
            try:
                while True:
                    number += 1
                    file.append(result_line("batch_0a", number, "x" * 30))
            except OSError:
                resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
                file.append(result_line("batch_0a", number, "x" * 30))
    """)
    path = tmp_path / "output" / "content"
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, timeout=60)
    lines = path.read_text().splitlines()
    numbers = [int(json.loads(line)["id"].rpartition("_")[2]) for line in lines]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) > 5
