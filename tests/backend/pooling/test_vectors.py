"""Tests of dense modules, dimensions, prompts, sparse vectors, multi-vectors and images."""

import json
import random
import re

import numpy as np
import pytest
import torch
from backend.pooling.tiny import (
    NORMALIZE,
    VOCABULARY,
    Family,
    add_modules,
    copy_of,
    pooling,
    text,
)
from backend.pooling.tiny_images import picture, png, save_towers
from nereid_backend import Embedder, ModelError, RequestError, UnsupportedModelError
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.pooling.pooling_engine import PoolingEngine
from nereid_backend.pooling.pooling_items import PoolingItem
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPModel,
)

DENSE = "sentence_transformers.base.modules.dense.Dense"
SPLADE = (
    "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling",
    "1_Splade",
    {"pooling_strategy": "max"},
)


def add_dense(folder, path, in_features, out_features, **config):
    """Write the weights of a dense module. Return its class, path and config for `add_modules`."""
    (folder / path).mkdir()
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(out_features, in_features, generator=generator) * 0.2
    bias = torch.randn(out_features, generator=generator)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / path / "model.safetensors")
    settings = {"in_features": in_features, "out_features": out_features, "bias": True, **config}
    return (DENSE, path, settings)


def results_of(folder, items, **settings):
    """Return the values that a pooling engine computes for `items`, in the order of `items`."""
    config = PoolingConfig(str(folder), num_threads=1, **settings)
    engine = PoolingEngine(config, progress=lambda _: None)
    engine.add("a", items)
    results = []
    while engine.has_work():
        results += engine.step()
    assert [result.error for result in results] == [None] * len(items)
    return [result.value for result in sorted(results, key=lambda result: result.index)]


@pytest.mark.parametrize(
    "activation", ["torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"]
)
def test_dense_modules_equal_those_of_sentence_transformers(
    activation, encoder_of, texts, tmp_path
):
    folder = copy_of(encoder_of("bert"), tmp_path)
    dense = add_dense(folder, "2_Dense", 48, 20, activation_function=activation)
    add_modules(folder, pooling("mean"), dense, (NORMALIZE[0], "3_Normalize", {}))
    embedder = Embedder(str(folder), num_threads=1)
    vectors = embedder.encode(texts)
    assert embedder.info.dimension == vectors.shape[1] == 20
    expected = SentenceTransformer(str(folder), device="cpu").encode(texts)
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("in_features", "factor", "message"),
    [(32, 1, "do not fit these vectors .*48"), (48, float("nan"), "numbers that are not finite")],
)
def test_a_dense_module_that_fails_in_each_request_is_refused_when_it_is_loaded(
    in_features, factor, message, encoder_of, tmp_path
):
    folder = copy_of(encoder_of("bert"), tmp_path)
    dense = add_dense(folder, "2_Dense", in_features, 20)
    file = folder / "2_Dense" / "model.safetensors"
    save_file({name: weight * factor for name, weight in load_file(file).items()}, file)
    add_modules(folder, pooling("mean"), dense)
    with pytest.raises(ModelError, match=message):
        Embedder(str(folder))


def test_a_sparse_layer_of_a_wrong_size_is_refused_when_it_is_loaded(lexical_folder):
    folder, _ = lexical_folder
    torch.save(torch.nn.Linear(48, 2).state_dict(), folder / "sparse_linear.pt")
    with pytest.raises(ModelError, match="the layers that compute sparse output"):
        Embedder(str(folder))


@pytest.mark.parametrize(
    "name", ["os.system", "torch.nn.modules.missing.Tanh2", "torch.nn.Linear", "torch.nn.Module."]
)
def test_an_activation_that_is_no_module_without_arguments_is_refused(name, encoder_of, tmp_path):
    folder = copy_of(encoder_of("bert"), tmp_path)
    dense = add_dense(folder, "2_Dense", 48, 20, activation_function=name)
    add_modules(folder, pooling("mean"), dense)
    with pytest.raises(UnsupportedModelError, match=rf"{re.escape(name)} is not supported"):
        Embedder(str(folder))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            (DENSE, "2_Dense", {"module_output_name": "scores"}),
            "they are sentence_embedding and scores",
        ),
        (
            ("sentence_transformers.models.LSTM", "2_LSTM", {}),
            "the module LSTM is not supported",
        ),
        (
            ("custom_st.Normalize", "2_Normalize", {}),
            "the module custom_st.Normalize is Python code of the checkpoint",
        ),
    ],
    ids=["another output", "another kind", "code of the checkpoint"],
)
def test_modules_that_are_not_run_are_refused_by_name(module, message, encoder_of, tmp_path):
    folder = copy_of(encoder_of("bert"), tmp_path)
    add_modules(folder, pooling("mean"), module)
    with pytest.raises(UnsupportedModelError, match=message):
        Embedder(str(folder))


