"""A fake `PoolingBackend` whose vectors and scores are simple functions of the text."""

import asyncio
import itertools
import json
import sys

import numpy as np
from nereid_client.embeddings.pooling_backend import PoolingOutputs
from nereid_client.errors import BackendError

DIMENSION = 4
LIMIT = 12  # the longest input, in characters, because each character is a token


class FakePooling:
    """A fake backend with an embedding model and a reranker, which is also a classifier.

    The vector of a text consists of the text's length and the codes of its first three characters.
    The score of a document is the share of the query's words that occur in the document.

    Attributes:
        calls: all calls, in order.
        missing: the names of the models that are not served.
        down: the names of the models whose calls fail with the status UNAVAILABLE.
        unconfigured: the names of the models that are in the model repository, but have no
            checkpoint.
        kinds: the kinds of output of each model.
        labels: the labels of the classifier.
        prompts: the embedding model's prompts: name -> text.
        cancelled: the ids of the calls that were cancelled.
        delay_s: the duration of a call, in seconds.
    """

    def __init__(self):
        self.calls = []
        self.missing = set()
        self.down = set()
        self.unconfigured = set()
        self.kinds = {
            "embedding": ["dense", "sparse", "multi_vector"],
            "rerank": ["score", "classify"],
        }
        self.prompts = {"query": "question: ", "document": "", "clustering": "topic: "}
        self.labels = ["no", "yes"]
        self.cancelled = []
        self.delay_s = 0.0
        self.is_closed = False

    async def close(self):
        self.is_closed = True

    async def infer(self, call):
        """Answer a call, or fail as the attributes demand."""
        if call.model in self.missing:
            raise BackendError("NOT_FOUND", f"the Triton server has no model {call.model!r}")
        if call.model in self.down:
            raise BackendError("UNAVAILABLE", "the worker is being started again; try again")
        if "return_info" in call.tensors:
            return PoolingOutputs({}, {"info": [json.dumps(self._info(call.model))]})
        self.calls.append(call)
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled.append(call.request_id)
            raise
        return self._rerank(call) if call.model == "rerank" else self._embed(call)

    def _info(self, model):
        """Return the description of a model, as a worker sends it to the frontend."""
        if model in self.unconfigured:
            return {"task": "none", "reason": f"no checkpoint is served as {model!r}"}
        name = {"embedding": "tiny-embed", "rerank": "tiny-rerank"}[model]
        return {
            "name": name,
            "task": model,
            "kinds": self.kinds[model],
            "dimension": DIMENSION,
            "max_model_len": LIMIT,
            "labels": self.labels,
            "prompts": self.prompts,
        }

    def _embed(self, call):
        """Return the vectors or the sparse weights of the texts, depending on the option `kind`."""
        texts = _texts(call)
        dimensions = call.options.get("dimensions") or DIMENSION
        _check_limits(call, texts, dimensions)
        num_tokens = np.array([min(len(text), LIMIT) for text in texts], dtype=np.int32)
        kind = call.options.get("kind") or self.kinds["embedding"][0]
        if kind == "sparse":
            rows = [json.dumps({"indices": [len(text)], "values": [0.5]}) for text in texts]
            return PoolingOutputs({"num_tokens": num_tokens}, {"sparse": rows})
        if kind == "multi_vector":  # one vector for each token
            vectors = np.ones((int(num_tokens.sum()), DIMENSION), dtype=np.float32)
            arrays = {"embeddings": vectors, "num_vectors": num_tokens, "num_tokens": num_tokens}
            return PoolingOutputs(arrays, {})
        vectors = np.array([vector(text)[:dimensions] for text in texts], dtype=np.float32)
        if call.options.get("normalize"):
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return PoolingOutputs({"embeddings": vectors, "num_tokens": num_tokens}, {})

    def _rerank(self, call):
        """Score documents for a query. If the call has the tensor `texts`, classify the texts."""
        if "texts" in call.tensors:
            classify = token_labels if self.kinds["rerank"] == ["token_classify"] else text_labels
            return classify(call.tensors["texts"])
        queries = list(call.tensors["query"])
        documents = _texts(call) if "parts" in call.tensors else call.tensors["documents"]
        if len(queries) == 1:
            queries *= len(documents)
        scores = [relevance(q, d) for q, d in zip(queries, documents, strict=True)]
        if call.options.get("activation") == "none":
            scores = [10 * score for score in scores]
        num_tokens = np.array([len(d) for d in documents], dtype=np.int32)
        arrays = {"scores": np.array(scores, dtype=np.float32), "num_tokens": num_tokens}
        return PoolingOutputs(arrays, {})


def vector(text):
    """Return the length of a text and the codes of its first three characters."""
    return [float(len(text)), *(float(ord(c)) for c in (text + "   ")[:3])]


def relevance(query, document):
    """Return the share of the query's words that the document contains."""
    words = query.lower().split()
    return sum(word in document.lower().split() for word in words) / max(len(words), 1)


def text_labels(texts):
    """Return the probabilities of two labels: the second one is the share of the letter `y`."""
    rows = np.array([[1 - share(t), share(t)] for t in texts], dtype=np.float32)
    num_tokens = np.array([len(text) for text in texts], dtype=np.int32)
    return PoolingOutputs({"probabilities": rows, "num_tokens": num_tokens}, {})


def token_labels(texts):
    """Return the probabilities of two labels for each token of the texts.

    Each character is a token. The letter `y` has the second label with probability 0.75, and for
    all other characters both labels have the probability 0.5. A special token without characters
    precedes each text.
    """
    rows, offsets = [], []
    for text in texts:
        rows += [[1.0, 0.0], *([0.25, 0.75] if c == "y" else [0.5, 0.5] for c in text)]
        offsets += [[0, 0], *([i, i + 1] for i in range(len(text)))]
    num_tokens = np.array([1 + len(text) for text in texts], dtype=np.int32)
    arrays = {"probabilities": np.array(rows, dtype=np.float32), "num_tokens": num_tokens}
    return PoolingOutputs({**arrays, "offsets": np.array(offsets, dtype=np.int32)}, {})


def share(text):
    """Return which share of a text's characters is the letter `y`."""
    return text.count("y") / len(text)


def _check_limits(call, texts, dimensions):
    """Raise a BackendError if the dimensions or a text are above the model's limits."""
    if dimensions > DIMENSION:
        message = f"dimensions: must be from 1 to {DIMENSION}, got {dimensions}"
        raise BackendError("INVALID_ARGUMENT", message)
    field = next(name for name in ("texts", "input_ids", "parts") if name in call.tensors)
    for index, text in enumerate(texts):
        if len(text) > LIMIT and not call.options.get("truncate"):
            message = f"{field}: element {index}: has {len(text)} tokens; the limit is {LIMIT}"
            raise BackendError("INVALID_ARGUMENT", message)


def _texts(call):
    """Return the input texts of a call. Each token id is the code of a character."""
    if "parts" in call.tensors:
        return [json.loads(part).get("text", "image") for part in call.tensors["parts"]]
    if "input_ids" in call.tensors:
        characters = iter(chr(int(i) % sys.maxunicode) for i in call.tensors["input_ids"])
        return ["".join(itertools.islice(characters, n)) for n in call.tensors["input_lengths"]]
    return call.tensors["texts"]
