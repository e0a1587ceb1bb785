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


def test_the_log_of_an_earlier_server_is_replaced(tmp_path):
    path = tmp_path / "serve.log"
    path.write_text("the log of an earlier server\n")
    with open_log(path, "text") as log:
        log.write("a line\n")
    assert path.read_text() == "a line\n"
