"""Functions that compare the greedy tokens of engines with rounded weights or an adapter.

Each public function takes the folder of a checkpoint. It returns the expected tokens, which
transformers generates, and the tokens of the engine. The prompts run together, as in the situation
"mixed" of backend.exactness.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from backend.exactness import (
    PARAMS,
    PROMPTS,
    Answers,
    greedy_tokens,
    load_float32,
    open_engine,
    run_staggered,
)
from backend.lora.adapter_writer import write_adapter
from nereid_backend.linear import grouped_linear
from nereid_backend.linear.grouped_linear import GroupedLinear
from nereid_backend.linear.packed_embedding import pack_embedding
from nereid_backend.linear.quantise_weights import quantise_linears
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

# Two logits count as nearly equal if their difference is smaller than this number, multiplied by
# the standard deviation of all logits of the token. If one input of a layer is rounded to another
# integer, the logits change by up to 0.035 standard deviations (measured with bart).
TIE = 0.05
_NOISE = 1e-6


class NotApplicableError(Exception):
    """Raised if a variant cannot be compared for a type of model."""


def rounded_weights(folder: Path, bits: int) -> tuple[Answers, Answers]:
    """Compare an engine that rounds the weights with transformers.

    The engine computes without the kernels for integers, because these kernels also round the
    inputs of the layers. transformers computes with the dequantised weights. Its output layer gets
    its own copy of the weight even if it shares the weight with the embedding, because the engine
    stores a shared weight in the layout of the output layer.

    Raises:
        ConfigError: if the engine cannot round the weights of the model.
    """
    model = _load_rounded(folder, bits)
    for layer in model.modules():
        if isinstance(layer, GroupedLinear):
            weight = layer.dequantised().contiguous()
            layer.__class__ = nn.Linear
            layer.weight = nn.Parameter(weight, requires_grad=False)
    with mock.patch.object(grouped_linear, "is_available", return_value=False):
        return greedy_tokens(model), _run_rounded(folder, bits)


def rounded_weights_and_inputs(folder: Path, bits: int) -> tuple[Answers, Answers]:
    """Compare an engine with transformers when both compute linear layers with the CPU kernels.

    The kernels round the weights and the inputs of the layers. The engine adds numbers in another
    order than transformers. An input can therefore be rounded to another integer, and the logits
    then change a little. If the first two different tokens of two answers have nearly equal logits,
    the answers count as equal.

    Raises:
        ConfigError: if the engine cannot round the weights of the model.
        NotApplicableError: if tiny changes of the embeddings change the tokens of transformers.
    """
    model = _load_rounded(folder, bits)
    expected = greedy_tokens(model)
    engine_answers = [
        expected_answer if _differ_after_a_tie(model, prompt, expected_answer, answer) else answer
        for prompt, expected_answer, answer in zip(
            PROMPTS, expected, _run_rounded(folder, bits), strict=True
        )
    ]
    if engine_answers != expected and _tokens_with_noise(model) != expected:
        raise NotApplicableError("Tiny changes of the embeddings change the tokens.")
    return expected, engine_answers


@torch.inference_mode()
def _load_rounded(folder: Path, bits: int) -> PreTrainedModel:
    """Return the model of transformers with the rounded weights of the engine."""
    model = load_float32(folder)

    def is_correct() -> bool:
        # Some models, such as recurrent_gemma, store the state of a recurrence in their layers
        # unless `use_cache` is False. The next prompt would continue with this state.
        return bool(model(torch.tensor([PROMPTS[0]]), use_cache=False).logits.isfinite().all())

    assert is_correct()  # Some models, such as rwkv, change their weights in the first call.
    quantise_linears(model, bits)
    pack_embedding(model, is_correct, can_round=True)
    return model


def _tokens_with_noise(model: PreTrainedModel) -> Answers:
    """Return the greedy tokens of transformers after a tiny random change of the embeddings.

    The change of a number is about one millionth of the number (`_NOISE`).
    """
    torch.manual_seed(1)

    def add_noise(layer: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + _NOISE * torch.randn_like(output))

    hook = model.get_input_embeddings().register_forward_hook(add_noise)
    try:
        return greedy_tokens(model)
    finally:
        hook.remove()


@torch.inference_mode()
def _differ_after_a_tie(
    model: PreTrainedModel, prompt: list[int], expected: list[int], answer: list[int]
) -> bool:
    """Return whether the first different tokens of two answers have nearly equal logits."""
    pairs = zip(expected, answer, strict=True)
    differing = [i for i, (expected_token, token) in enumerate(pairs) if token != expected_token]
    if not differing:
        return False
    first = differing[0]
    logits = model(torch.tensor([prompt + expected[:first]])).logits[0, -1]
    difference = logits[expected[first]] - logits[answer[first]]
    return bool(difference < TIE * logits.std())


def _run_rounded(folder: Path, bits: int) -> Answers:
    engine = open_engine(folder, block_size=16, weight_dtype=f"int{bits}")
    try:
        return run_staggered(engine)
    finally:
        engine.close()


def with_adapter(folder: Path) -> tuple[Answers, Answers]:
    """Compare an engine that uses an adapter with transformers.

    Every second prompt selects the adapter. For these prompts, transformers computes with weights
    into which the adapter was merged. The adapter changes all linear layers that the engine allows.

    Raises:
        NotApplicableError: if the model has no linear layer that an adapter can change.
    """
    model = load_float32(folder)
    engine = open_engine(folder, block_size=16)
    try:
        names = _adaptable_layers(model, engine._parts.adapters._sizes)
        adapter = folder / "adapter"
        merged_answers = greedy_tokens(write_adapter(adapter, model, names, rank=4, seed=1))
        plain_answers = greedy_tokens(model)
        assert merged_answers != plain_answers, "the adapter does not change the tokens"

        engine.load_lora("a", str(adapter))
        with_lora = dataclasses.replace(PARAMS, lora_name="a")
        uses_adapter = [index % 2 == 1 for index in range(len(PROMPTS))]
        expected = [
            merged if uses else plain
            for uses, merged, plain in zip(uses_adapter, merged_answers, plain_answers, strict=True)
        ]
        params = [with_lora if uses else PARAMS for uses in uses_adapter]
        return expected, run_staggered(engine, params)
    finally:
        engine.close()


def _adaptable_layers(model: PreTrainedModel, sizes: dict[str, object]) -> list[str]:
    """Return the names of the linear layers that an adapter may change.

    The engine allows adapters for the layers whose names are keys of `sizes`. A layer that shares
    its weight with another layer is left out: to merge an adapter into the weight would also change
    the other layer.
    """
    weights = (getattr(module, "weight", None) for module in model.modules())
    num_users = Counter(w.data_ptr() for w in weights if isinstance(w, nn.Parameter))
    names = [
        name
        for name, module in model.named_modules()
        if name in sizes
        and isinstance(module, nn.Linear | Conv1D)
        and num_users[module.weight.data_ptr()] == 1
    ]
    if not names:
        raise NotApplicableError("The model has no linear layer that an adapter can change.")
    return names


VARIANTS: dict[str, Callable[[Path], tuple[Answers, Answers]]] = {
    "int4": lambda folder: rounded_weights(folder, 4),
    "int4 kernels": lambda folder: rounded_weights_and_inputs(folder, 4),
    "int8": lambda folder: rounded_weights(folder, 8),
    "int8 kernels": lambda folder: rounded_weights_and_inputs(folder, 8),
    "LoRA": with_adapter,
}
"""The function of each column of tests/backend/archs.py."""
