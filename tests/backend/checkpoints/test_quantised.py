import json

import pytest
import torch
from backend.checkpoints import writers
from backend.checkpoints.load_on_cpu import load
from backend.tiny_models import BY_NAME
from nereid_backend import ModelError, UnsupportedModelError
from nereid_backend.checkpoints.quantised import compressed_tensors, gptq, torchao
from nereid_backend.checkpoints.weight_counts import count_weights
from safetensors.torch import load_file, save_file


def assert_same_weights(plain, quantised, *, relative=1e-6):
    """Check that two checkpoints have equal weights after loading.

    `relative` is the largest allowed difference, relative to the largest value of a weight.
    """
    expected, loaded = load(plain).state_dict(), load(quantised).state_dict()
    assert expected.keys() == loaded.keys()
    for name, weight in expected.items():
        difference = (loaded[name] - weight).abs().max()
        assert difference <= relative * weight.abs().max(), name


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
FLOAT8 = {"num_bits": 8, "type": "float"}
COMPRESSED = {
    "W4A16": ("pack-quantized", INT4),
    "W4A16, asymmetric": ("pack-quantized", INT4 | {"symmetric": False}),
    "W3A16": ("pack-quantized", INT4 | {"num_bits": 3}),
    "W8A16": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "W8A8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "W8A8, one scale": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}),
    "FP8": ("float-quantized", FLOAT8 | {"strategy": "channel"}),
    "FP8, one scale": ("float-quantized", FLOAT8 | {"strategy": "tensor"}),
    "FP8, blocks": (
        "float-quantized",
        FLOAT8 | {"strategy": "block", "block_structure": [16, 32]},
    ),
    "MXFP4": (
        "mxfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "group",
            "group_size": 32,
            "scale_dtype": torch.uint8,
            "zp_dtype": torch.uint8,
        },
    ),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_gives_the_weights_that_the_library_decompresses(name, tmp_path):
    kind, arguments = COMPRESSED[name]
    settings, encode = writers.compressed_tensors(kind, **arguments)
    pair = writers.write_pair("llama", tmp_path, settings, encode)
    # The library dequantises in the data type of the scales.
    assert_same_weights(*pair, relative=1e-6)


@pytest.mark.parametrize("scales_shape", [(16, 2), (1, 1)])
def test_zeros_of_compressed_tensors_before_version_0_9_4_are_not_packed(scales_shape):
    zeros = torch.randint(-8, 8, scales_shape, dtype=torch.int8)
    tensors = {
        # Each integer of 4 bits is -4, because 8 was added before packing.
        ".weight_packed": torch.full((16, 4), 0x44444444, dtype=torch.int32),
        ".weight_scale": torch.ones(scales_shape),
        ".weight_zero_point": zeros,
        ".weight_shape": torch.tensor([16, 32]),
    }
    layout = compressed_tensors.compressed_tensors_format({}).layouts[0]

    weight = layout.decode(tensors, torch.float32).dequantise(torch.float32)

    group_size = 32 // scales_shape[1]
    expected = -4.0 - zeros.expand(16, -1).repeat_interleave(group_size, dim=1)
    assert torch.equal(weight, expected)


@pytest.mark.parametrize("bits", range(1, 9))
def test_words_of_compressed_tensors_before_version_0_18_contain_only_whole_integers(bits):
    def pack(integers):
        """Pack signed integers into words of 32 bits.

        No integer is divided over two words: at 3 bits, a word contains 10 integers.
        """
        num_in_word = 32 // bits
        unsigned = integers + 2 ** (bits - 1)
        padded = torch.nn.functional.pad(unsigned, (0, -integers.shape[1] % num_in_word))
        shifts = torch.arange(num_in_word) * bits
        words = padded.view(len(integers), -1, num_in_word) << shifts
        return words.sum(2).to(torch.int32)

    def random_integers(*shape):
        return torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), shape)

    values, zeros = random_integers(40, 64), random_integers(40, 4)
    tensors = {
        ".weight_packed": pack(values),
        ".weight_scale": torch.ones(40, 4),
        ".weight_zero_point": pack(zeros.T).T,
        ".weight_shape": torch.tensor([40, 64]),
    }
    settings = {"config_groups": {"group_0": {"weights": {"num_bits": bits, "group_size": 16}}}}
    layout = compressed_tensors.compressed_tensors_format(settings).layouts[0]

    weight = layout.decode(tensors, torch.float32)

    assert torch.equal(weight.values, values.to(torch.int8))
    assert torch.equal(weight.zeros, zeros.to(torch.int8))


