# SPDX-License-Identifier: Apache-2.0
"""Nereid's engine, in process."""

import os
import time
from typing import Any

from nereid_backend import Engine, EngineConfig, SamplingParams
from workload import main, summary


class Nereid:
    """One engine; a prompt's cached prefix never helps, because every prompt is random."""

    def __init__(self, path: str, workload: dict[str, Any]) -> None:
        options: dict[str, Any] = json_options()
        self._engine = Engine(
            EngineConfig(path, dtype=workload["dtype"], num_threads=workload["threads"], **options)
        )

    def start(self, prompts: list[list[int]]) -> None:
        """See `Contestant`."""
        self.generate(prompts, 1)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        """See `Contestant`."""
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        outputs = self._engine.generate(prompts, params)
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)

    def mixed(self, plan: list[tuple[float, list[int], int]]) -> dict[str, Any]:
        """Requests at their times; seconds to first tokens and the rate."""
        engine, started, first, total = self._engine, time.perf_counter(), {}, 0
        waiting = list(enumerate(plan))
        while waiting or engine.has_work():
            now = time.perf_counter() - started
            while waiting and waiting[0][1][0] <= now:
                number, (_, prompt, num_tokens) = waiting.pop(0)
                params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
                engine.add_request(str(number), prompt, params)
            for update in engine.step():
                first.setdefault(update.request_id, time.perf_counter() - started)
                total += len(update.new_token_ids)
            if not engine.has_work() and waiting:
                time.sleep(max(0.0, waiting[0][1][0] - (time.perf_counter() - started)))
        waits = [first[str(number)] - at for number, (at, _, _) in enumerate(plan)]
        return summary(waits, total, time.perf_counter() - started)


def json_options() -> dict[str, Any]:
    """Engine settings to compare, as JSON in BENCH_ENGINE."""
    import json

    options: dict[str, Any] = json.loads(os.environ.get("BENCH_ENGINE", "{}"))
    return options


if __name__ == "__main__":
    main(Nereid)
