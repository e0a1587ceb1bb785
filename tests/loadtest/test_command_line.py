"""The command lines of the load tests."""

import sys

import pytest

from loadtest.faults import process_faults, soak
from loadtest.hostile import hostile
from loadtest.load import load


@pytest.mark.parametrize(
    ("main", "flag"),
    [
        (load.main, "--scenarios"),
        (soak.main, "--faults"),
        (process_faults.main, "--only"),
        (hostile.main, "--only"),
    ],
)
def test_a_name_with_a_typo_is_refused_instead_of_testing_nothing(main, flag, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program", flag, "Typo"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"{flag}: " in capsys.readouterr().err