def test_a_tokenizer_without_a_vocabulary_is_refused(encoder_of, tmp_path):
    folder = copy_of(encoder_of("bert"), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    with pytest.raises(ModelError, match=r"has no tokenizer\.json and no other file"):
        Embedder(str(folder))


def test_a_token_without_an_embedding_is_an_error_of_its_text(encoder_of, tmp_path):
    folder = copy_of(encoder_of("bert"), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<extra>"])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()  # The files are links to the files of another test.
    tokenizer.save_pretrained(folder)
    embedder = Embedder(str(folder), num_threads=1)
    message = f"converts '<extra>' to the token id {len(VOCABULARY)}, but the model has embeddings"
    with pytest.raises(RequestError, match=message):
        embedder.encode(["w1", "w1 <extra> w2"])
    assert embedder.encode("w1").shape == (1, 48)


def test_a_length_limit_of_a_tokenizer_that_is_no_number_is_refused(encoder_of, tmp_path):
    file = copy_of(encoder_of("bert"), tmp_path) / "tokenizer_config.json"
    content = json.loads(file.read_text())
    file.unlink()  # The file is a link to the file of another test.
    file.write_text(json.dumps(content | {"model_max_length": "512"}))
    with pytest.raises(ModelError, match="model_max_length of the tokenizer must be a number"):
        Embedder(str(tmp_path))


@pytest.mark.parametrize("name", ["bert", "qwen3"])
@pytest.mark.parametrize("include_prompt", [True, False])
def test_an_embedder_renders_texts_with_the_chat_template(
    name, include_prompt, encoder_of, texts, tmp_path
):
    folder = copy_of(encoder_of(name), tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }} : {{ m.content }} </s> {% endfor %}{{ task }} :"
    )
    mode = "mean" if name == "bert" else "lasttoken"
    # Without files of sentence-transformers, the library uses the chat template and writes the
    # entry `message`.
    modules = [Transformer(str(folder)), Pooling(48, mode)]
    model = SentenceTransformer(modules=modules, device="cpu")
    model[1].include_prompt = include_prompt
    model.prompts = {"query": "w7 w8"}
    model.save_pretrained(str(folder / "saved"))
    reference = SentenceTransformer(str(folder / "saved"), device="cpu")
    embedder = Embedder(str(folder / "saved"), num_threads=1, max_model_len=120)

    vectors = embedder.encode(texts, normalize=False)
    queries = embedder.encode(texts, normalize=False, prompt_name="query")
    (vector,) = embedder.encode(text(random.Random(1), 200), normalize=False, truncate=True)

    np.testing.assert_allclose(vectors, reference.encode(texts), rtol=1e-4, atol=1e-5)
    expected = reference.encode_query(texts)
    np.testing.assert_allclose(queries, expected, rtol=1e-4, atol=1e-5)
    # The limit is 120 tokens. The template needs 4 of them.
    start_of_text = text(random.Random(1), 120 - 4)
    np.testing.assert_allclose(vector, reference.encode(start_of_text), rtol=1e-4, atol=1e-5)


def test_an_embedder_without_the_chat_template_that_its_files_require_is_refused(
    encoder_of, tmp_path
):
    folder = add_modules(copy_of(encoder_of("bert"), tmp_path), pooling("mean"))
    (folder / "sentence_bert_config.json").write_text(
        '{"modality_config": {"message": {"format": "flat"}}}'
    )
    with pytest.raises(ModelError, match="messages of the role user, but the checkpoint has no"):
        Embedder(str(folder))


