"""Tests of how `nereid serve` selects and warms up the embedding model and the reranker."""

import threading
from argparse import ArgumentParser

import pytest
from fakes.live_server import make_checkpoint
from nereid_client.console import CliError
from nereid_client.supervise import pooling_models
from nereid_client.supervise.frontend_client import Answer
from nereid_client.supervise.pooling_models import PoolingWarmUp
from nereid_client.supervise.warmup import WarmUp


@pytest.fixture
def repository(tmp_path):
    """A model repository with an embedding model and a reranker, next to two demo checkpoints."""
    for kind in ("embedding", "rerank"):
        (tmp_path / "model_repository" / kind).mkdir(parents=True)
        (tmp_path / "model_repository" / kind / "config.pbtxt").touch()
    for name in ("embed", "rerank"):
        (tmp_path / "demo").mkdir(exist_ok=True)
        make_checkpoint(tmp_path / "demo").rename(tmp_path / "demo" / name)
    return tmp_path / "model_repository"


@pytest.fixture
def choose(repository, monkeypatch):
    for name in ("NEREID_EMBEDDING_MODEL", "NEREID_RERANK_MODEL"):
        monkeypatch.delenv(name, raising=False)

    def parse(*argv):
        parser = ArgumentParser()
        pooling_models.add_flags(parser.add_argument_group("models"))
        return pooling_models.choose_pooling_models(parser.parse_args(argv), repository)

    return parse


def test_both_demo_models_are_served_by_default(choose):
    assert [(model.kind, model.name) for model in choose()] == [
        ("embedding", "embed"),
        ("rerank", "rerank"),
    ]


def test_the_value_none_disables_a_model_in_the_environment_of_the_servers(choose):
    chosen = choose("--embedding-model=none")
    assert [model.kind for model in chosen] == ["rerank"]
    variables = pooling_models.environment(chosen)
    assert variables["NEREID_EMBEDDING_MODEL"] == "none"
    assert variables["NEREID_RERANK_MODEL"].endswith("/demo/rerank")


def test_a_flag_takes_precedence_over_the_variable(choose, tmp_path, monkeypatch):
    monkeypatch.setenv("NEREID_RERANK_MODEL", "none")
    mine = make_checkpoint(tmp_path)
    chosen = choose(f"--rerank-model={mine}")
    assert [model.name for model in chosen] == ["embed", "echo-model"]
    assert chosen[1].path == mine


def test_a_repository_without_the_models_serves_none_by_default(choose, repository):
    for kind in ("embedding", "rerank"):
        (repository / kind / "config.pbtxt").unlink()
    assert choose() == []


def test_a_flag_for_a_model_that_the_repository_lacks_is_refused(choose, repository, tmp_path):
    (repository / "embedding" / "config.pbtxt").unlink()
    with pytest.raises(
        CliError, match=r"--embedding-model requires the file embedding/config.pbtxt"
    ):
        choose(f"--embedding-model={make_checkpoint(tmp_path)}")


def test_the_message_about_a_wrong_checkpoint_names_the_flag_of_the_model(choose, tmp_path):
    with pytest.raises(CliError, match=r"^--rerank-model: the folder .* does not exist"):
        choose(f"--rerank-model={tmp_path / 'nowhere'}")


READY = threading.Event()
READY.set()


class Answers:
    """A fake `FrontendClient` whose POST requests return the given statuses in order."""

    model = "chat"

    def __init__(self, *statuses, text="the reason"):
        self.statuses = list(statuses)
        self.text = text
        self.bodies = []

    def get_status(self, path):
        return 200

    def post(self, path, body):
        self.bodies.append((path, body))
        return Answer(self.statuses.pop(0), self.text)

    def curl(self, path, body):
        return f"curl {path} {body['model']}"


def test_the_warm_up_waits_until_each_model_answers(choose):
    frontend = Answers(404, 503, 200, 200)
    warm_up = PoolingWarmUp(frontend, choose(), READY)
    warm_up.run()
    assert warm_up.curls == ["curl /v1/embeddings embed", "curl /v1/rerank rerank"]
    assert warm_up.is_done


def test_the_warm_up_reports_a_model_that_cannot_answer(choose):
    warm_up = PoolingWarmUp(Answers(500), choose(), READY)
    warm_up.run()
    assert warm_up.failure == "the model embed cannot answer its first request: the reason"
    assert not warm_up.is_done


def test_the_warm_up_does_not_wait_for_models_that_a_client_has_unloaded(choose):
    frontend = Answers(404, 404, 404, text='{"error": {"code":"model_unloaded"}}')
    warm_up = WarmUp(frontend)
    warm_up.run()
    assert (warm_up.failure, warm_up.curl) == (None, "curl /v1/chat/completions chat")
    pooling_warm_up = PoolingWarmUp(frontend, choose(), READY)
    pooling_warm_up.run()
    assert pooling_warm_up.is_done
