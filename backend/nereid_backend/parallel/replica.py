# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: prepares the settings and the GPUs of each engine process.

Each engine process has its own GPUs and loads the complete model. The engine processes do not
communicate with each other. The executor distributes the requests among them
(serving/executor/replica_selector.py).
"""

import os
from dataclasses import replace

import torch

from nereid_backend.config import EngineConfig
from nereid_backend.cpu_threads import usable_cpus
from nereid_backend.errors import ConfigError

_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def prepare_replica(config: EngineConfig, index: int) -> EngineConfig:
    """Assign some of the GPUs to this engine process, and return the settings of the process.

    With data parallelism, several engine processes load the same model, and each request is sent to
    one of them.

    Call this function before the process uses a GPU.

    Args:
        config: the settings of the server.
        index: the number of this engine process, from 0.

    Raises:
        ConfigError: if the machine has fewer GPUs than the processes need.
    """
    if config.data_parallel_size == 1:
        return config
    _restrict_gpus(config, index)
    return _settings_of_one_engine(config, index)


def _settings_of_one_engine(config: EngineConfig, index: int) -> EngineConfig:
    """Return the settings of the engine process with the number `index`.

    The CPUs and the disk space for the prefix cache are divided equally among the processes. Each
    process has a different random seed, so that equal requests without a seed get different
    outputs.
    """
    num_engines = config.data_parallel_size
    # The setting prefix_cache_disk_bytes can be a text, such as "10GiB". The property
    # `prefix_cache_disk_size` is the same setting as a number.
    total_disk_bytes = config.prefix_cache_disk_size
    # The size 0 is not a valid setting, so each process gets at least one byte.
    own_disk_bytes = max(1, total_disk_bytes // num_engines)
    return replace(
        config,
        # `_default_num_threads` divides the CPUs among the processes.
        num_threads=config.num_threads or _default_num_threads(config),
        prefix_cache_disk_bytes=own_disk_bytes,
        seed=config.seed + index,
    )


def _default_num_threads(config: EngineConfig) -> int:
    """Return the default number of CPU threads for each process."""
    num_engines = config.data_parallel_size
    if config.tensor_parallel_size > 1:
        num_processes = num_engines * config.tensor_parallel_size
        return max(1, usable_cpus() // num_processes)
    # One CPU is left for the server, as in a server with a single engine process.
    return max(1, (usable_cpus() - 1) // num_engines)


def _restrict_gpus(config: EngineConfig, index: int) -> None:
    """Hide the GPUs of the other engine processes. Do nothing if the model runs on the CPU."""
    # The CUDA driver reads CUDA_VISIBLE_DEVICES only once, so this function must set the variable
    # before the driver is loaded. `torch.cuda.device_count` does not load the driver, but
    # `torch.cuda.is_available` would load it.
    num_gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    if num_gpus == 0:
        return
    num_own = config.tensor_parallel_size  # the number of GPUs of each engine process
    num_needed = config.data_parallel_size * num_own
    if num_gpus < num_needed:
        note = f" of {num_own} GPUs each" if num_own > 1 else ""
        raise ConfigError(
            f"data_parallel_size: {config.data_parallel_size} engine processes{note} need "
            f"{num_needed} GPUs, but torch finds {num_gpus}. Lower data_parallel_size."
        )
    os.environ[_VISIBLE_GPUS] = own_gpus(os.environ.get(_VISIBLE_GPUS, ""), index, num_own)


def own_gpus(visible: str, index: int, num_own: int) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for an engine process.

    Example: `own_gpus("4,5,6,7", index=1, num_own=2)` returns "6,7".

    Args:
        visible: the value of CUDA_VISIBLE_DEVICES for the server; empty for all GPUs.
        index: the number of the engine process, from 0.
        num_own: the number of GPUs of each engine process.
    """
    first = index * num_own
    if visible:
        names = [name.strip() for name in visible.split(",")]
    else:
        names = [str(number) for number in range(first + num_own)]
    return ",".join(names[first : first + num_own])