def test_vectors_with_different_dimensions_in_one_batch_are_truncated_and_then_normalised(
    encoder_of, texts
):
    folder = encoder_of("qwen3")
    whole_vectors = Embedder(str(folder), num_threads=1).encode(texts, normalize=False)
    # By default (None), a vector has all dimensions and is normalised.
    all_dimensions = [None, 8, 1, 48, 20, 8, None, 3]
    all_normalize = [True, None, None, False, True, False, None, True]
    options = list(zip(all_dimensions, all_normalize, strict=True))

    vectors = results_of(
        folder,
        [
            PoolingItem(text=text, dimensions=dimensions, normalize=normalize)
            for text, (dimensions, normalize) in zip(texts, options, strict=True)
        ],
    )

    rows = zip(vectors, whole_vectors, options, strict=True)
    for vector, whole_vector, (dimensions, normalize) in rows:
        expected = whole_vector[:dimensions]
        if normalize is not False:
            expected = expected / np.linalg.norm(expected)
        np.testing.assert_allclose(vector, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["mean", "weightedmean"])
@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts_equal_those_of_sentence_transformers(
    include_prompt, mode, encoder_of, texts, tmp_path
):
    prompts = {"query": "query : ", "document": ""}
    folder = add_modules(
        copy_of(encoder_of("bert"), tmp_path),
        pooling(mode, include_prompt=include_prompt),
        prompts=prompts,
        default_prompt_name="query",
    )
    embedder = Embedder(str(folder), num_threads=1)
    assert embedder.info.prompts == prompts
    reference = SentenceTransformer(str(folder), device="cpu")
    for options in ({}, {"prompt_name": "document"}, {"prompt": "w1 w2 "}):
        vectors = embedder.encode(texts, **options)
        expected = reference.encode(texts, **options)
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)
    message = r"has no prompt 'qury'\. Its prompts are: query, document"
    with pytest.raises(RequestError, match=message):
        embedder.encode("w1", prompt_name="qury")


@pytest.mark.parametrize(
    "config", [{"pooling_strategy": "mean"}, {"activation_function": "log1p_gelu"}]
)
def test_an_unknown_setting_of_a_splade_module_is_refused(config, encoder_of, tmp_path):
    folder = copy_of(encoder_of("bert", "masked"), tmp_path)
    add_modules(folder, (*SPLADE[:2], config), model_type="SparseEncoder")
    (value,) = config.values()
    with pytest.raises(UnsupportedModelError, match=f"{value}.*strategies max and sum"):
        Embedder(str(folder))


def test_no_special_tokens_are_added_to_token_ids(encoder_of, texts):
    folder = encoder_of("roberta")
    embedder = Embedder(str(folder), num_threads=1)
    ids = AutoTokenizer.from_pretrained(folder)(texts)["input_ids"]
    np.testing.assert_allclose(embedder.encode(ids), embedder.encode(texts), atol=1e-6)
    np.testing.assert_allclose(embedder.encode(ids[1]), embedder.encode(texts[1]), atol=1e-5)


def test_splade_vectors_equal_those_of_sentence_transformers(encoder_of, texts):
    folder = encoder_of("bert", "masked")
    embedder = Embedder(str(folder), pooling="splade", num_threads=1)
    expected = SparseEncoder(str(folder), device="cpu").encode(
        texts, convert_to_sparse_tensor=False
    )
    for weights, row in zip(embedder.encode_sparse(texts), expected.numpy(), strict=True):
        assert (row > 0).any()
        dense_weights = np.zeros(len(VOCABULARY), dtype=np.float32)
        dense_weights[list(weights)] = list(weights.values())
        np.testing.assert_allclose(dense_weights, row, rtol=0, atol=1e-5)


def test_the_head_of_longformer_computes_splade_vectors(texts, tmp_path):
    # This head reads a field of the base model's output that other heads do not read.
    folder = Family("longformer", "longformer", {"attention_window": 16}).save(tmp_path, "masked")
    weights = Embedder(str(folder), pooling="splade", num_threads=1).encode_sparse(texts[:1])
    model = AutoModelForMaskedLM.from_pretrained(folder)
    inputs = AutoTokenizer.from_pretrained(folder)(texts[0], return_tensors="pt")
    with torch.inference_mode():
        expected = model(**inputs).logits[0].relu().log1p().amax(0)
    assert_sparse_vectors_equal(weights, expected[None].numpy())