def test_groups_are_consecutive_if_compressed_tensors_did_not_compute_their_order():
    tensors = {
        ".weight": torch.ones(2, 32, dtype=torch.int8),
        ".weight_scale": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        ".weight_g_idx": torch.full((32,), -1, dtype=torch.int32),
    }
    layout = compressed_tensors.compressed_tensors_format({}).layouts[1]
    weight = layout.decode(tensors, torch.float32).dequantise(torch.float32)
    assert torch.equal(weight, tensors[".weight_scale"].repeat_interleave(16, dim=1))


def test_weights_with_a_scale_for_each_row_can_be_beside_weights_with_blocks(tmp_path):
    kind, arguments = COMPRESSED["FP8, blocks"]
    settings, _ = writers.compressed_tensors(kind, **arguments)
    _, encode = writers.compressed_tensors(kind, **FLOAT8, strategy="channel")
    assert_same_weights(*writers.write_pair("llama", tmp_path, settings, encode))


def test_a_block_structure_can_be_a_text(tmp_path):
    kind, arguments = COMPRESSED["FP8, blocks"]
    settings, encode = writers.compressed_tensors(kind, **arguments)
    settings["config_groups"]["group_0"]["weights"]["block_structure"] = "16x32"
    assert_same_weights(*writers.write_pair("llama", tmp_path, settings, encode))


def test_zero_points_of_an_asymmetric_kv_cache_are_ignored(tmp_path):
    kind, arguments = COMPRESSED["W4A16"]
    pair = writers.write_pair("llama", tmp_path, *writers.compressed_tensors(kind, **arguments))
    name = "model.layers.0.self_attn.k_zero_point"
    change_tensors(pair[1], lambda tensors: tensors.update({name: torch.ones(1)}))
    assert_same_weights(*pair)


@pytest.mark.parametrize("name", ["W4A16", "W8A16", "W8A8"])
def test_packed_weights_of_8_bits_are_not_counted_twice(name, tmp_path):
    kind, arguments = COMPRESSED[name]
    settings, encode = writers.compressed_tensors(kind, **arguments)
    plain, quantised = writers.write_pair("llama", tmp_path, settings, encode)
    assert count_weights(quantised).num_weights == count_weights(plain).num_weights


@pytest.mark.parametrize("kind", ["int4", "int8", "float8"])
def test_torchao_gives_the_weights_that_the_library_dequantises(kind, tmp_path):
    settings, encode = writers.torchao(kind)
    assert_same_weights(*writers.write_pair("llama", tmp_path, settings, encode))


@pytest.mark.parametrize(
    ("kind", "is_nested"), [("nf4", False), ("nf4", True), ("fp4", False), ("int8", False)]
)
def test_bitsandbytes_gives_the_weights_that_the_library_dequantises(kind, is_nested, tmp_path):
    settings, encode = writers.bitsandbytes(kind, is_nested=is_nested)
    # The library dequantises integers of 8 bits to float16, which is less exact.
    relative = 1e-3 if kind == "int8" else 1e-6
    pair = writers.write_pair("llama", tmp_path, settings, encode)
    assert_same_weights(*pair, relative=relative)


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float16, torch.float32])
def test_the_bytes_of_bitsandbytes_can_be_stored_as_numbers_of_any_type(storage, tmp_path):
    settings, encode = writers.bitsandbytes_stored_as(storage)
    plain, quantised = writers.write_pair("llama", tmp_path, settings, encode)
    assert_same_weights(plain, quantised)
    assert count_weights(quantised).num_weights == count_weights(plain).num_weights


