"""Tests of `/predict` and `/pooling` with a model that classifies each token."""

import numpy as np
import pytest
from nereid_client.embeddings.token_labels import labelled_groups, labelled_tokens

pytestmark = pytest.mark.anyio

LABELS = ["O", "B-LOC", "I-LOC", "B-PER"]
TEXT = "in New York Rome Bo"
OFFSETS = np.array([[0, 0], [0, 2], [3, 6], [6, 11], [12, 16], [17, 19], [0, 0]])
# The index of the best label of each token. The last token is a special token, but has a label.
BEST = [0, 0, 1, 2, 1, 3, 1]


def probabilities(best=BEST, score=0.7):
    rows = np.full((len(best), len(LABELS)), 0.1, dtype=np.float32)
    rows[np.arange(len(best)), best] = score
    return rows


@pytest.fixture
def tagger(pooling):
    """A backend whose model classifies each character. The letter `y` has the label `B-Y`."""
    pooling.kinds["rerank"] = ["token_classify"]
    pooling.labels = ["O", "B-Y"]
    return pooling


def test_neighbouring_tokens_with_one_label_are_a_group():
    entities = labelled_groups(TEXT, probabilities(), OFFSETS, LABELS)
    fields = ("entity_group", "word", "start", "end")
    assert [tuple(entity[field] for field in fields) for entity in entities] == [
        ("LOC", "New York", 3, 11),
        ("LOC", "Rome", 12, 16),
        ("PER", "Bo", 17, 19),
    ]
    assert entities[0]["score"] == pytest.approx(0.7)


def test_a_label_without_a_prefix_continues_its_group():
    rows = np.array([[0.2, 0.8], [0.4, 0.6], [0.9, 0.1]], dtype=np.float32)
    entities = labelled_groups("ab cd e", rows, np.array([[0, 2], [2, 5], [5, 7]]), ["O", "N-X"])
    assert [(entity["entity_group"], entity["word"]) for entity in entities] == [("N-X", "ab cd")]


def test_the_space_before_a_group_is_left_out():
    rows = np.array([[0.2, 0.8]], dtype=np.float32)
    (entity,) = labelled_groups("in Rome", rows, np.array([[2, 7]]), ["O", "LOC"])
    assert (entity["word"], entity["start"], entity["end"]) == ("Rome", 3, 7)


def test_each_labelled_token_has_its_index():
    entities = labelled_tokens(TEXT, probabilities(), OFFSETS, LABELS)
    assert [(entity["entity"], entity["index"], entity["word"]) for entity in entities] == [
        ("B-LOC", 2, "New"),
        ("I-LOC", 3, " York"),
        ("B-LOC", 4, "Rome"),
        ("B-PER", 5, "Bo"),
    ]


@pytest.mark.usefixtures("tagger")
async def test_predict_returns_the_labelled_parts_of_each_text(ask):
    part = {"entity_group": "Y", "score": 0.75, "word": "y", "start": 1, "end": 2}
    assert (await ask("/predict", inputs="ay")).json() == [part]
    assert (await ask("/predict", inputs=[["ay"], ["b"]])).json() == [[part], []]
    token = {"entity": "B-Y", "score": 0.75, "index": 2, "word": "y", "start": 1, "end": 2}
    answer = await ask("/predict", inputs="ay", aggregation_strategy="none")
    assert answer.json() == [token]
    # The library huggingface_hub sends aggregation_strategy inside `parameters`.
    answer = await ask("/predict", inputs="ay", parameters={"aggregation_strategy": "none"})
    assert answer.json() == [token]


@pytest.mark.usefixtures("tagger")
@pytest.mark.parametrize("task", [{"task": "token_classify"}, {}])
async def test_pooling_returns_the_probabilities_of_each_token(ask, task):
    answer = (await ask("/pooling", model="tiny-rerank", input=["ay", "b"], **task)).json()
    assert [row["data"] for row in answer["data"]] == [
        [[1.0, 0.0], [0.5, 0.5], [0.25, 0.75]],
        [[1.0, 0.0], [0.5, 0.5]],
    ]
    assert answer["usage"]["prompt_tokens"] == 5


async def test_pooling_returns_the_probabilities_of_a_text(ask, pooling):
    answer = (await ask("/pooling", input=["yyyn"], task="classify", use_activation=False)).json()
    assert answer["data"] == [{"index": 0, "object": "pooling", "data": [0.25, 0.75]}]
    assert pooling.calls[-1].options["activation"] == "none"


@pytest.mark.usefixtures("tagger")
@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/classify", {"input": "a"}, "It can compute: the probabilities of labels for each token"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "cannot compute scores of pairs of texts"),
        (
            "/pooling",
            {"input": [1, 2], "task": "token_classify"},
            "A classifier requires a text or a list",
        ),
        ("/pooling", {"input": "a", "task": "classify"}, "cannot compute the probabilities of"),
        ("/predict", {"inputs": "a", "aggregation_strategy": "max"}, "aggregation_strategy must"),
    ],
)
async def test_other_requests_are_refused(ask, path, body, message):
    response = await ask(path, **body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


async def test_a_classifier_of_whole_texts_aggregates_nothing(ask):
    response = await ask("/predict", inputs="a", aggregation_strategy="simple")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "aggregation_strategy"