@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_the_settings_of_saved_splade_modules_are_used(
    strategy, activation, encoder_of, texts, tmp_path
):
    folder = copy_of(encoder_of("distilbert", "masked"), tmp_path)
    config = {"pooling_strategy": strategy, "activation_function": activation}
    add_modules(folder, (*SPLADE[:2], config), model_type="SparseEncoder")
    settings = {
        "transformer_task": "fill-mask",
        "module_output_name": "token_embeddings",
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    }
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))

    vectors = results_of(folder, [PoolingItem(text=each) for each in texts])

    model = SparseEncoder(str(folder), device="cpu")
    expected = model.encode(texts, convert_to_sparse_tensor=False).numpy()
    assert_sparse_vectors_equal(vectors, expected)


def assert_sparse_vectors_equal(vectors, expected):
    """Check that sparse vectors equal dense rows.

    A sparse vector is a dict from token ids to weights, such as {7: 0.5}. A dense row has a number
    for each token id.
    """
    for weights, row in zip(vectors, expected, strict=True):
        np.testing.assert_allclose(
            [weights[token_id] for token_id in sorted(weights)], row[row > 0], atol=1e-4
        )


@pytest.mark.parametrize("limit", [5, 10**6])
def test_a_splade_model_returns_at_most_the_number_of_weights_in_its_files(
    limit, encoder_of, texts, tmp_path
):
    folder = copy_of(encoder_of("bert", "masked"), tmp_path)
    model = SparseEncoder(str(folder), device="cpu", max_active_dims=limit)
    expected = model.encode(texts, convert_to_sparse_tensor=False).numpy()
    add_modules(folder, SPLADE, max_active_dims=limit)
    assert_sparse_vectors_equal(
        results_of(folder, [PoolingItem(text=each) for each in texts]), expected
    )


def test_vectors_have_the_length_in_the_checkpoints_files_unless_a_request_has_another(
    encoder_of, texts, tmp_path
):
    folder = add_modules(copy_of(encoder_of("bert"), tmp_path), pooling("mean"), truncate_dim=16)
    expected = SentenceTransformer(str(folder), device="cpu").encode(texts)
    embedder = Embedder(str(folder), num_threads=1)
    np.testing.assert_allclose(embedder.encode(texts), expected, rtol=0, atol=1e-4)
    assert embedder.encode(texts[0], dimensions=40).shape == (1, 40)


@pytest.mark.parametrize("activation", ["activation.PReLU", "activation.RReLU", "dropout.Dropout"])
def test_activations_with_weights_or_random_numbers_equal_those_of_sentence_transformers(
    activation, encoder_of, texts, tmp_path
):
    folder = copy_of(encoder_of("bert"), tmp_path)
    class_name = f"torch.nn.modules.{activation}"
    dense = add_dense(folder, "2_Dense", 48, 8, activation_function=class_name)
    if activation == "activation.PReLU":
        file = folder / "2_Dense" / "model.safetensors"
        save_file(load_file(file) | {"activation_function.weight": torch.tensor([0.75])}, file)
    add_modules(folder, pooling("mean"), dense)
    expected = SentenceTransformer(str(folder), device="cpu").encode(texts)
    vectors = Embedder(str(folder), num_threads=1).encode(texts)
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-4)


def test_a_dense_module_for_token_vectors_after_the_pooling_has_no_effect(
    encoder_of, texts, tmp_path
):
    folder = copy_of(encoder_of("bert"), tmp_path)
    dense = add_dense(folder, "2_Dense", 48, 8, module_input_name="token_embeddings")
    add_modules(folder, pooling("mean"), dense)
    expected = SentenceTransformer(str(folder), device="cpu").encode(texts)
    vectors = Embedder(str(folder), num_threads=1).encode(texts)
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"modality_config": {"text": {"method_output_name": "pooler_output"}}},
            "modality_config selects the output 'pooler_output'",
        ),
        (
            {"processing_kwargs": {"text": {"add_special_tokens": False}}},
            "the argument add_special_tokens of the tokenizer",
        ),
    ],
)
def test_settings_of_sentence_transformers_that_would_change_the_vectors_are_refused(
    settings, message, encoder_of, tmp_path
):
    folder = add_modules(copy_of(encoder_of("bert"), tmp_path), pooling("mean"))
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModelError, match=message):
        Embedder(str(folder))


