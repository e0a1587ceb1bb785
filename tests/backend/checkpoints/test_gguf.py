import contextlib
import json
import math
import os
import struct
from pathlib import Path
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
from backend.checkpoints.gguf_writer import write_gguf
from backend.checkpoints.load_on_cpu import load
from backend.exactness import PARAMS, open_engine
from backend.tiny_models import BY_NAME, Family
from hypothesis import given, settings
from hypothesis import strategies as st
from nereid_backend import Embedder, ModelError, UnsupportedModelError
from nereid_backend.checkpoints.checkpoint_folder import checkpoint_folder
from nereid_backend.checkpoints.gguf import gguf_folder, gguf_tokenizer
from nereid_backend.checkpoints.gguf.gguf_blocks import BLOCK_TYPES
from nereid_backend.checkpoints.gguf.gguf_config import gguf_config
from nereid_backend.checkpoints.gguf.gguf_file import GgufFile, GgufTensor, read_gguf
from nereid_backend.checkpoints.gguf.gguf_weights import GgufWeight
from nereid_backend.linear.grouped_linear import GroupedLinear
from nereid_backend.serving.tokenizer.prompt_builder import load_tokenizer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

GEMMA3 = Family(
    "gemma3",
    "gemma3_text",
    {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 12,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
)
WINDOW = {"attention.sliding_window": 12}
SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48}
CASES = {
    "llama": (BY_NAME["llama"], {}),
    "qwen2": (BY_NAME["qwen2"], {}),
    "qwen3": (BY_NAME["qwen3"], {}),
    "qwen3moe": (
        Family("moe", "qwen3_moe", BY_NAME["qwen3_moe"].extra | {"norm_topk_prob": True}),
        EXPERTS,
    ),
    "gemma2": (BY_NAME["gemma2"], WINDOW | SOFTCAPS),
    "gemma3": (GEMMA3, WINDOW | {"rope.freq_base": 1e6}),
}


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    # With the variable XDG_CACHE_HOME, the CPU kernels would also have a new cache folder, and they
    # would be compiled again.
    folder = tmp_path / "cache"
    monkeypatch.setattr("nereid_backend.checkpoints.gguf.gguf_folder.cache_folder", lambda: folder)


@pytest.mark.parametrize("architecture", CASES)
def test_a_float_file_computes_the_logits_of_the_checkpoint(architecture, tmp_path):
    family, metadata = CASES[architecture]
    folder = family.save(tmp_path / "checkpoint")
    file = write_gguf(folder, architecture, "F32", metadata=metadata)

    model_of_file, model = load(file), load(folder)

    weights = model_of_file.state_dict()
    for name, expected in model.state_dict().items():
        assert torch.equal(weights[name], expected), name
    ids = torch.arange(3, 43)[None]
    with torch.inference_mode():
        difference = (model_of_file(ids).logits - model(ids).logits).abs().max()
    assert difference < 1e-5


# The positions of the float16 numbers in a block, in bytes. In types that are not in this dict, the
# only float16 number is at byte 0.
SCALE_STARTS = {
    "Q4_1": [0, 2],
    "Q5_1": [0, 2],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def random_blocks(kind, num_blocks, seed=0):
    """Return blocks of random integers with finite scales, and the number of weights in a block."""
    num_weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (num_blocks, num_bytes), dtype=np.uint8)
    scales = random.uniform(0.001, 0.1, (num_blocks, 2)).astype(np.float16).view(np.uint8)
    for index, start in enumerate(SCALE_STARTS.get(kind.name, [0])):
        blocks[:, start : start + 2] = scales[:, 2 * index : 2 * index + 2]
    return blocks, num_weights


