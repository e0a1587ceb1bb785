"""Tests that scores equal the scores of transformers and of sentence-transformers."""

import json
import random
import shlex
import subprocess
import sys

import numpy as np
import pytest
import torch
from backend.pooling.tiny import (
    BY_NAME,
    VOCABULARY,
    Family,
    add_modules,
    copy_of,
    save_tokenizer,
    text,
)
from nereid_backend import (
    ConfigError,
    ModelError,
    RequestError,
    Reranker,
)
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.pooling.pooling_engine import PoolingEngine
from nereid_backend.pooling.pooling_items import PoolingItem
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

HEADS = [
    ("bert", {}, "packed"),
    pytest.param("roberta", {}, "packed", marks=pytest.mark.long),
    pytest.param("xlm-roberta", {}, "packed", marks=pytest.mark.long),
    pytest.param("modernbert", {}, "packed", marks=pytest.mark.long),
    ("modernbert", {"classifier_pooling": "mean"}, "packed"),
    pytest.param("distilbert", {}, "packed", marks=pytest.mark.long),
    pytest.param("electra", {}, "packed", marks=pytest.mark.long),
    pytest.param("albert", {}, "padded", marks=pytest.mark.long),
    pytest.param("mpnet", {}, "padded", marks=pytest.mark.long),
    ("deberta-v2", {}, "padded"),
    pytest.param("qwen3", {}, "packed", marks=pytest.mark.long),
    pytest.param("llama", {}, "packed", marks=pytest.mark.long),
    ("gemma2, softcap and sliding window", {}, "packed"),
]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'query' %}query : {{ m.content }} "
    "{% elif m.role == 'document' %}no : {{ m.content }} {% else %}{{ m.content }} {% endif %}"
    "{% endfor %}yes :"
)
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m.role }} : {{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}yes :{% endif %}"
)


@pytest.fixture(scope="module")
def pairs():
    """Pairs of a query and a document. The queries and documents are random texts."""
    rng = random.Random(3)
    lengths = [(3, 40), (5, 5), (1, 90), (12, 1), (5, 5), (8, 17)]
    return [(text(rng, num_words), text(rng, num_others)) for num_words, num_others in lengths]


@pytest.mark.parametrize(("name", "config", "path"), HEADS, ids=lambda value: str(value))
def test_scores_equal_the_cross_encoders(name, config, path, encoder_of, pairs):
    folder = encoder_of(name, "sequence", num_labels=1, **config)
    reranker = Reranker(str(folder), num_threads=1)
    assert reranker.info.path == path
    reference = CrossEncoder(str(folder), device="cpu")
    expected = reference.predict(pairs)
    expected_logits = reference.predict(pairs, activation_fn=torch.nn.Identity())
    assert np.ptp(expected_logits) > 0.01

    logits = reranker.score(pairs, activation="none")
    scores = reranker.score(pairs)
    scores_of_single_pairs = np.concatenate([reranker.score([pair]) for pair in pairs])

    np.testing.assert_allclose(logits, expected_logits, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(scores_of_single_pairs, expected, rtol=0, atol=1e-5)


def test_scores_of_an_encoder_with_a_decoder_equal_the_cross_encoders(pairs, tmp_path):
    sizes = {
        f"{part}_{name}": number
        for part in ("encoder", "decoder")
        for name, number in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    }
    family = Family("bart", "bart", {"d_model": 48, "decoder_start_token_id": 2, **sizes})
    folder = family.save(tmp_path, "sequence", num_labels=1)
    expected = CrossEncoder(str(folder), device="cpu").predict(pairs)
    assert np.ptp(expected) > 0.01
    scores = Reranker(str(folder), num_threads=1).score(pairs)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)


