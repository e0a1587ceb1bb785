import pytest
from backend.serving.fake_server import TESTS
from nereid_backend.serving.process.process_handle import ChildProgram, Limit


@pytest.fixture
def make_program(monkeypatch):
    """A function that returns the program of a scripted child process with given settings."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))

    def make(*, start_timeout=60, hang_timeout=60, max_restarts=1, **settings):
        return ChildProgram(
            "worker",
            "worker of the script",
            "backend.serving.process.scripted_child",
            settings,
            Limit("start_timeout_s", start_timeout),
            Limit("hang_timeout_s", hang_timeout),
            Limit("max_restarts", max_restarts),
        )

    return make
