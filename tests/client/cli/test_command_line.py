"""Tests of the messages that the command `nereid` prints for unknown arguments."""

import pytest
from nereid_client.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--max-model-length", "20"], "Did you mean --max-model-len?"),
        (["serve", "--max-body-bytes=9"], "environment variables with the prefix NEREID_"),
        (["chat", "--modle", "x"], "chat does not have the argument --modle."),
    ],
)
def test_an_unknown_flag_is_named_with_the_nearest_known_one(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
