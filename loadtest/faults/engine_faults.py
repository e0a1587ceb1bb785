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

import psutil

from loadtest import command_line
from loadtest.client.ask import Ask, Json, generate_stream
from loadtest.client.traffic import CHATS, COMPLETIONS, Asker
from loadtest.faults.broken_checkpoints import run_checkpoints
from loadtest.faults.fault_rows import HEAD, Fault, Row, Section, make_asker, measure
from loadtest.faults.full_disks import run_disks
from loadtest.server import processes
from loadtest.server.served import Served

_HANG_TIMEOUT_S = 3
_LATE_S = 5.0
_HERE = Path(__file__).resolve().parent
_DEMO = _HERE.parents[1] / "demo"
_FAULTY = str(_HERE / "faulty_python")
_FOLDER_VARIABLE = "FAULT_FOLDER"
_IN_OWN_MOUNTS = "--in-own-mounts"


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
            order_file = self._order_file(served)
            # The file is renamed after it is written, so no process reads an incomplete file.
            draft = order_file.with_name("draft")
            draft.write_text(self.order)
            draft.rename(order_file)
        else:
            # With a limit of the current size, every further allocation of the engine fails.
            engine = processes.roles(served)["engine"]
            _limit_memory(engine, engine.memory_info().vms)
        return () if self.victim is None else (self.victim,)

    def undo(self, served: Served) -> bool:
        """Remove the limit or the order. Return False if the order has caused no failure."""
        if not self.order:
            _limit_memory(processes.roles(served)["engine"], resource.RLIM_INFINITY)
        try:
            self._order_file(served).unlink()
        except FileNotFoundError:  # the process has deleted the order after the last failure
            return True
        return self.order.startswith("nan")  # only this order stays until it is deleted

    def _order_file(self, served: Served) -> Path:
        return Path(served.environment[_FOLDER_VARIABLE]) / self.role


def _limit_memory(process: psutil.Process, size: int) -> None:
    """Limit the address space of a process to `size` bytes."""
    process.rlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))


def _chat(kind: str, question: str, **fields: Any) -> Ask:  # noqa: ANN401 - JSON
    messages = [{"role": "user", "content": question}]
    body = {"model": "chat", "messages": messages, "temperature": 0}
    return Ask("openai", CHATS, body | fields, kind=kind)


def _openai(kind: str, path: str, **body: Any) -> Ask:  # noqa: ANN401 - JSON
    return Ask("openai", path, body, kind=kind)


def _array_of_digits(num_items: int) -> Json:
    """Return the `response_format` of a JSON array with `num_items` digits."""
    items = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "array", "items": items, "minItems": num_items, "maxItems": num_items}
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}


def generating(num_tokens: int) -> list[Ask]:
    """Return requests with answers of about `num_tokens` tokens, and one embedding request."""
    long = {"max_tokens": num_tokens, "ignore_eos": True}
    # An item and its comma are two tokens, so the array has about 6/7 of `num_tokens` tokens.
    schema = _array_of_digits(num_items=num_tokens * 3 // 7)
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
    # Only the requests with these tokens get NaN.
    token, embed_token = _last_id("chat"), _last_id("embed")
    completion_fields = {"model": "chat", "prompt": [token] * 3, "max_tokens": 5}
    completion = _openai("completion with the token", COMPLETIONS, **completion_fields)
    embedding_fields = {"model": "embed", "input": [[embed_token] * 2]}
    vector = _openai("embedding with the token", "/v1/embeddings", **embedding_fields)
    long_prompt = _chat("long prompt", "Hello! " * 400, max_tokens=4)
    hang_s = _HANG_TIMEOUT_S + _LATE_S
    hang = {"order": "hang 1", "limit_s": hang_s, "settled_s": hang_s}
    hang_name = f"hangs (limit {_HANG_TIMEOUT_S} s)"
    return [
        _engine("out of memory in one step", order="oom 1"),
        _engine("out of memory in 3 steps in a row", order="oom 3"),
        _engine("no page of memory left", victim=long_prompt),
        _engine("a CUDA error", order="cuda 1"),
        _engine("a NaN in one request's logits", order=f"nan {token}", victim=completion),
        _engine("an exception in a grammar's mask", order="mask 1"),
        _engine("an exception in a grammar's step", order="grammar 1"),
        _engine(hang_name, **hang),
        _worker("out of memory once", order="oom 1"),
        _worker("a CUDA error", order="cuda 1"),
        _worker("a NaN in one vector", order=f"nan {embed_token}", victim=vector),
        _worker(hang_name, **hang),
    ]


def _engine(name: str, **fields: Any) -> EngineFault:  # noqa: ANN401 - the attributes
    return EngineFault(name=f"engine: {name}", role="engine", **fields)


def _worker(name: str, **fields: Any) -> EngineFault:  # noqa: ANN401 - the attributes
    return EngineFault(name=f"pooling worker: {name}", role="worker", **fields)


async def measure_one(
    served: Served, asker: Asker, fault: EngineFault, num_texts: int = 1200, num_tokens: int = 700
) -> Row:
    """Inject one fault while the requests for its process run, and return the results.

    With `num_texts` texts or `num_tokens` tokens, each of the requests takes some seconds.
    """
    if fault.role == "engine":
        probe = _chat("probe", "Hello!", max_tokens=2)
        return await measure(served, asker, fault, generating(num_tokens), probe)
    probe = _openai("probe", "/v1/embeddings", model="embed", input=["x"])
    return await measure(served, asker, fault, embedding(num_texts), probe)


@contextlib.contextmanager
def serve() -> Iterator[Served]:
    """Start a server of the demo models. Orders can make forward passes of the server fail."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, (_FAULTY, os.environ.get("PYTHONPATH")))),
            _FOLDER_VARIABLE: folder,
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


def run_faults(only: str) -> Section:
    """Inject each fault whose name contains `only`, and return the table of the results.

    The section is marked as broken if a fault violates a limit.
    """
    chosen = [fault for fault in faults() if only in fault.name]
    if not chosen:
        return Section("", is_broken=False)
    with serve() as served:
        rows = asyncio.run(_measure_all(served, chosen))
    return Section.of(HEAD, [row.cells() for row in rows], any(row.is_broken for row in rows))


def _enter_own_mounts() -> bool:
    """Restart this program in a mount namespace of its own.

    Returns:
        True in the restarted program. False if the namespace cannot be created.
    """
    if _IN_OWN_MOUNTS in sys.argv:
        return True
    command = ["unshare", "--mount", "--propagation", "private"]
    with contextlib.suppress(OSError):
        if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            os.execvp(command[0], [*command, *sys.orig_argv, _IN_OWN_MOUNTS])
    return False


def main() -> int:
    """Run all tests. Return 1 if a request hung, a service did not recover, or a check failed."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    add("--only", default="", metavar="WORD", help="run only tests with WORD in their name")
    add("--markdown", type=Path, help="also write the tables to this file")
    add(_IN_OWN_MOUNTS, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    tests = [run_faults, run_checkpoints]
    if _enter_own_mounts():
        tests.append(run_disks)
    else:
        print("The tests of full disks are left out, because they need root to mount a tmpfs.")
    sections = [run(args.only) for run in tests]
    command_line.print_report("\n\n".join(one.text for one in sections if one.text), args.markdown)
    return int(any(section.is_broken for section in sections))


if __name__ == "__main__":
    sys.exit(main())