@pytest.mark.parametrize("name", [*BLOCK_TYPES, "IQ3_S"])
def test_blocks_are_dequantised_like_in_the_gguf_library(name, tmp_path):
    kind = gguf.GGMLQuantizationType[name]
    blocks, weights_per_block = random_blocks(kind, num_blocks=12)
    if name in ("Q4_K", "Q5_K"):
        # The first groups of this block have the scale 0.
        blocks[3, 4:8] = 0
        blocks[3, 12:16] = 0
    file = tmp_path / "file"
    file.write_bytes(b"1234" + blocks.tobytes())
    # Each of the four rows has three blocks.
    shape = (4, 3 * weights_per_block)
    tensor = GgufTensor("x", shape, kind, start=4, num_bytes=blocks.nbytes)

    weights = GgufWeight(file, tensor, torch.float32)[...]

    expected = gguf.dequantize(blocks.reshape(4, -1), kind)
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_an_engine_generates_the_tokens_of_the_dequantised_model(tmp_path):
    folder = BY_NAME["llama"].save(tmp_path / "checkpoint")
    file = write_gguf(folder, "llama", "Q8_0")
    assert any(type(module) is GroupedLinear for module in load(file, use_panels=True).modules())
    load(file).save_pretrained(folder)

    def answers(path):
        engine = open_engine(path)
        outputs = engine.generate([[5, 6, 7], [9, 8, 7, 6, 5]], PARAMS)
        engine.close()
        return [output.outputs[0].token_ids for output in outputs]

    assert answers(file) == answers(folder)


def bpe_tokenizer():
    """Return a byte-level BPE tokenizer whose merges come from a few English words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|end|>"], initial_alphabet=["a"], show_progress=False
    )
    tokenizer.train_from_iterator(["the tokens of the tokenizer in the file"] * 3, trainer)
    return tokenizer


def tokens_and_merges(tokenizer):
    """Return the tokens of a BPE tokenizer in the order of their ids, and its merges.

    A merge has the form of GGUF files: the two tokens, separated by a space.
    """
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [" ".join(pair) for pair in model["merges"]]


def test_the_tokenizer_and_the_chat_template_come_from_the_file(tmp_path):
    tokenizer = bpe_tokenizer()
    tokens, merges = tokens_and_merges(tokenizer)
    path = write_gguf(BY_NAME["llama"].save(tmp_path / "checkpoint"), "llama", "F32")
    add_tokenizer(path, tokens, merges, "gpt-2", template="[{{ messages[0].content }}]")

    loaded = AutoTokenizer.from_pretrained(checkpoint_folder(str(path)))

    for text in ("the tokens", "in the file of<|end|>", "  the\n file"):
        assert loaded.encode(text) == tokenizer.encode(text).ids
    assert loaded.eos_token == "<|end|>"
    assert loaded.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "[x]"


def test_an_embedding_model_does_not_need_the_output_layer_of_a_file(tmp_path):
    model = BY_NAME["llama"].make()
    model.save_pretrained(tmp_path)
    path = write_gguf(tmp_path, "llama", "F32", metadata={"pooling_type": 3})
    add_tokenizer(path, ["a", "aa", "<|end|>"], ["a a"], "gpt-2")
    embedder = Embedder(str(path), task="embed", num_threads=1)
    with torch.inference_mode():
        expected = model.model(torch.tensor([[5, 9, 11]])).last_hidden_state[0, -1]
    vector = embedder.encode([[5, 9, 11]], normalize=False)[0]
    np.testing.assert_allclose(vector, expected.numpy(), atol=1e-4)


def test_a_chat_with_tools_uses_the_template_for_tools_in_the_file(tmp_path):
    path = write_gguf(BY_NAME["llama"].save(tmp_path / "checkpoint"), "llama", "F32")
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]
    add_tokenizer(path, ["a", "aa", "<|end|>"], ["a a"], "gpt-2", templates)
    tokenizer = load_tokenizer(checkpoint_folder(str(path)))
    assert tokenizer.chat_template == {"default": "plain", "tool_use": "tools"}


@pytest.mark.parametrize(
    ("adds_space", "first_token"), [(None, "▁ab"), (True, "▁ab"), (False, "ab")]
)
def test_a_sentencepiece_tokenizer_adds_a_space_only_if_the_file_says_so(
    adds_space, first_token, tmp_path
):
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    # Longer tokens have higher scores, so the tokenizer prefers to merge characters into them.
    scores_of_texts = {"▁": -9.0, "a": -8.0, "b": -7.0, "▁a": -3.0, "ab": -2.0, "▁ab": -1.0}
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "</s>", *byte_tokens, *scores_of_texts],
        "tokenizer.ggml.scores": [0.0] * 258 + list(scores_of_texts.values()),
        # The types are: 1 for a normal token, 2 for <unk>, 3 for a special token, 6 for a byte.
        "tokenizer.ggml.token_type": [2, 3] + [6] * 256 + [1] * 6,
        "tokenizer.ggml.add_bos_token": False,
    }
    if adds_space is not None:
        metadata["tokenizer.ggml.add_space_prefix"] = adds_space

    gguf_tokenizer.write_tokenizer(GgufFile(Path("x.gguf"), metadata, {}), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    ids = tokenizer.encode("ab a")
    assert tokenizer.convert_ids_to_tokens(ids) == [first_token, "▁a"]
    assert tokenizer.decode(ids) == "ab a"


def test_special_tokens_that_the_file_lacks_are_ordinary_text(tmp_path):
    # The types are: 3 for a special token, and 4 for another added token.
    tokenizer, ids = load_byte_level_tokenizer(
        tmp_path, ["<|end|>", "<think>"], [3, 4], "llama-bpe", eos_token_id="<|end|>"
    )
    letters = [ids[letter] for letter in "<|endoftext|>"]
    encoded = tokenizer.encode("<|end|><think><|endoftext|>")
    assert encoded == [ids["<|end|>"], ids["<think>"], *letters]
    assert len(tokenizer) == len(ids)


def load_byte_level_tokenizer(folder, tokens, kinds, pre_tokenizer, **special_tokens):
    """Load a byte-level tokenizer from a GGUF file, and return it with its vocabulary.

    The vocabulary consists of a token for each byte, and of `tokens`.

    Args:
        folder: the folder to which the tokenizer is written.
        tokens: the tokens after the bytes.
        kinds: the type of each token in `tokens`: 1 for a normal token, 3 for a special token and
            4 for another added token.
        pre_tokenizer: the name of the pre-tokenizer in the GGUF file.
        **special_tokens: the token for each field such as "eos_token_id".

    Returns:
        The tokenizer, and a dict from the text of each token to its id.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*alphabet, *tokens]
    fields = {
        "model": "gpt2",
        "pre": pre_tokenizer,
        "tokens": vocabulary,
        "merges": [],
        "token_type": [1] * len(alphabet) + kinds,
        **{name: vocabulary.index(token) for name, token in special_tokens.items()},
    }
    metadata = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    file = GgufFile(Path("x.gguf"), {"general.architecture": "qwen2"} | metadata, {})
    gguf_tokenizer.write_tokenizer(file, folder)
    ids = {token: token_id for token_id, token in enumerate(vocabulary)}
    return AutoTokenizer.from_pretrained(folder), ids


