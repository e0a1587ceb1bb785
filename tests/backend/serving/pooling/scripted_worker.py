"""A worker process with a fake engine, which returns the lengths of texts.

The process does not import torch, so it starts quickly.
"""

import os
import time
from dataclasses import dataclass

import numpy as np
from nereid_backend.errors import CapacityError, EngineError, RequestError
from nereid_backend.pooling.pooling_items import PoolingResult
from nereid_backend.serving.pooling.pooling_worker import serve_worker

DIMENSION = 128


@dataclass
class Info:
    model: str
    task: str = "embed"
    kinds: tuple = ("dense", "sparse", "multi_vector")
    device: str = "cpu"
    max_model_len: int = 128
    max_token_bytes: int = 16


class LengthEngine:
    """A fake engine. The vector of a text begins with the length of the text.

    Some texts have special effects: "bad", "odd" and "full" are refused, each with another error;
    "nan" has no result; "slow" takes a second; and "die" ends the process.
    """

    def __init__(self, dimension=2, per_step=4):
        self.dimension, self.per_step = dimension, per_step
        self.waiting, self.most_waiting, self.aborted = {}, 0, []

    def add(self, request_id, items):
        for index, item in enumerate(items):
            if item.text == "bad":
                raise RequestError(f"input {index}: input: has no tokens")
            if item.text == "full":
                raise CapacityError("too many inputs wait")
            if item.text == "odd":
                raise ZeroDivisionError("a bug in a tokenizer")
            if item.dimensions == 0:
                raise RequestError("input 0: dimensions: must be from 1 to 4, got 0")
        self.waiting[request_id] = list(enumerate(items))
        self.most_waiting = max(self.most_waiting, sum(map(len, self.waiting.values())))

    def abort(self, request_id):
        self.aborted.append(request_id)
        self.waiting.pop(request_id, None)

    def has_work(self):
        return bool(self.waiting)

    def step(self):
        results = []
        for request_id in list(self.waiting)[: self.per_step]:
            # The real engine sorts inputs by length, so results are not in the order of the inputs.
            index, item = self.waiting[request_id].pop()
            results.append(self._result(request_id, index, item.text))
            if not self.waiting[request_id]:
                del self.waiting[request_id]
        return results

    def _result(self, request_id, index, text):
        if text == "slow":
            time.sleep(1.0)
        if text == "die":
            raise EngineError("the script says so")
        if text == "nan":
            error = "the model gave no finite numbers"
            return PoolingResult(request_id, index, None, len(text), error)
        vector = np.ones(self.dimension, dtype=np.float32)
        vector[0] = len(text)
        return PoolingResult(request_id, index, vector, len(text), None)


def make_engine(config, progress):
    if os.path.exists(os.path.join(config.model, "broken")):
        raise EngineError(f"the file {config.model}/broken makes loading fail")
    engine = LengthEngine(DIMENSION, per_step=1000)
    engine.info = Info(config.model)
    return engine


if __name__ == "__main__":
    serve_worker(make_engine)