@pytest.mark.parametrize(
    "names", [("config_args", "tokenizer_args"), ("config_kwargs", "processor_kwargs")]
)
def test_arguments_for_the_config_and_the_tokenizer_are_used_as_in_sentence_transformers(
    names, encoder_of, texts, tmp_path
):
    folder = add_modules(copy_of(encoder_of("bert"), tmp_path), pooling("mean"))
    config_arguments = {"num_hidden_layers": 1, "revision": "main", "trust_remote_code": True}
    settings = {names[0]: config_arguments, names[1]: {"model_max_length": 8}}
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20} | settings))
    expected = SentenceTransformer(str(folder), device="cpu").encode(texts)
    embedder = Embedder(str(folder), num_threads=1)
    vectors = embedder.encode(texts, truncate=True)
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("file", "settings", "limit"),
    [
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {"max_length": 9}}}, 9),
        ("tokenizer_config.json", {"model_max_length": 9.0}, 9),
    ],
)
def test_the_length_limit_in_the_checkpoints_files_may_have_several_forms(
    file, settings, limit, encoder_of, tmp_path
):
    folder = add_modules(copy_of(encoder_of("bert"), tmp_path), pooling("mean"))
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.unlink(missing_ok=True)
    path.write_text(json.dumps(content | settings))
    assert Embedder(str(folder), num_threads=1).info.max_model_len == limit


@pytest.fixture
def lexical_folder(encoder_of, tmp_path):
    """The folder of a checkpoint with the files of BGE-M3, and the two layers in these files.

    The layers compute the sparse vectors and the multi-vectors.
    """
    folder = copy_of(encoder_of("xlm-roberta"), tmp_path)
    add_modules(folder, pooling("cls"), NORMALIZE)
    torch.manual_seed(2)
    layers = {}
    for name, size in (("sparse_linear", 1), ("colbert_linear", 48)):
        layers[name] = torch.nn.Linear(48, size)
        torch.save(layers[name].state_dict(), folder / f"{name}.pt")
    return folder, layers


