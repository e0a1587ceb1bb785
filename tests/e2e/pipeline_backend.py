"""A backend for the frontend that runs the steps of Nereid's ensemble in the test's process."""

import numpy as np
import pytest
from backend.serving.pipeline import Pipeline
from fakes.fake_backend import FakeBackend
from nereid_backend.errors import NereidError
from nereid_client.language_model.server_errors import read_error


class PipelineBackend(FakeBackend):
    """A backend that runs a checkpoint's tokenizer, a scripted engine, and the postprocessor.

    Args:
        model: the folder of the checkpoint.
        script: the rules of the scripted engine: which prompt receives which answer.
        folder: an empty folder for the script.
        settings: settings of the model repository, such as `parser_policy="strict"`.
    """

    def __init__(self, model, script, folder, **settings):
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        self._pipeline = Pipeline(model, script, folder, self._patch, **settings)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._patch.undo()

    async def generate(self, generation):
        """Yield the deltas of a streamed chat. Other requests are not supported."""
        inputs = {
            "chat_request": np.array([generation.chat_request.encode()], dtype=np.object_),
            "stream": np.array([True]),
        }
        try:
            replies = self._pipeline.ask(**inputs)
        except NereidError as error:
            raise read_error(str(error)) from None
        for reply in replies:
            for delta in filter(None, reply["delta"]):
                yield delta