@pytest.mark.parametrize("pre_tokenizer", ["deepseek-r1-qwen", "llama-bpe"])
def test_special_tokens_with_other_letters_than_bytes_are_one_token(pre_tokenizer, tmp_path):
    begin_token, end_token = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    tokenizer, ids = load_byte_level_tokenizer(
        tmp_path,
        tokens=[begin_token, end_token, "<｜User｜>", "<think>", "<я>"],
        kinds=[3, 3, 3, 4, 4],
        pre_tokenizer=pre_tokenizer,
        bos_token_id=begin_token,
        eos_token_id=end_token,
    )
    pieces = ["<｜User｜>", "a", "<think>", "b", "<я>", end_token]
    token_ids = tokenizer.encode("".join(pieces), add_special_tokens=False)
    assert token_ids == [ids[piece] for piece in pieces]
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "a<think>b<я>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (ids[begin_token], ids[end_token])
    assert len(tokenizer) == len(ids)


@pytest.mark.parametrize(("pre_tokenizer", "is_tiktoken"), [("llama-bpe", True), ("qwen2", False)])
def test_vocabularies_of_tiktoken_ignore_merges_and_add_a_bos_token(
    pre_tokenizer, is_tiktoken, tmp_path
):
    tokenizer, ids = load_byte_level_tokenizer(
        tmp_path, ["ab", "<s>"], [1, 3], pre_tokenizer, bos_token_id="<s>"
    )
    expected = ["<s>", "ab"] if is_tiktoken else ["a", "b"]
    assert tokenizer.encode("ab") == [ids[token] for token in expected]


