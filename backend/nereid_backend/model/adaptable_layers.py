# SPDX-License-Identifier: Apache-2.0
"""Finds the linear layers of a model that a LoRA adapter can change."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nereid_backend.errors import first_line
from nereid_backend.load_checkpoint import Checkpoint
from nereid_backend.lora.peft_files import LayerSizes
from nereid_backend.model.forward_path.path_spec import set_attention
from nereid_backend.model.forward_path.probe_layers import plain_token_ids
from nereid_backend.paths.model_call import ModelCall

log = logging.getLogger(__name__)

# The number of tokens in the test step. If the input of a layer has `_NUM_TOKENS` rows, the layer
# is assumed to compute every token. Other layers must not have `_NUM_TOKENS` rows by chance. The
# output layer has 1 row, so the number of tokens must not be 1. A layer may have one row for each
# expert, so the number must not be a common number of experts, such as 8.
_NUM_TOKENS = 7


@torch.inference_mode()
def find_adaptable_layers(checkpoint: Checkpoint) -> dict[str, LayerSizes]:
    """Return the name and the sizes of each linear layer that a LoRA adapter can change.

    An adapter can change a layer only if the layer computes all tokens of a step. The layers are
    found by running the model once. A layer is left out in three cases: the model's code reads the
    weight without calling the layer; the layer computes only some tokens (experts and output
    layers); or the layer returns more than one tensor (some routers). The result is empty if the
    model cannot be called.

    Mutates: the checkpoint. After the call, the model uses its own attention.
    """
    with _recorded_layers(checkpoint.model) as layers:
        try:
            set_attention(checkpoint, None)
            ids = torch.tensor(
                [plain_token_ids(checkpoint)[:_NUM_TOKENS]], device=checkpoint.device
            )
            positions = torch.arange(ids.shape[1], device=checkpoint.device)[None]
            ModelCall(checkpoint.model)(ids, num_logits=1, position_ids=positions)
        except Exception as error:  # noqa: BLE001 - a model's code can raise any exception
            log.info("No layer can have a LoRA adapter: %s", first_line(error))
            return {}
    return {name: layer.sizes for name, layer in layers.items() if layer.can_be_adapted}


@contextmanager
def _recorded_layers(model: nn.Module) -> Iterator[dict[str, "_RecordedLayer"]]:
    """Yield the linear layers of a model by name. Record their calls until the context ends."""
    layers: dict[str, _RecordedLayer] = {}
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            sizes = _sizes_of(module)
            if sizes is not None:
                layers[name] = _RecordedLayer(sizes, computed_all_tokens=[])
                hook = module.register_forward_hook(_recorder(layers[name]))
                hooks.callback(hook.remove)
        yield layers


class _RecordedLayer(NamedTuple):
    """A linear layer, and its calls in the test step.

    Attributes:
        sizes: the numbers of inputs and outputs of the layer.
        computed_all_tokens: one item for each call: whether the call computed all tokens of the
            step.
    """

    sizes: LayerSizes
    computed_all_tokens: list[bool]

    @property
    def can_be_adapted(self) -> bool:
        """True if the model has called the layer, and every call has computed all tokens."""
        return bool(self.computed_all_tokens) and all(self.computed_all_tokens)


def _sizes_of(module: nn.Module) -> LayerSizes | None:
    """Return the number of inputs and of outputs of a linear layer; None for other modules."""
    # transformers' Conv1D is a linear layer whose sizes are named nx and nf.
    for names in (("in_features", "out_features"), ("nx", "nf")):
        sizes = [getattr(module, name, None) for name in names]
        if isinstance(sizes[0], int) and isinstance(sizes[1], int):
            return LayerSizes(sizes[0], sizes[1])
    return None


def _recorder(layer: _RecordedLayer) -> Callable[[nn.Module, tuple[Tensor, ...], object], None]:
    """Return a forward hook that records in `layer` whether each call computes all tokens.

    torch calls a forward hook after each call of a module. The model is called with `_NUM_TOKENS`
    tokens. A layer that computes only some of them, such as an expert, has a smaller input or
    output.
    """
    sizes = layer.sizes

    def record(module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        del module
        has_all_inputs = bool(inputs) and inputs[0].numel() == _NUM_TOKENS * sizes.in_features
        has_all_outputs = (
            isinstance(output, Tensor) and output.numel() == _NUM_TOKENS * sizes.out_features
        )
        layer.computed_all_tokens.append(has_all_inputs and has_all_outputs)

    return record