def test_awq(tmp_path):
    assert_same_weights(*writers.write_pair("llama", tmp_path, *writers.awq()))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("is_v2", [False, True])
def test_gptq(bits, is_v2, tmp_path):
    assert_same_weights(*writers.write_pair("llama", tmp_path, *writers.gptq(bits, is_v2=is_v2)))


def test_gptq_without_g_idx_can_have_layers_of_other_bits_and_an_incomplete_group():
    settings = {"bits": 4, "group_size": 128, "packing_format": "auto_round:auto_gptq"}
    layout = gptq.gptq_format(settings).layouts[0]
    # The settings declare 4 bits, but the integers of this layer have 8 bits. The layer has 200
    # inputs, so its second group has only 72 inputs instead of 128.
    values = torch.randint(0, 256, (64, 200))
    zeros = torch.full((64, 2), 128)
    tensors = {
        # GPTQ files have a row for each input (four inputs in a word) and a column for each output.
        ".qweight": writers.pack(values, 8).T,
        # GPTQ files store each zero point minus one.
        ".qzeros": writers.pack(zeros.T - 1, 8),
        ".scales": torch.tensor([[1.0], [2.0]]).expand(2, 64).half(),
    }

    weight = layout.decode(tensors, torch.float32).dequantise(torch.float32)

    assert torch.equal(weight[:, :128], values[:, :128] - 128.0)
    assert torch.equal(weight[:, 128:], 2 * (values[:, 128:] - 128.0))


def test_gptq_with_activation_order(tmp_path):
    assert_same_weights(*writers.write_pair("qwen2", tmp_path, *writers.gptq(4, desc_act=True)))


@pytest.mark.parametrize("block", [None, 16, 40])
def test_fp8_equals_the_weights_that_transformers_dequantises(block, tmp_path):
    assert_same_weights(*writers.write_pair("llama", tmp_path, *writers.fp8(block=block)))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3, k and v of different sizes"])
def test_the_weights_of_single_experts_are_merged(family, tmp_path):
    pair = writers.write_pair(family, tmp_path, *writers.fp8(block=16), num_shards=3)
    assert_same_weights(*pair)


