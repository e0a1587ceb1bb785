"""Tests that `nereid serve` deletes the shared memory of killed servers."""

from nereid_client.supervise.shared_memory import reserve_prefix


def test_only_the_shared_memory_of_killed_servers_is_deleted(tmp_path):
    def create(prefix):
        region = tmp_path / f"{prefix}tensors"
        region.touch()
        return region

    # When a server is killed, the kernel releases its lock, but the lock file remains.
    (tmp_path / "lock_of_nereid_1_01234567_").touch()
    region_of_killed_server = create("nereid_1_01234567_")
    region_of_other_program = create("other_")

    with reserve_prefix("nereid_1_89abcdef_", tmp_path):
        region_of_running_server = create("nereid_1_89abcdef_")
        assert not region_of_killed_server.exists()
        with reserve_prefix("nereid_1_fedcba98_", tmp_path):
            assert region_of_running_server.exists()

    assert set(tmp_path.iterdir()) == {region_of_running_server, region_of_other_program}


def test_a_server_starts_although_its_shared_memory_cannot_be_locked(tmp_path):
    with reserve_prefix("nereid_1_89abcdef_", tmp_path / "missing"):
        pass
