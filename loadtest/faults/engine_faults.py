"""Inject failures into the engine and its surroundings, and measure what the clients see.

    python -m loadtest.faults.engine_faults [--only WORD] [--markdown PATH]

The program prints three tables: forward passes that fail or hang in a serving process, damaged
checkpoints, and full disks. The folder faulty_python makes forward passes of the real processes
fail, and the module broken_checkpoints damages checkpoints. Full disks are small tmpfs file systems
in a mount namespace of this program. Mounting requires root; without root, the third table is left
out.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest import command_line
from loadtest.client.ask import Ask, Json, generate_stream
from loadtest.client.traffic import CHATS, Asker
from loadtest.faults.broken_checkpoints import run_checkpoints
from loadtest.faults.fault_rows import Fault, Row, measure, report
from loadtest.faults.full_disks import run_disks
from loadtest.server import processes
from loadtest.server.served import Served

_HANG_TIMEOUT_S = 3
_LATE_S = 5.0
_HERE = Path(__file__).resolve().parent
_DEMO = _HERE.parents[1] / "demo"
_FAULTY = str(_HERE / "faulty_python")
_ORDERS = "FAULT_FOLDER"
_MOUNTED = "--in-own-mounts"


@dataclass(frozen=True, kw_only=True)
class EngineFault(Fault):
    """A failure of the forward passes of one process. `role` is "engine" or "worker".

    Attributes:
        order: the line for faulty_python that selects the failure. If it is "", the memory of the
            process is limited instead.
        victim: a further request. It is sent when the fault is injected, while the other requests
            run.
    """

    order: str = ""
    victim: Ask | None = None
    settled_s: float = _LATE_S

    async def happen(self, served: Served) -> Sequence[Ask]:
        """Write the order, or limit the memory. Return the further request, if there is one."""
        if self.order:
            # The file is renamed, so that a process never reads half of an order.
            draft = self._file(served).with_name("draft")
            draft.write_text(self.order)
            draft.rename(self._file(served))
        else:
            # Every further allocation of the engine fails.
            size = processes.roles(served)["engine"].memory_info().vms
            _limit_memory(served, size)
        return () if self.victim is None else (self.victim,)

    def undo(self, served: Served) -> bool:
        """Delete the order. Return False if the order has caused no failure."""
        if not self.order:
            _limit_memory(served, resource.RLIM_INFINITY)
        try:
            self._file(served).unlink()
        except FileNotFoundError:
            return True
        return self.order.startswith("nan")  # this order stays until it is deleted

    def _file(self, served: Served) -> Path:
        return Path(served.environment[_ORDERS]) / self.role


def _limit_memory(served: Served, size: int) -> None:
    """Limit the address space of the engine to `size` bytes."""
    engine = processes.roles(served)["engine"]
    engine.rlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))


def _chat(kind: str, question: str, **fields: Any) -> Ask:  # noqa: ANN401 - JSON
    messages = [{"role": "user", "content": question}]
    body = {"model": "chat", "messages": messages, "temperature": 0}
    return Ask("openai", CHATS, body | fields, kind=kind)


def _openai(kind: str, path: str, **body: Any) -> Ask:  # noqa: ANN401 - JSON
    return Ask("openai", path, body, kind=kind)


def _schema(num_items: int) -> Json:
    items = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "array", "items": items, "minItems": num_items, "maxItems": num_items}
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}


def generating(num_tokens: int) -> list[Ask]:
    """Return requests with answers of about `num_tokens` tokens, and one embedding request."""
    long = {"max_tokens": num_tokens, "ignore_eos": True}
    schema = _schema(num_tokens * 3 // 7)  # an item has two tokens
    return [
        *(_chat("stream", f"What is {n} + 4?", stream=True, **long) for n in range(3)),
        _chat("whole answer", "Hello!", **long),
        _chat("structured stream", "Numbers!", stream=True, response_format=schema),
        generate_stream("Once", {"temperature": 0, **long}),
        _openai("embedding", "/v1/embeddings", model="embed", input=["Hugo", "Pinemark"]),
    ]


def embedding(num_texts: int) -> list[Ask]:
    """Return three requests of `num_texts` texts for the embedding model, and one chat stream."""
    words = "Hugo lives in Pinemark and has a turtle, which is older than he is. " * 6
    texts = [f"{n} {words}" for n in range(num_texts)]
    return [
        *(_openai("embedding", "/v1/embeddings", model="embed", input=texts) for _ in range(3)),
        _chat("stream", "Hello!", stream=True, max_tokens=300, ignore_eos=True),
    ]


def _last_id(name: str) -> int:
    """Return the last token id of a vocabulary. No ordinary text contains this token."""
    return int(json.loads((_DEMO / name / "config.json").read_text())["vocab_size"]) - 1


def faults() -> list[EngineFault]:
    """Return all failures of forward passes."""
    last, last_embed = _last_id("chat"), _last_id("embed")
    completion = _openai(
        "completion with it", "/v1/completions", model="chat", prompt=[last] * 3, max_tokens=5
    )
    vector = _openai("embedding with it", "/v1/embeddings", model="embed", input=[[last_embed] * 2])
    hang_s = _HANG_TIMEOUT_S + _LATE_S

    def engine(name: str, order: str, **more: Any) -> EngineFault:  # noqa: ANN401 - fields
        return EngineFault(name=f"engine: {name}", role="engine", order=order, **more)

    def worker(name: str, order: str, **more: Any) -> EngineFault:  # noqa: ANN401 - fields
        return EngineFault(name=f"pooling worker: {name}", role="worker", order=order, **more)

    hangs = {"name": f"hangs (limit {_HANG_TIMEOUT_S} s)", "order": "hang 1", "limit_s": hang_s}
    return [
        engine("out of memory in one step", "oom 1"),
        engine("out of memory in 3 steps in a row", "oom 3"),
        engine(
            "no page of memory left", "", victim=_chat("long prompt", "Hello! " * 400, max_tokens=4)
        ),
        engine("a CUDA error", "cuda 1"),
        engine("a NaN in one request's logits", f"nan {last}", victim=completion),
        engine("an exception in a grammar's mask", "mask 1"),
        engine("an exception in a grammar's step", "grammar 1"),
        engine(**hangs, settled_s=hang_s),
        worker("out of memory once", "oom 1"),
        worker("a CUDA error", "cuda 1"),
        worker("a NaN in one vector", f"nan {last_embed}", victim=vector),
        worker(**hangs, settled_s=hang_s),
    ]


async def measure_one(
    served: Served, asker: Asker, fault: EngineFault, num_texts: int = 1200, num_tokens: int = 700
) -> Row:
    """Inject one fault while the requests for its process run, and return the results.

    Args:
        served: the server, from `serve`.
        asker: the client.
        fault: the fault.
        num_texts: the number of texts in each request for the embedding model. The default of 1200
            texts takes a few seconds.
        num_tokens: the number of tokens of each answer of the language model. The default of 700
            tokens takes a few seconds.
    """
    if fault.role == "engine":
        probe = _chat("probe", "Hello!", max_tokens=2)
        return await measure(served, asker, fault, generating(num_tokens), probe)
    probe = _openai("probe", "/v1/embeddings", model="embed", input=["x"])
    return await measure(served, asker, fault, embedding(num_texts), probe)


def make_asker(served: Served, limit_s: float = 60.0) -> Asker:
    """Return a client of a server. `limit_s` is the time limit of a request in seconds."""
    return Asker(f"http://127.0.0.1:{served.openai_port}", served.http_url, limit_s=limit_s)


@contextlib.contextmanager
def serve() -> Iterator[Served]:
    """Start a server of the demo models. Orders can make its forward passes fail."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, (_FAULTY, os.environ.get("PYTHONPATH")))),
            _ORDERS: folder,
            "NEREID_ENGINE_HANG_TIMEOUT_S": str(_HANG_TIMEOUT_S),
            "NEREID_EMBEDDING_HANG_TIMEOUT_S": str(_HANG_TIMEOUT_S),
            "NEREID_RERANK_MODEL": "none",
        }
        flags = ["--served-model-name=chat", "--max-restarts=100", "--log-level=warning"]
        with Served(environment=environment, arguments=flags) as served:
            yield served