def test_stacked_experts_of_mxfp4_equal_the_weights_that_transformers_dequantises(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain = BY_NAME["gpt_oss"].save(tmp_path / "plain")
    quantised = BY_NAME["gpt_oss"].save(tmp_path / "quantised")
    dequantised_tensors = load_file(plain / "model.safetensors")
    quantised_tensors = dict(dequantised_tensors)
    random = torch.Generator().manual_seed(0)
    for name, weight in dequantised_tensors.items():
        if name.endswith("experts.down_proj"):
            # A block contains 32 numbers of 4 bits in 16 bytes. The scales of the blocks are powers
            # of two, of which only the exponent is stored.
            num_experts, num_inputs, num_outputs = weight.shape
            shape = (num_experts, num_outputs, num_inputs // 32, 16)
            blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
            scales = torch.randint(120, 126, shape[:-1], dtype=torch.uint8, generator=random)
            del quantised_tensors[name]
            quantised_tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            dequantised = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            dequantised_tensors[name] = dequantised
    save_file(dequantised_tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(quantised_tensors, quantised / "model.safetensors", metadata={"format": "pt"})
    set_settings(quantised, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})

    assert_same_weights(plain, quantised)


def set_settings(folder, settings):
    """Set the value of `quantization_config` in the config.json of a checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))


def test_layers_that_are_not_quantised_and_tied_embeddings_are_loaded(tmp_path):
    settings, encode = writers.awq()
    pair = writers.write_pair(
        "gemma2", tmp_path, settings, encode, is_quantised=lambda name: "layers.0.mlp" in name
    )
    assert_same_weights(*pair)


def test_weights_are_rounded_to_the_data_type_of_the_engine(tmp_path):
    plain, quantised = writers.write_pair("llama", tmp_path, *writers.gptq(4))
    plain_model, quantised_model = load(plain, "bfloat16"), load(quantised, "bfloat16")
    weights = quantised_model.state_dict()
    for name, expected in plain_model.state_dict().items():
        assert torch.equal(weights[name], expected), name
    expected_end = plain_model.generation_config.eos_token_id
    assert quantised_model.generation_config.eos_token_id == expected_end


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "aqlm"}, "method 'aqlm'.*supported methods are awq, bitsandbytes"),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ version gemv"),
        ({"quant_method": "awq", "format": "gemv"}, "AWQ version gemv"),
        (
            {"quant_method": "awq", "pack_method": "reorder", "zero_point": False},
            "symmetric AWQ weights of AMD Quark",
        ),
        (
            {"quant_method": "awq", "pack_method": "order"},
            "AWQ weights with the pack_method 'order'",
        ),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "GPTQ format marlin"),
        ({"quant_method": "gptq", "format": "marlin"}, "GPTQ format marlin"),
        ({"quant_method": "gptq", "bits": 5}, "with 5 bits"),
        (
            {"quant_method": "gptq", "rotation": "hadamard"},
            r"rotated weights \(rotation in quantization_config of config\.json\) are not",
        ),
        (
            {"packing_format": "auto_round:auto_gptq", "spinquant_config": {"r1": True}},
            r"rotated weights \(spinquant_config in ",
        ),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format marlin-24"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}},
            "sparse layout sparse-bitmask",
        ),
    ],
)
def test_an_unsupported_method_is_refused_by_name(settings, message, tmp_path):
    folder = BY_NAME["llama"].save(tmp_path / "llama")
    set_settings(folder, settings)
    with pytest.raises(UnsupportedModelError, match=message):
        load(folder)


@pytest.mark.parametrize("read", [load, count_weights])
@pytest.mark.parametrize("field", ["quantization_config", "quantization"])
def test_a_checkpoint_of_mlx_is_refused_instead_of_called_damaged(field, read, tmp_path):
    folder = BY_NAME["llama"].save(tmp_path / "llama")
    weights = load_file(folder / "model.safetensors")
    # MLX packs eight integers of 4 bits into 32 bits, so a row has an eighth of the columns.
    name = "model.layers.0.mlp.up_proj.weight"
    num_rows, num_columns = weights[name].shape
    weights[name] = torch.zeros(num_rows, num_columns // 8, dtype=torch.uint32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    config[field] = {"group_size": 64, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(UnsupportedModelError, match="Checkpoints of MLX, which are not sup"):
        read(folder)


@pytest.mark.parametrize(
    "settings",
    [
        5,
        {"quant_method": "compressed-tensors", "config_groups": 5},
        {"quant_method": "fp8", "weight_block_size": "x"},
    ],
)
def test_settings_with_a_wrong_type_are_refused(settings, tmp_path):
    folder = BY_NAME["llama"].save(tmp_path / "llama")
    set_settings(folder, settings)
    with pytest.raises(UnsupportedModelError, match=r"quantization_config .* a wrong type"):
        count_weights(folder)


def test_a_damaged_generation_config_beside_quantised_weights_is_named(tmp_path):
    _, folder = writers.write_pair("llama", tmp_path, *writers.awq())
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be read"):
        load(folder)


def test_quantised_weights_without_quantization_config_are_refused(tmp_path):
    _, folder = writers.write_pair("llama", tmp_path, *writers.fp8(block=None))
    set_settings(folder, None)
    with pytest.raises(UnsupportedModelError, match=r"weight_scale.* no quantization_config"):
        load(folder)


def test_the_error_about_a_missing_quantization_config_precedes_the_missing_weights(tmp_path):
    _, folder = writers.write_pair("llama", tmp_path, *writers.awq())
    set_settings(folder, None)
    with pytest.raises(UnsupportedModelError, match=r"qweight.* no quantization_config"):
        load(folder)


def test_packed_weights_without_quantization_config_are_not_called_damaged(tmp_path):
    _, folder = writers.write_pair("llama", tmp_path, *writers.fp8(block=None))
    set_settings(folder, None)
    # NVIDIA's Model Optimizer packs two 4-bit numbers into a byte, so the matrix becomes narrower.
    packed = torch.zeros(96, 32, dtype=torch.uint8)
    change_tensors(folder, lambda tensors: tensors.update({f"{LAYER}.weight": packed}))
    with pytest.raises(ModelError, match=r"weight_scale.* no quantization_config"):
        load(folder)


def change_tensors(folder, change):
    """Call the function `change` with the dict of a checkpoint's tensors, and save the tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


LAYER = "model.layers.1.mlp.up_proj"


def test_a_missing_part_of_a_quantised_weight_is_named(tmp_path):
    _, folder = writers.write_pair("llama", tmp_path, *writers.awq())
    change_tensors(folder, lambda tensors: tensors.pop(f"{LAYER}.scales"))
    with pytest.raises(ModelError, match=rf"safetensors contains the tensor {LAYER}\.qweight"):
        load(folder)


def test_a_wrong_number_of_tokens_in_a_quantised_checkpoint_is_named(tmp_path):
    _plain, quantised = writers.write_pair("llama", tmp_path, *writers.gptq(4))
    config = json.loads((quantised / "config.json").read_text())
    config["vocab_size"] = 300
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"\(320, 64\), but .* Set vocab_size to 320, or"):
        load(quantised)


def test_awq_scales_of_activation_functions_are_refused(tmp_path):
    _, folder = writers.write_pair("starcoder2", tmp_path, *writers.awq())
    name = "model.layers.0.mlp.act.scales"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.ones(96)}))
    with pytest.raises(ModelError, match=rf"safetensors contains the tensor {name}"):
        load(folder)


