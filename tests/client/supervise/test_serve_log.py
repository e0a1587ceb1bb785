"""Tests of the log file of `nereid serve`."""

import os

import pytest
from nereid_client.supervise.serve_log import open_log


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_log_that_logrotate_truncates_has_no_zero_bytes(tmp_path, log_format):
    path = tmp_path / "serve.log"
    with open_log(path, log_format) as log:
        log.write("an old line\n")
        os.truncate(path, 0)
        log.write("a new line\n")
        content = path.read_text()
    assert "a new line" in content
    assert "\0" not in content


def test_the_log_of_the_earlier_server_is_kept_under_another_name(tmp_path):
    path = tmp_path / "serve.log"
    earlier = tmp_path / "serve.log.old"
    for number in (1, 2, 3):
        with open_log(path, "text") as log:
            log.write(f"a line of server {number}\n")
    assert path.read_text() == "a line of server 3\n"
    assert earlier.read_text() == "a line of server 2\n"


def test_a_log_that_cannot_be_renamed_is_overwritten(tmp_path):
    path = tmp_path / "serve.log"
    path.write_text("a line of the earlier server\n")
    (tmp_path / "serve.log.old").mkdir()
    with open_log(path, "text") as log:
        log.write("a line\n")
    assert path.read_text() == "a line\n"


def test_a_link_to_a_log_is_not_renamed(tmp_path):
    path = tmp_path / "serve.log"
    path.symlink_to(tmp_path / "target")
    (tmp_path / "target").write_text("a line of the earlier server\n")
    with open_log(path, "text") as log:
        log.write("a line\n")
    assert path.is_symlink()
    assert path.read_text() == "a line\n"