async def _measure_all(served: Served, chosen: Sequence[EngineFault]) -> list[Row]:
    asker = make_asker(served)
    rows = []
    try:
        for fault in chosen:
            rows.append(await measure_one(served, asker, fault))
            print(" | ".join(rows[-1].cells()), flush=True)
    finally:
        await asker.close()
    return rows


def run_faults(only: str) -> tuple[str, bool]:
    """Return the table of failed forward passes, and whether a limit was violated."""
    chosen = [fault for fault in faults() if only in fault.name]
    if not chosen:
        return "", False
    with serve() as served:
        rows = asyncio.run(_measure_all(served, chosen))
    return report(rows), any(row.is_broken for row in rows)


def _in_own_mounts() -> bool:
    """Return whether this program has its own mount namespace. Restart it with one if possible."""
    if _MOUNTED in sys.argv:
        return True
    command = ["unshare", "--mount", "--propagation", "private"]
    with contextlib.suppress(OSError):
        if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            os.execvp(command[0], [*command, sys.executable, *sys.argv, _MOUNTED])
    return False


def main() -> int:
    """Run all tests. Return 1 if a request hung, a service did not recover, or a check failed."""
    parser = command_line.parser(__doc__)
    parser.add_argument(
        "--only", default="", metavar="WORD", help="run only tests with WORD in their name"
    )
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    parser.add_argument(_MOUNTED, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    runs = [run_faults, run_checkpoints]
    if _in_own_mounts():
        runs.append(run_disks)
    else:
        print("The tests of full disks are left out, because they need root to mount a tmpfs.")
    found = [run(args.only) for run in runs]
    text = "\n\n".join(text for text, _ in found if text)
    print(f"\n{text}")
    if args.markdown:
        args.markdown.write_text(text + "\n")
    return int(any(is_broken for _, is_broken in found))


if __name__ == "__main__":
    sys.exit(main())