def test_the_activation_is_the_one_that_the_checkpoint_names(encoder_of, pairs, tmp_path):
    folder = copy_of(encoder_of("bert", "sequence", num_labels=1), tmp_path)
    (folder / "sentence_bert_config.json").write_text(
        '{"transformer_task": "sequence-classification", "module_output_name": "scores", '
        '"modality_config": {"text": {"method": "forward", "method_output_name": "logits"}}}'
    )
    add_modules(folder, activation_fn="torch.nn.modules.linear.Identity", model_type="CrossEncoder")
    reranker = Reranker(str(folder), num_threads=1)
    assert reranker.info.activation == "none"
    expected = CrossEncoder(str(folder), device="cpu").predict(pairs)
    np.testing.assert_allclose(reranker.score(pairs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_score_from_the_pooled_vector_equals_the_cross_encoders(
    template, encoder_of, pairs, tmp_path
):
    folder = copy_of(encoder_of("bert"), tmp_path)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    torch.manual_seed(1)
    dense = Dense(48, 1, activation_function=torch.nn.Identity(), module_output_name="scores")
    modules = [Transformer(str(folder)), Pooling(48, "cls"), dense]
    CrossEncoder(modules=modules, device="cpu").save_pretrained(str(folder / "saved"))

    scores = Reranker(str(folder / "saved"), task="auto", num_threads=1).score(pairs)

    expected = CrossEncoder(str(folder / "saved"), device="cpu").predict(pairs)
    assert np.ptp(expected) > 0.01
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)


def save_with_template(folder, template):
    """Let sentence-transformers save a cross-encoder whose tokenizer has a chat template.

    sentence-transformers then adds the entry `message` to the settings, so that pairs are rendered.
    """
    (folder / "chat_template.jinja").write_text(template)
    CrossEncoder(str(folder), device="cpu").save_pretrained(str(folder / "saved"))
    settings = json.loads((folder / "saved" / "sentence_bert_config.json").read_text())
    assert "message" in settings["modality_config"]
    return str(folder / "saved")


@pytest.mark.parametrize("name", ["qwen3", "bert"])
@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace("m.content", "m.content[0].text")])
def test_a_head_renders_pairs_with_the_chat_template(name, template, encoder_of, pairs, tmp_path):
    folder = copy_of(encoder_of(name, "sequence", num_labels=1), tmp_path)
    folder = save_with_template(folder, template)
    reranker = Reranker(folder, num_threads=1, max_model_len=120)
    query, document = text(random.Random(1), 4), text(random.Random(2), 500)

    scores = reranker.score([*pairs, ("w1", ""), (query, document)], truncate=True)

    # The limit is 120 tokens. The query and the template need 10 of them.
    start_of_document = " ".join(document.split()[: 120 - 10])
    reference = CrossEncoder(folder, device="cpu")
    expected = reference.predict([*pairs, ("w1", ""), (query, start_of_document)])
    assert np.ptp(expected) > 0.01
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
    instructed = reranker.score(pairs, instruction="w7 w8")
    expected = reference.predict(pairs, prompt="w7 w8")
    np.testing.assert_allclose(instructed, expected, rtol=0, atol=1e-5)


def test_a_classifier_renders_single_texts_only_if_the_template_does(encoder_of, pairs, tmp_path):
    folder = copy_of(encoder_of("bert", "sequence", num_labels=3), tmp_path)
    folder = save_with_template(folder, TEMPLATE)
    engine = PoolingEngine(PoolingConfig(folder, num_threads=1), progress=lambda _: None)
    engine.add("a", [PoolingItem(pair=pair) for pair in pairs])
    engine.add("b", [PoolingItem(text="w1 w2")])
    results = []
    while engine.has_work():
        results += engine.step()
    values = {(result.request_id, result.index): result.value for result in results}
    reference = CrossEncoder(folder, device="cpu")
    expected = reference.predict([*pairs, "w1 w2"])
    keys = [*(("a", index) for index in range(len(pairs))), ("b", 0)]
    np.testing.assert_allclose([values[key] for key in keys], expected, rtol=0, atol=1e-5)

    only_pairs = TEMPLATE.replace("{% else %}{{ m.content }} ", "")
    (tmp_path / "saved" / "chat_template.jinja").write_text(only_pairs)
    engine = PoolingEngine(PoolingConfig(folder, num_threads=1), progress=lambda _: None)
    with pytest.raises(RequestError, match="renders only pairs of a query and a document"):
        engine.add("a", [PoolingItem(text="w1 w2")])