def test_characters_are_composed_as_in_the_tokenizers_of_qwen(tmp_path):
    tokenizer, _ids = load_byte_level_tokenizer(tmp_path, [], [], "qwen2")
    assert tokenizer.encode("cafe\u0301") == tokenizer.encode("caf\u00e9")


def add_tokenizer(path, tokens, merges, pre_tokenizer, template="{{ messages[0].content }}"):
    """Add a byte-level BPE tokenizer and a chat template to a GGUF file.

    The token "<|end|>" is a special token, and the other tokens are normal tokens.
    """
    reader = gguf.GGUFReader(path)
    new_path = path.with_suffix(".new")
    writer = gguf.GGUFWriter(new_path, "llama")
    for name, field in reader.fields.items():
        if name.startswith("llama."):
            writer.add_key_value(name, field.contents(), field.types[0])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == "<|end|>" else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokens.index("<|end|>"))
    writer.add_chat_template(template)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    new_path.rename(path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_checkpoint_folder_that_was_truncated_on_disk_is_created_again(name, tmp_path):
    path = write_gguf(BY_NAME["llama"].save(tmp_path / "checkpoint"), "llama", "F32")
    file = Path(checkpoint_folder(str(path))) / name
    content = file.read_bytes()
    for num_bytes in (0, 20):
        os.truncate(file, num_bytes)
        assert checkpoint_folder(str(path)) == str(file.parent)
        assert file.read_bytes() == content


def test_a_cache_folder_that_cannot_be_used_is_named(tmp_path, monkeypatch):
    path = write_gguf(BY_NAME["llama"].save(tmp_path / "checkpoint"), "llama", "F32")
    # The parent of this cache folder is a file.
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: path / "cache")
    with pytest.raises(ModelError, match="set the environment variable XDG_CACHE_HOME"):
        checkpoint_folder(str(path))


def test_the_error_without_a_home_folder_names_the_variable_of_the_cache(tmp_path, monkeypatch):
    path = write_gguf(BY_NAME["llama"].save(tmp_path / "checkpoint"), "llama", "F32")
    monkeypatch.undo()  # The fixture `_cache` must not replace the cache folder in this test.
    for variable in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError("no such user")))
    with pytest.raises(ModelError, match="set the environment variable XDG_CACHE_HOME"):
        checkpoint_folder(str(path))


def test_an_unknown_pre_tokenizer_is_refused(tmp_path):
    folder = BY_NAME["llama"].save(tmp_path / "checkpoint")
    path = write_gguf(folder, "llama", "F32")
    add_tokenizer(path, ["a", "<|end|>"], ["a a"], "some-other")
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer 'some-other'"):
        checkpoint_folder(str(path))


@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("falcon", {}, "architecture 'falcon' is not supported. The supported architectures are"),
        ("llama", {"pooling_type": 1}, r"llama\.pooling_type must be 3 .*, but it is 1"),
        ("llama", {"expert_count": 8}, r"metadata value llama\.expert_count is not supported"),
        (
            "llama",
            {"rope.dimension_count": 8},
            r"rope\.dimension_count must equal the head size 16, but it is 8",
        ),
    ],
)
def test_an_unsupported_file_is_refused(architecture, metadata, message, tmp_path):
    folder = BY_NAME["llama"].save(tmp_path / "checkpoint")
    path = write_gguf(folder, architecture, "F32", metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=message):
        checkpoint_folder(str(path))


