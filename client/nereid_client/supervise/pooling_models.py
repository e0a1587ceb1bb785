"""The embedding model and the reranker that `nereid serve` can run beside the language model.

Embedding models and rerankers are called pooling models.
"""

import argparse
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nereid_client.console import CliError
from nereid_client.supervise import startup_checks
from nereid_client.supervise.check_checkpoint import check_checkpoint
from nereid_client.supervise.frontend_client import Answer, FrontendClient

NOT_SERVED = "none"
_POLL_EVERY_S = 0.1
# None means that the frontend did not answer. The status is 404 while the model is not loaded yet.
_UNAVAILABLE = (None, 404, 429, 503)
_EXAMPLES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "embedding": ("/v1/embeddings", {"input": "Where does Hugo live?"}),
    "rerank": (
        "/v1/rerank",
        {
            "query": "Where does Hugo live?",
            "documents": ["Hugo has a turtle.", "Hugo lives in Pinemark."],
        },
    ),
}


class _ModelFlag(NamedTuple):
    """A flag that selects the checkpoint of a pooling model.

    Attributes:
        kind: the name of the model in the model repository, "embedding" or "rerank".
        demo_folder: the name of the demo checkpoint's folder.
        help: the beginning of the flag's description.
    """

    kind: str
    demo_folder: str
    help: str


_FLAGS = {
    "--embedding-model": _ModelFlag(
        "embedding", "embed", "The folder of an embedding model's checkpoint."
    ),
    "--rerank-model": _ModelFlag(
        "rerank", "rerank", "The folder of a reranker's or classifier's checkpoint."
    ),
}


@dataclass(frozen=True)
class PoolingModel:
    """A pooling model that `nereid serve` serves.

    Attributes:
        kind: the name of the model in the model repository, "embedding" or "rerank".
        path: the folder of the checkpoint.
        name: the name of the model in the API.
    """

    kind: str
    path: Path
    name: str

    @property
    def example(self) -> tuple[str, dict[str, Any]]:
        """The path and the body of a request that this model can answer."""
        path, body = _EXAMPLES[self.kind]
        return path, {"model": self.name, **body}


def add_flags(group: "argparse._ArgumentGroup") -> None:
    """Add the flags for pooling models to a group of an argument parser."""
    for flag, (kind, folder, text) in _FLAGS.items():
        group.add_argument(
            flag,
            metavar="PATH",
            help=f"{text} The value none disables the model. The default is "
            f"demo/{folder} beside the model repository. [{_variable(kind, 'MODEL')}]",
        )


def choose_pooling_models(args: argparse.Namespace, repository: Path) -> list[PoolingModel]:
    """Return the pooling models to serve: an embedding model, a reranker, both or none.

    Args:
        args: the flags of `nereid serve`.
        repository: the folder of the model repository.

    Raises: CliError if a path is not a checkpoint, or if the model repository lacks the model.
    """
    checkpoints = {flag: _checkpoint_of(flag, args, repository) for flag in _FLAGS}
    return [
        _pooling_model(flag, checkpoint, repository)
        for flag, checkpoint in checkpoints.items()
        if checkpoint is not None
    ]


def _checkpoint_of(flag: str, args: argparse.Namespace, repository: Path) -> str | None:
    """Return the checkpoint that a flag or its environment variable selects. None means no model.

    If neither is set, return the demo checkpoint, unless the checkpoint or its model in the model
    repository does not exist. The value "none" selects no model.
    """
    kind, demo_folder, _ = _FLAGS[flag]
    attribute = flag.removeprefix("--").replace("-", "_")  # such as "embedding_model"
    value = getattr(args, attribute, None) or os.environ.get(_variable(kind, "MODEL"))
    if value:
        return None if value == NOT_SERVED else str(value)
    demo = repository.parent / "demo" / demo_folder
    has_demo = _has_model(repository, kind) and demo.is_dir()
    return str(demo) if has_demo else None


def _has_model(repository: Path, kind: str) -> bool:
    return (repository / kind / "config.pbtxt").is_file()


def _pooling_model(flag: str, checkpoint: str, repository: Path) -> PoolingModel:
    """Return the pooling model that `flag` selects. `checkpoint` is the value of the flag."""
    kind = _FLAGS[flag].kind
    if not _has_model(repository, kind):
        raise CliError(
            f"{flag} requires the file {kind}/config.pbtxt in the model repository, but "
            f"{repository} does not have it"
        )
    path = startup_checks.absolute_path(checkpoint, flag)
    check_checkpoint(path, source=flag)
    name = os.environ.get(_variable(kind, "SERVED_MODEL_NAME")) or path.resolve().name
    return PoolingModel(kind, path, name)


def environment(models: Sequence[PoolingModel]) -> dict[str, str]:
    """Return the environment variables that select the embedding and rerank checkpoints."""
    variables = {_variable(kind, "MODEL"): NOT_SERVED for kind, _, _ in _FLAGS.values()}
    for model in models:
        variables[_variable(model.kind, "MODEL")] = str(model.path)
        variables[_variable(model.kind, "SERVED_MODEL_NAME")] = model.name
    return variables


class PoolingWarmUp(threading.Thread):
    """A thread that sends requests to each pooling model until the model answers.

    Args:
        frontend: a client of the frontend.
        models: the pooling models.
        server_is_ready: an event that is set when the server is ready. The thread waits for this
            event, because the frontend would log each earlier request as a failure.

    Attributes:
        curls: for each model that has answered, a shell command with a request that works.
        failure: the reason why a model cannot answer, or None if no model has failed.
    """

    def __init__(
        self,
        frontend: FrontendClient,
        models: Sequence[PoolingModel],
        server_is_ready: threading.Event,
    ) -> None:
        super().__init__(daemon=True)
        self.curls: list[str] = []
        self.failure: str | None = None
        self._frontend = frontend
        self._models = list(models)
        self._server_is_ready = server_is_ready

    @property
    def is_done(self) -> bool:
        """Whether all models have answered."""
        return len(self.curls) == len(self._models)

    def run(self) -> None:
        """Send an example request to each model until the model answers.

        The models load at the same time, so this method can wait for one model after the other.

        Mutates: `curls` and `failure`, which are the results of this thread. For each model that
            succeeds, a shell command for its example request is added to `curls`. If a model
            cannot answer, `failure` becomes the reason, and the other models are not tested.
        """
        self._server_is_ready.wait()  # the warm-up of the language model sets this event
        for model in self._models:
            path, body = model.example
            answer = self._post_until_available(path, body)
            if not answer.is_success:
                self.failure = (
                    f"the model {model.name} cannot answer its first request: {answer.text}"
                )
                return
            self.curls.append(self._frontend.curl(path, body))

    def _post_until_available(self, path: str, body: dict[str, Any]) -> Answer:
        """Repeat a POST request while the model is unavailable, and return the final response."""
        answer = self._frontend.post(path, body)
        while answer.status in _UNAVAILABLE and not answer.is_success:
            time.sleep(_POLL_EVERY_S)
            answer = self._frontend.post(path, body)
        return answer


def _variable(kind: str, name: str) -> str:
    """Return an environment variable, such as NEREID_EMBEDDING_MODEL."""
    return f"NEREID_{kind.upper()}_{name}"