def test_the_files_of_a_head_can_select_one_of_several_templates(encoder_of, pairs, tmp_path):
    folder = copy_of(encoder_of("bert", "sequence", num_labels=1), tmp_path)
    folder = save_with_template(folder, TEMPLATE)
    (tmp_path / "saved" / "additional_chat_templates").mkdir()
    template = TEMPLATE.replace("query : ", "w3 ")
    (tmp_path / "saved" / "additional_chat_templates" / "pair.jinja").write_text(template)
    path = tmp_path / "saved" / "sentence_bert_config.json"
    settings = json.loads(path.read_text())
    settings["processing_kwargs"] = {"chat_template": {"chat_template": "pair"}}
    path.write_text(json.dumps(settings))

    scores = Reranker(folder, num_threads=1).score(pairs)

    expected = CrossEncoder(folder, device="cpu").predict(pairs)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)


def test_a_head_whose_template_leaves_out_pairs_is_refused(encoder_of, tmp_path):
    folder = copy_of(encoder_of("qwen3", "sequence", num_labels=1), tmp_path)
    folder = save_with_template(folder, TEMPLATE.replace("'document'", "'assistant'"))
    Reranker(folder)  # The template renders a message of the unknown role "document".
    (tmp_path / "saved" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    message = r"requires a chat template that renders messages of the roles query and document"
    with pytest.raises(ModelError, match=message):
        Reranker(folder)


def test_the_command_in_the_error_converts_the_pickle_files_of_a_reranker(
    encoder_of, pairs, tmp_path
):
    folder = str(copy_of(encoder_of("bert", "sequence", num_labels=1), tmp_path))
    expected = Reranker(folder, num_threads=1).score(pairs)
    weights = load_file(tmp_path / "model.safetensors")
    torch.save(weights, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="this command") as caught:
        Reranker(folder)

    # The message ends with the command that the user should run, for example "... the checkpoint:
    # python -m ...".
    _, _, command = str(caught.value).partition("checkpoint: ")
    _, *arguments = shlex.split(command)
    subprocess.run([sys.executable, *arguments], check=True)

    np.testing.assert_array_equal(Reranker(folder, num_threads=1).score(pairs), expected)


def test_a_classifier_gives_the_probabilities_of_its_labels(encoder_of, pairs):
    folder = encoder_of("bert", "sequence", num_labels=3)
    engine = PoolingEngine(PoolingConfig(str(folder), num_threads=1), progress=lambda _: None)
    assert (engine.info.task, engine.info.kinds) == ("classify", ("classify",))
    assert engine.info.labels == ("LABEL_0", "LABEL_1", "LABEL_2")

    engine.add("a", [PoolingItem(pair=pair) for pair in pairs])
    results = sorted(engine.step(), key=lambda result: result.index)

    probabilities = [result.value for result in results]
    expected = CrossEncoder(str(folder), device="cpu").predict(pairs, apply_softmax=True)
    np.testing.assert_allclose(probabilities, expected, rtol=0, atol=1e-5)
    with pytest.raises(ConfigError, match=r"requires a head with 1 label, but .* has 3"):
        Reranker(str(folder))


@pytest.mark.parametrize(
    ("problem_type", "activation"),
    [("multi_label_classification", "sigmoid"), ("regression", "none")],
)
def test_the_problem_type_of_a_classifier_selects_its_activation(
    problem_type, activation, encoder_of, tmp_path
):
    folder = copy_of(encoder_of("bert", "sequence", num_labels=3), tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"problem_type": problem_type}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    engine = PoolingEngine(PoolingConfig(str(folder), num_threads=1), progress=lambda _: None)
    assert engine.info.activation == activation

    engine.add("a", [PoolingItem(text="w1 w2 w3")])
    (result,) = engine.step()

    classify = pipeline("text-classification", model=str(folder), top_k=None)
    scores = {item["label"]: item["score"] for item in classify(["w1 w2 w3"])[0]}
    expected = [scores[label] for label in engine.info.labels]
    np.testing.assert_allclose(result.value, expected, rtol=0, atol=1e-5)


def yes_probabilities(folder, prompts):
    """Let transformers compute the probability of "yes" instead of "no" after each prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    differences = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
            logits = model(ids).logits[0, -1]
            differences.append(logits[VOCABULARY.index("yes")] - logits[VOCABULARY.index("no")])
    return torch.stack(differences).sigmoid().numpy()


@pytest.fixture(scope="module")
def save_reranker(tmp_path_factory):
    """A function that saves a generative reranker with a chat template, and returns its folder."""

    def make(template):
        folder = BY_NAME["qwen3"].save(tmp_path_factory.mktemp("judge"), "causal")
        save_tokenizer(folder, types=False, starts=False, template=template)
        return folder

    return make


def test_a_generative_checkpoint_scores_with_its_template(save_reranker, pairs):
    folder = save_reranker(TEMPLATE)
    scores = Reranker(str(folder), num_threads=1).score(pairs)
    expected = CrossEncoder(str(folder), device="cpu").predict(pairs)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
    prompts = [f"query : {query} no : {document} yes :" for query, document in pairs]
    np.testing.assert_allclose(scores, yes_probabilities(folder, prompts), rtol=0, atol=1e-5)


def test_an_instruction_is_part_of_the_prompt_of_a_generative_reranker(save_reranker, pairs):
    folder = save_reranker(TEMPLATE)
    scores = Reranker(str(folder), num_threads=1).score(pairs, instruction="w7 w8")
    prompts = [f"w7 w8 query : {query} no : {document} yes :" for query, document in pairs]
    np.testing.assert_allclose(scores, yes_probabilities(folder, prompts), rtol=0, atol=1e-5)


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_beginning_of_a_huge_document_is_kept_by_a_generative_reranker(
    save_reranker, tmp_path, side
):
    folder = copy_of(save_reranker(TEMPLATE), tmp_path)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"truncation_side": side}))
    reranker = Reranker(str(folder), num_threads=1)
    huge_text = "w3 w4 " * 100 + "w5 w6 " * 100_000

    score = reranker.score([("w1", huge_text)], truncate=True)

    # The limit is 128 tokens. The first 1200 characters contain 400 words, so the prompt cannot
    # contain words after them.
    expected = reranker.score([("w1", huge_text[:1200])], truncate=True)
    np.testing.assert_allclose(score, expected)
    with pytest.raises(RequestError, match="instruction: the instruction has at least"):
        reranker.score([("w1", "w2")], instruction=huge_text, truncate=True)


def test_a_template_without_pair_roles_gets_the_documented_wording(save_reranker, pairs):
    folder = save_reranker(PLAIN_TEMPLATE)
    short_pairs = [(query, document) for query, document in pairs if len(document.split()) < 50]
    scores = Reranker(str(folder), num_threads=1).score(short_pairs, instruction="w1")
    system = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".'
    )
    questions = [
        f"<Instruct>: w1\n<Query>: {query}\n<Document>: {document}"
        for query, document in short_pairs
    ]
    prompts = [f"system : {system} </s> user : {question} </s> yes :" for question in questions]
    np.testing.assert_allclose(scores, yes_probabilities(folder, prompts), rtol=0, atol=1e-5)


def test_a_template_without_system_messages_gets_the_task_in_the_user_message(save_reranker):
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    folder = save_reranker(refusal + PLAIN_TEMPLATE)
    scores = Reranker(str(folder), num_threads=1).score([("w1", "w2 w3")], instruction="w4")
    prompt = (
        "user : Judge whether the Document meets the requirements based on the Query and the "
        'Instruct provided. Note that the answer can only be "yes" or "no".\n\n'
        "<Instruct>: w4\n<Query>: w1\n<Document>: w2 w3 </s> yes :"
    )
    np.testing.assert_allclose(scores, yes_probabilities(folder, [prompt]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("template", [TEMPLATE, PLAIN_TEMPLATE])
def test_a_template_may_expect_lists_of_parts(template, save_reranker):
    pairs = [("w1", "w2 w3"), ("w1", "w4")]
    expected = Reranker(str(save_reranker(template)), num_threads=1).score(pairs)
    parts_template = template.replace("m.content", "m.content[0].text")
    scores = Reranker(str(save_reranker(parts_template)), num_threads=1).score(pairs)
    assert np.ptp(expected) > 1e-4
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-6)


def test_a_template_that_leaves_out_the_content_is_refused(save_reranker):
    folder = save_reranker("{% for m in messages %}{{ m.role }}{% endfor %}")
    with pytest.raises(ModelError, match="the template of this checkpoint leaves out"):
        Reranker(str(folder))


@pytest.mark.timeout(60)
def test_a_template_that_never_ends_is_refused_instead_of_blocking_the_start(save_reranker):
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
    with pytest.raises(ModelError, match="the template of this checkpoint leaves out"):
        Reranker(str(save_reranker(loops + TEMPLATE)))
    with pytest.raises(ModelError, match="the chat template cannot be used"):
        Reranker(str(save_reranker("{% for m in messages %}")))


def test_an_input_that_the_template_refuses_is_an_error_of_the_request(save_reranker):
    refusal = "{% if 'w9' in messages[-1].content %}{{ raise_exception('no w9') }}{% endif %}"
    reranker = Reranker(str(save_reranker(refusal + TEMPLATE)), num_threads=1)
    reranker.score([("w1", "w2")])
    with pytest.raises(RequestError, match=r"chat template cannot render this input: .*no w9"):
        reranker.score([("w1", "w9")])


def copy_with_answers(save_reranker, target, template=None):
    """Copy a checkpoint with `template` to `target`, and add files of sentence-transformers.

    The files declare which tokens are the answers "true" and "false".
    """
    folder = copy_of(save_reranker(template), target)
    module = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    answers = {"true_token_id": 12, "false_token_id": 40}
    add_modules(folder, (module, "1_LogitScore", answers), model_type="CrossEncoder")
    settings = {
        "transformer_task": "text-generation",
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
        "module_output_name": "causal_logits",
        "processing_kwargs": {"text": {"logits_to_keep": 1}},
    }
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_answers_that_the_files_name_are_used_as_sentence_transformers_does(
    template, save_reranker, pairs, tmp_path
):
    # The files exclude messages, so a template is not used.
    folder = copy_with_answers(save_reranker, tmp_path, template)
    pairs = [*pairs, ("w1 w2", "")]

    scores = Reranker(str(folder), task="auto", num_threads=1).score(pairs)

    expected = CrossEncoder(str(folder), device="cpu").predict(pairs)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)


def test_an_instruction_is_refused_if_the_pairs_have_no_prompt(save_reranker, tmp_path):
    reranker = Reranker(str(copy_with_answers(save_reranker, tmp_path)), num_threads=1)
    with pytest.raises(RequestError, match="requires a reranker whose prompts contain"):
        reranker.score([("w1", "w2")], instruction="w3")


def test_a_long_document_is_truncated_and_the_text_after_it_stays(save_reranker):
    reranker = Reranker(str(save_reranker(TEMPLATE)), num_threads=1)
    rng = random.Random(1)
    query, document = text(rng, 4), text(rng, 500)
    with pytest.raises(RequestError, match="has 510 tokens, but the limit is 128"):
        reranker.score([(query, document)])
    score = reranker.score([(query, document)], truncate=True)
    # The limit is 128 tokens. The query and the template need 10 of them.
    start_of_document = " ".join(document.split()[: 128 - 10])
    np.testing.assert_allclose(score, reranker.score([(query, start_of_document)]), atol=1e-5)


def test_an_empty_document_after_a_query_that_is_too_long_still_counts_as_a_document(encoder_of):
    folder = str(encoder_of("bert", "sequence", num_labels=1))
    pairs = [(text(random.Random(1), 200), "")]
    score = Reranker(folder, num_threads=1).score(pairs, truncate=True)
    expected = CrossEncoder(folder, device="cpu").predict(pairs)
    np.testing.assert_allclose(score, expected, rtol=0, atol=1e-5)


def test_reranking_without_a_head_is_refused_with_the_reason(encoder_of):
    with pytest.raises(ConfigError, match="answers yes or no, but this one has BertModel"):
        Reranker(str(encoder_of("bert")))


def test_a_generative_checkpoint_without_a_task_is_refused_with_the_remedy(encoder_of):
    folder = str(encoder_of("llama", "causal"))
    with pytest.raises(ConfigError, match=r"Set task=embed .* or task=rerank"):
        PoolingEngine(PoolingConfig(folder), progress=lambda _: None)


def test_a_head_without_weights_is_refused(encoder_of, tmp_path):
    folder = copy_of(encoder_of("bert"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["BertForSequenceClassification"],
        "id2label": {"0": "L"},
        "label2id": {"L": 0},
    }
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    message = "lacks 2 weights that the task rerank needs, such as classifier"
    with pytest.raises(ModelError, match=message):
        Reranker(str(folder))
