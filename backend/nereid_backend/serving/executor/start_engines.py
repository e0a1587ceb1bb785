# SPDX-License-Identifier: Apache-2.0
"""Starts the engine processes of the executor."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

from nereid_backend.config import EngineConfig
from nereid_backend.serving.process.process_handle import ChildProgram, Limit
from nereid_backend.serving.process.supervised_process import SupervisedProcess
from nereid_backend.serving.serving_settings import ServingSettings


def start_engines(settings: ServingSettings, config: EngineConfig) -> list[SupervisedProcess]:
    """Start the engine processes, and wait until their models are loaded.

    The first process is started alone, so that only one process reports a wrong checkpoint or a
    wrong setting. When the first process has loaded its model, all other processes are started in
    parallel. The other processes read the weights from the kernel's page cache.

    Raises:
        EngineError: loading failed or took too long. The message gives the reason.
    """
    first_process = _start_engine(settings, config, 0)
    # The `with` block ends only when all processes have started or failed.
    with ThreadPoolExecutor(config.data_parallel_size) as pool:
        starts = [
            pool.submit(_start_engine, settings, config, index)
            for index in range(1, config.data_parallel_size)
        ]
    errors = [error for start in starts if (error := start.exception()) is not None]
    started = [start.result() for start in starts if start.exception() is None]
    processes = [first_process, *started]
    if errors:
        # The model needs all its processes. If one of them has failed to start, stop all other
        # processes, so that no process continues to run.
        for process in processes:
            process.stop()
        raise errors[0]
    return processes


def _start_engine(settings: ServingSettings, config: EngineConfig, index: int) -> SupervisedProcess:
    """Start the engine process with the number `index`, and wait until its model is loaded."""
    is_only = config.data_parallel_size == 1
    title = "engine" if is_only else f"engine {index}"
    log_prefix = "" if is_only else f"{title}: "
    program = ChildProgram(
        name="engine",
        title=title,
        module=settings.engine_module,
        settings={"replica": index, **dataclasses.asdict(config)},
        start_timeout=Limit("engine_start_timeout_s", settings.engine_start_timeout_s),
        hang_timeout=Limit("engine_hang_timeout_s", settings.engine_hang_timeout_s),
        max_restarts=Limit("max_engine_restarts", settings.max_engine_restarts),
    )
    return SupervisedProcess.start(program, index, log_prefix)