def test_a_quantised_weight_of_a_wrong_shape_is_named(tmp_path):
    _, folder = writers.write_pair("llama", tmp_path, *writers.awq())
    change_tensors(
        folder, lambda tensors: tensors.update({f"{LAYER}.qzeros": torch.ones(1, 1).int()})
    )
    with pytest.raises(ModelError, match=rf"quantised weight {LAYER}\.qweight in .*safetensors"):
        load(folder)


def test_groups_outside_of_the_scales_are_refused(tmp_path):
    _, folder = writers.write_pair("llama", tmp_path, *writers.gptq(4))
    groups = torch.full((64,), 99, dtype=torch.int32)
    change_tensors(folder, lambda tensors: tensors.update({f"{LAYER}.g_idx": groups}))
    with pytest.raises(ModelError, match="g_idx contains a group outside the range 0 to 3"):
        load(folder)


def test_a_group_of_torchao_with_the_scale_0_has_one_value():
    # Two rows of four weights in groups of two. Each byte contains two integers of 4 bits.
    tensors = {
        torchao._MAIN: torch.tensor([[0x21, 0x43], [0x65, 0x07]], dtype=torch.uint8),
        torchao._SCALE: torch.tensor([[0.0, 2.0], [1.0, 1.0]]),  # the shape is [groups, rows]
        torchao._ZERO: torch.tensor([[5.0, 0.0], [0.0, 0.0]]),
    }
    weight = torchao._decode_int4(tensors, torch.float32).dequantise(torch.float32)
    assert weight.tolist() == [[5.0, 5.0, 3.0, 4.0], [10.0, 12.0, 7.0, 0.0]]
