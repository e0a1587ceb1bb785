# SPDX-License-Identifier: Apache-2.0
"""The group of processes that compute one model. A process of the group is called a rank.

The processes communicate through torch.distributed. GPUs use NCCL, and CPUs use gloo.
"""

import datetime
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from transformers.integrations import accelerate
from transformers.utils import logging as transformers_logging

from nereid_backend.errors import NereidError

# The longest time that a rank waits for the other ranks. The ranks read different parts of the
# weights, so one rank can take minutes longer than another rank.
_TIMEOUT = datetime.timedelta(minutes=30)

STARTED = "started"
"""The message that a rank sends to rank 0 when its process has started."""


def describe_failure(error: Exception) -> str:
    """Return the message that a rank sends to rank 0 when the sending rank has failed.

    Example: "failed: ValueError: a tensor is missing". The errors of the project itself are written
    for users, so their class is left out.
    """
    is_own_error = isinstance(error, NereidError)
    return f"failed: {error}" if is_own_error else f"failed: {type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a group.

    Attributes:
        number: the number of the process, from 0.
        size: the number of processes in the group.
        device_type: "cpu" or "cuda".
        store: the path of a file through which the processes find each other. The folder of the
            file contains no other files.
    """

    number: int
    size: int
    device_type: str
    store: str

    @property
    def device(self) -> torch.device:
        """The device of this process: the CPU, or the GPU with the index `number`."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, self.number)

    def join(self) -> None:
        """Add this process to the group of torch.distributed, and wait for all other processes.

        The processes of the group compute one model together and exchange the results of each
        layer. They find each other through a file (`store`).
        """
        is_on_gpu = self.device_type == "cuda"
        if is_on_gpu:
            torch.cuda.set_device(self.device)
        else:
            # All processes run on this machine, so they need only the loopback network interface.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "nccl" if is_on_gpu else "gloo",
            store=dist.FileStore(self.store, self.size),  # type: ignore[attr-defined]  # not in __all__
            rank=self.number,
            world_size=self.size,
            timeout=_TIMEOUT,
            device_id=self.device if is_on_gpu else None,
        )

    def remove_store(self) -> None:
        """Delete the folder of `store`, if it exists. The group cannot be used after this call."""
        shutil.rmtree(os.path.dirname(self.store), ignore_errors=True)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """In the `with` block, let transformers load only the part of a model for this rank.

        A rank is one of the processes that compute the model together. The caller must also pass a
        plan for tensor parallelism to transformers. Otherwise, transformers loads the whole model.
        """
        with (
            _without_warnings(),
            # transformers uses a device map that contains only the device of this rank. Such a map
            # does not need the library accelerate, but without this library, transformers refuses
            # every device map. Therefore, make transformers treat accelerate as installed.
            mock.patch.object(accelerate, "is_accelerate_available", return_value=True),
            # transformers reads the number of the rank from this environment variable.
            mock.patch.dict(os.environ, LOCAL_RANK=str(self.number)),
        ):
            yield

    def smallest(self, number: int) -> int:
        """Send `number` to all ranks, and return the smallest number that any rank has sent.

        Every rank must call this method, because the call waits for the numbers of all ranks.
        """
        tensor = torch.tensor([number], device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return int(tensor.item())


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Let transformers log only errors while the `with` block runs.

    transformers logs a warning for each rule of the plan that matches no layer. Such warnings are
    no problem, because some rules apply only to other variants of the architecture.
    """
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
