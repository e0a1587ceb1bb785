"""The embedding model and the reranker that `nereid serve` serves beside the language model."""

import argparse
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereid_client.console import CliError
from nereid_client.supervise import startup_checks as checks
from nereid_client.supervise.warmup import Frontend

NOT_SERVED = "none"
_POLL_EVERY_S = 0.1
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
_FLAGS = {
    "--embedding-model": ("embedding", "embed", "an embedding model, in the same layout"),
    "--rerank-model": ("rerank", "rerank", "a reranker or classifier, in the same layout"),
}


@dataclass(frozen=True)
class Pooler:
    """A pooling model that will be served.

    Attributes:
        kind: its name in the model repository.
        path: its checkpoint.
        name: its name in the API.
    """

    kind: str
    path: Path
    name: str

    @property
    def example(self) -> tuple[str, dict[str, Any]]:
        """Path and body of a request that it answers."""
        path, body = _EXAMPLES[self.kind]
        return path, {"model": self.name, **body}


def add_flags(group: "argparse._ArgumentGroup") -> None:
    """Add the flags of the pooling models."""
    for flag, (kind, folder, text) in _FLAGS.items():
        group.add_argument(
            flag,
            metavar="PATH",
            help=f"{text}; none: not served (default: demo/{folder} beside the model repository) "
            f"[{_variable(kind, 'MODEL')}]",
        )


def choose(args: argparse.Namespace, repository: Path) -> list[Pooler]:
    """The pooling models to serve: by flag, else by environment variable, else the demo's.

    Raises: CliError: what was given is no checkpoint, or the repository has no such model.
    """
    found = []
    for flag, (kind, folder, _) in _FLAGS.items():
        given = getattr(args, flag.removeprefix("--").replace("-", "_"), None)
        given = given or os.environ.get(_variable(kind, "MODEL"))
        has_model = (repository / kind / "config.pbtxt").is_file()
        path = Path(given) if given else repository.parent / "demo" / folder
        if given == NOT_SERVED or (not given and not (has_model and path.is_dir())):
            continue
        if not has_model:
            raise CliError(f"{flag}: {repository} has no {kind}/config.pbtxt to serve it with")
        path = path.expanduser().absolute()
        try:
            checks.check_checkpoint(path)
        except CliError as error:
            raise CliError(str(error).replace("--model", flag, 1)) from None
        name = os.environ.get(_variable(kind, "SERVED_MODEL_NAME")) or path.resolve().name
        found.append(Pooler(kind, path, name))
    return found


def environment(poolers: Sequence[Pooler]) -> dict[str, str]:
    """What the servers are told of both kinds."""
    told = {_variable(kind, "MODEL"): NOT_SERVED for kind, _, _ in _FLAGS.values()}
    for pooler in poolers:
        told[_variable(pooler.kind, "MODEL")] = str(pooler.path)
        told[_variable(pooler.kind, "SERVED_MODEL_NAME")] = pooler.name
    return told


class PoolerWarmUp(threading.Thread):
    """Asks each pooling model until it answers.

    Attributes:
        curls: a command that works, for each model that has answered, in order.
        failure: why one never will.
    """

    def __init__(self, frontend: Frontend, poolers: Sequence[Pooler]) -> None:
        super().__init__(daemon=True)
        self.curls: list[str] = []
        self.failure: str | None = None
        self._frontend = frontend
        self._poolers = list(poolers)

    @property
    def is_done(self) -> bool:
        """Whether all of them answer."""
        return len(self.curls) == len(self._poolers)

    def run(self) -> None:
        """Poll one after the other; they load side by side."""
        # Asked before the server listens, the frontend would log each question as a failure.
        while self._frontend.get_status("/health/ready") != 200:
            time.sleep(_POLL_EVERY_S)
        for pooler in self._poolers:
            path, body = pooler.example
            status, text = self._frontend.post(path, body)
            # 404: the Triton server does not know the model before it is loaded.
            while status in (None, 404, 429, 503):
                time.sleep(_POLL_EVERY_S)
                status, text = self._frontend.post(path, body)
            if status != 200:
                self.failure = f"the model {pooler.name} can't answer: {text}"
                return
            self.curls.append(self._frontend.curl(path, body))


def _variable(kind: str, name: str) -> str:
    return f"NEREID_{kind.upper()}_{name}"