@torch.no_grad()
def test_dense_sparse_and_multi_vectors_of_one_model_in_one_batch(lexical_folder, texts):
    folder, layers = lexical_folder
    model = AutoModel.from_pretrained(folder, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    kinds = ("dense", "sparse", "multi_vector")

    values = results_of(folder, [PoolingItem(kind, text=each) for each in texts for kind in kinds])

    for index, one_text in enumerate(texts):
        inputs = tokenizer(one_text, return_tensors="pt")
        hidden = model(**inputs).last_hidden_state[0]
        dense, sparse, multi_vector = values[3 * index : 3 * index + 3]
        expected_dense = torch.nn.functional.normalize(hidden[0], dim=-1)
        np.testing.assert_allclose(dense, expected_dense.numpy(), atol=1e-5)
        scores = layers["sparse_linear"](hidden).relu().squeeze(-1).tolist()
        expected_sparse = largest_scores(inputs.input_ids[0].tolist(), scores)
        assert sparse == pytest.approx(expected_sparse, abs=1e-5)
        projected = layers["colbert_linear"](hidden[1:])
        expected_vectors = torch.nn.functional.normalize(projected, dim=-1)
        np.testing.assert_allclose(multi_vector, expected_vectors.numpy(), atol=1e-5)


def largest_scores(ids, scores):
    """Return the largest score of each token. Leave out special tokens and tokens with score 0."""
    largest = {}
    for token_id, score in zip(ids, scores, strict=True):
        if token_id > 3 and score > 0:
            largest[token_id] = max(score, largest.get(token_id, 0.0))
    return largest


def test_a_linear_layer_that_is_no_tensor_file_is_refused(lexical_folder):
    folder, _ = lexical_folder
    (folder / "sparse_linear.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ModelError, match=r"sparse_linear\.pt cannot be read"):
        Embedder(str(folder))


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    """The folder of a tiny CLIP checkpoint."""
    return save_towers(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def clip(clip_folder):
    """An embedder of texts and images. Its image process needs 3 s for the import of torch."""
    return Embedder(str(clip_folder), num_threads=1)


def test_a_dense_module_after_two_towers_is_refused_instead_of_ignored(clip_folder, tmp_path):
    folder = copy_of(clip_folder, tmp_path)
    size = json.loads((folder / "config.json").read_text())["projection_dim"]
    add_modules(folder, add_dense(folder, "1_Dense", size, 20))
    with pytest.raises(UnsupportedModelError, match="the module Dense is not supported after"):
        Embedder(str(folder))


def test_vectors_of_texts_and_images_equal_those_of_transformers(clip, clip_folder):
    rng = random.Random(0)
    short, medium, one_word, long = (text(rng, num_words) for num_words in (3, 20, 1, 60))
    square, wide = picture(1), picture(2, (64, 33))
    assert clip.info.accepts_images

    inputs = [
        short,
        {"image": png(square)},
        {"text": medium},
        one_word,
        long,
        {"image": png(wide)},
    ]
    vectors = clip.encode(inputs, normalize=False)

    model = CLIPModel.from_pretrained(clip_folder, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(clip_folder)
    processor = CLIPImageProcessor.from_pretrained(clip_folder)

    def text_vector(text):
        return model.get_text_features(**tokenizer(text, return_tensors="pt")).pooler_output[0]

    def image_vector(image):
        pixels = processor(images=image, return_tensors="pt").pixel_values
        return model.get_image_features(pixels).pooler_output[0]

    with torch.inference_mode():
        expected = [
            text_vector(short),
            image_vector(square),
            text_vector(medium),
            text_vector(one_word),
            text_vector(long),
            image_vector(wide),
        ]
    np.testing.assert_allclose(vectors, torch.stack(expected).numpy(), rtol=0, atol=1e-4)


def test_a_broken_image_is_an_error_and_the_next_one_works(clip):
    image = png(picture(3))
    for data, problem in (
        (b"", "the file is not an image"),
        (b"no image", "the file is not an image"),
        (image[:200], "the image cannot be decoded"),
    ):
        with pytest.raises(RequestError, match=f"^image: {problem}"):
            clip.encode({"image": data})
    assert clip.encode({"image": image}).shape == (1, 24)


def test_a_model_without_an_image_encoder_refuses_images(encoder_of):
    embedder = Embedder(str(encoder_of("bert")), num_threads=1)
    with pytest.raises(RequestError, match="BertModel does not accept images"):
        embedder.encode({"image": png(picture(1))})
    with pytest.raises(RequestError, match="exactly one of the following: text, token ids"):
        embedder.encode({"image": png(picture(1)), "text": "w1"})


@pytest.mark.parametrize("folder_name", ["1_Pooling", "2_Dense"])
def test_a_module_whose_config_was_not_downloaded_is_refused(folder_name, encoder_of, tmp_path):
    folder = copy_of(encoder_of("bert"), tmp_path)
    add_modules(folder, pooling("cls"), (DENSE, "2_Dense", {"in_features": 48}))
    (folder / folder_name / "config.json").unlink()
    with pytest.raises(ModelError, match=rf"{folder_name}/config\.json is missing or empty"):
        Embedder(str(folder))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", {"architectures": 5}, "architectures must be a list of class names"),
        ("config.json", {"hidden_size": "48"}, r"Validation error for field .*'48'"),
        ("config.json", {"vocab_size": 9}, r"config\.json requires the shape \(9, 48\)"),
        ("modules.json", [{"idx": 0, "path": "", "type": 5}], "cannot be read as a list"),
        ("config_sentence_transformers.json", {"prompts": ["a"]}, "a value of a wrong type"),
        ("1_Pooling/config.json", {"pooling_mode": 5}, "a value of a wrong type"),
        (
            "config_sentence_transformers.json",
            {"prompts": {"query": "query: "}, "default_prompt_name": "passage"},
            "default_prompt_name is 'passage', but the prompts are: query",
        ),
        ("sentence_bert_config.json", {"modality_config": 5}, "a value of a wrong type"),
    ],
)
def test_a_file_with_a_wrong_value_is_an_error_of_the_checkpoint(
    file, content, message, encoder_of, tmp_path
):
    folder = add_modules(copy_of(encoder_of("bert"), tmp_path), pooling("mean"))
    path = folder / file
    if file == "config.json":
        content = json.loads(path.read_text()) | content
    path.unlink(missing_ok=True)  # The file may be a link to the file of another test.
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=message):
        Embedder(str(folder))