def add_tensors(folder, tensors):
    """Add tensors to a checkpoint of the type llama."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


def test_biases_of_queries_and_keys_have_the_order_of_transformers(tmp_path):
    folder = Family("llama", "llama", {"attention_bias": True}).save(tmp_path / "checkpoint")
    tensors = load_file(folder / "model.safetensors")
    biases = {
        name: torch.randn(bias.shape) for name, bias in tensors.items() if name.endswith("bias")
    }
    assert biases
    add_tensors(folder, biases)

    weights = load(write_gguf(folder, "llama", "F32")).state_dict()

    for name, expected in load(folder).state_dict().items():
        assert torch.equal(weights[name], expected), name


def test_a_tensor_that_the_model_does_not_use_is_refused(tmp_path):
    folder = BY_NAME["llama"].save(tmp_path / "checkpoint")
    add_tensors(folder, {"model.layers.0.mlp.up_proj.bias": torch.ones(96)})
    file = write_gguf(folder, "llama", "F32")
    with pytest.raises(UnsupportedModelError, match=r"F32\.gguf: .*layers\.0\.mlp\.up_proj\.bias"):
        load(file)


@pytest.mark.parametrize("use_panels", [False, True])
def test_a_wrong_value_is_an_error_of_the_file(use_panels, tmp_path):
    folder = BY_NAME["llama"].save(tmp_path / "checkpoint")
    file = write_gguf(folder, "llama", "F32", metadata={"attention.head_count_kv": 3})
    with pytest.raises(ModelError, match=r"the weights in \S+/F32\.gguf cannot be read"):
        load(file, use_panels=use_panels)


def test_a_file_that_lacks_a_layer_is_named(tmp_path):
    folder = BY_NAME["llama"].save(tmp_path / "checkpoint")
    file = write_gguf(folder, "llama", "F32", metadata={"block_count": 3})
    with pytest.raises(ModelError, match=r"/F32\.gguf lacks 9 weights, such as model\.layers\.2"):
        load(file)


def config_of(metadata, factors=None, architecture="llama"):
    """Return the config that is made from the metadata of a GGUF file.

    The file has valid sizes. `metadata` adds further fields or replaces the sizes.
    """
    valid_metadata = {
        "general.architecture": architecture,
        f"{architecture}.embedding_length": 64,
        f"{architecture}.block_count": 1,
        f"{architecture}.attention.head_count": 4,
    }
    embeddings = GgufTensor(
        "token_embd.weight", (8, 64), gguf.GGMLQuantizationType.F32, start=0, num_bytes=2048
    )
    tensors = {"token_embd.weight": embeddings}
    return gguf_config(GgufFile(Path("x.gguf"), valid_metadata | metadata, tensors), factors)


@pytest.mark.parametrize(
    ("metadata", "factors", "message"),
    [
        ({"llama.attention.head_count": 0}, None, "must be a positive integer, but it is 0"),
        ({"llama.embedding_length": [64]}, None, r"must be a positive integer, but it is \[64\]"),
        ({"llama.rope.freq_base": math.nan}, None, "must be a positive number, but it is nan"),
        ({"llama.block_count": 2**62}, None, "block_count is 4611.*, but the file has only 1"),
        ({"tokenizer.ggml.eos_token_id": "2"}, None, "eos_token_id must be an integer"),
        ({}, [0.0, 0.0], "the factors in rope_freqs.weight are not supported"),
        ({}, [], "the factors in rope_freqs.weight are not supported"),
    ],
)
def test_metadata_with_wrong_numbers_is_refused(metadata, factors, message):
    with pytest.raises(ModelError, match=rf"x\.gguf: .*{message}"):
        config_of(metadata, factors)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, {"rope_type": "default"}),
        ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"factor": 0.0}, {"rope_type": "default"}),
        ({"factor": 0.0, "type": "linear"}, {"rope_type": "linear", "factor": 1.0}),
        ({"factor": 4.0, "type": "none"}, {"rope_type": "default"}),
    ],
)
def test_scaled_positions_without_a_type_are_linear_as_in_llama_cpp(metadata, expected):
    scaling = {f"llama.rope.scaling.{name}": value for name, value in metadata.items()}
    assert config_of(scaling)["rope_parameters"] == expected | {"rope_theta": 10000.0}


@pytest.mark.parametrize("kind", ["adapter", "mmproj"])
def test_a_file_without_a_model_is_refused_by_its_type(kind, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_type(kind)
    writer.add_tensor("a", np.ones((1, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=f"its general.type is '{kind}'"):
        checkpoint_folder(str(tmp_path / "x.gguf"))


def test_token_ids_outside_the_vocabulary_are_ignored():
    config = config_of(
        {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 2**32 - 1}
    )
    assert (config["eos_token_id"], config["pad_token_id"]) == ([2], None)


def test_a_file_of_gemma_3_without_a_window_has_full_attention_in_all_layers():
    assert config_of({}, architecture="gemma3")["layer_types"] == ["full_attention"]


def test_tokens_that_end_a_turn_are_found_by_their_texts():
    # Files of Gemma 2 and 3 declare only the id of "<eos>", but the model ends its turns with the
    # token "<end_of_turn>", which has the id 3 here.
    config = config_of(
        {
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.tokens": ["<pad>", "<eos>", "a", "<end_of_turn>"],
        }
    )
    assert config["eos_token_id"] == [1, 3]


def test_a_damaged_vocabulary_is_refused(tmp_path):
    folder = BY_NAME["llama"].save(tmp_path / "checkpoint")
    path = write_gguf(folder, "llama", "F32")
    add_tokenizer(path, ["a", "<|end|>"], ["a c"], "gpt-2")
    with pytest.raises(ModelError, match=r"the tokenizer in the metadata cannot be read .*`c`"):
        checkpoint_folder(str(path))


def header(*, tensors=0, values=0, version=3, rest=b""):
    """Return a GGUF file that states these numbers of tensors and of metadata values."""
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values) + rest


def text(value):
    """Return a text as it is stored in a GGUF file: the length and the bytes."""
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGU",
        b"nothing of the kind",
        header(version=9),
        header(tensors=2**60),
        header(values=2**63),
        header(values=1, rest=struct.pack("<Q", 2**62) + bytes(64)),
        header(values=1, rest=text(b"a") + struct.pack("<IIQ", 9, 8, 2**61) + bytes(64)),
        header(values=1, rest=text(b"a") + struct.pack("<IIQ", 9, 9, 2) + bytes(64)),
        header(values=1, rest=text(b"a") + struct.pack("<IIQ", 9, 10, 2**61) + bytes(64)),
        header(tensors=1, rest=text(b"a") + struct.pack("<I", 2**31) + bytes(64)),
        header(tensors=1, rest=text(b"a") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0)),
        header(tensors=1, rest=text(b"a") + struct.pack("<IQIQ", 1, 64, 999, 0) + bytes(64)),
        header(tensors=1, rest=text(b"a") + struct.pack("<IQIQ", 1, 33, 8, 0) + bytes(64)),
        header(tensors=1, rest=text(b"a") + struct.pack("<IQIQ", 1, 8, 0, 2**50) + bytes(64)),
        header(
            tensors=2,
            rest=text(b"a")
            + struct.pack("<IQIQ", 1, 8, 0, 0)
            + text(b"b")
            + struct.pack("<IQIQ", 1, 8, 0, 16)
            + bytes(256),
        ),
    ],
)
def test_a_hostile_file_is_refused(content, tmp_path):
    path = tmp_path / "file.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"file\.gguf"):
        checkpoint_folder(str(path))


@pytest.mark.parametrize(
    ("number", "name"),
    [(gguf.GGMLQuantizationType.I8, "I8"), (31, "number 31"), (99, "number 99")],
)
def test_a_type_that_is_not_supported_is_named_instead_of_called_damage(number, name, tmp_path):
    path = tmp_path / "file.gguf"
    tensor = text(b"x.weight") + struct.pack("<IQIQ", 1, 64, number, 0)
    path.write_bytes(header(tensors=1, rest=tensor + bytes(256)))
    message = rf"file\.gguf: the type {name} of the tensor x\.weight is not supported"
    with pytest.raises(UnsupportedModelError, match=message):
        read_gguf(path)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_damaged_header_never_causes_another_error(data, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "damaged"
    if not folder.exists():
        write_gguf(BY_NAME["llama"].save(folder), "llama", "F32")

    content = bytearray((folder / "F32.gguf").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 2000))] = data.draw(st.integers(0, 255))
    path = folder / "changed.gguf"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])

    with contextlib.suppress(ModelError):
        read_gguf(path)
