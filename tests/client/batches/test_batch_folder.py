"""Tests of the check of NEREID_BATCH_FOLDER when a server starts."""

import os

import pytest
from nereid_client.__main__ import main
from nereid_client.batches import batch_folder as module
from nereid_client.batches.batch_folder import batch_folder
from nereid_client.settings import Settings, SettingsError


def test_a_folder_that_does_not_exist_yet_is_accepted(tmp_path):
    folder = tmp_path / "a" / "b"
    assert batch_folder(Settings(batch_folder=str(folder))) == folder
    assert not folder.parent.exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("file", "is not a folder"), ("file/a", "is not a folder"), ("locked/a", "cannot write into")],
)
def test_a_folder_that_cannot_store_files_is_refused(tmp_path, monkeypatch, name, reason):
    (tmp_path / "file").touch()
    locked = tmp_path / "locked"
    locked.mkdir()
    monkeypatch.setattr(
        module.os, "access", lambda path, _: path != locked
    )  # root may always write
    with pytest.raises(SettingsError, match=rf"^NEREID_BATCH_FOLDER: .*{reason}.*Give a folder"):
        batch_folder(Settings(batch_folder=str(tmp_path / name)))


def test_an_unknown_home_folder_is_refused():
    with pytest.raises(SettingsError, match=r"^NEREID_BATCH_FOLDER: .* home directory"):
        batch_folder(Settings(batch_folder="~nobody-has-this-name/a"))


def test_the_folder_is_not_checked_if_no_file_is_stored():
    assert batch_folder(Settings(batch_folder=os.devnull, max_stored_files=0)) is None


def test_the_frontend_does_not_start_with_a_folder_that_cannot_store_files(capsys):
    assert main(["--batch-folder", os.devnull]) == 2
    assert capsys.readouterr().err.startswith("nereid_client: NEREID_BATCH_FOLDER: files cannot be")
