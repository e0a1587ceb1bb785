# SPDX-License-Identifier: Apache-2.0
"""Determines the attention layers of a model.

The model computes one token, and a recorder stores the properties of each attention call.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PretrainedConfig

from nereid_backend.attention.interface import AttentionHook
from nereid_backend.attention.layers import LayerSpec, LayerWindow
from nereid_backend.load_checkpoint import Checkpoint
from nereid_backend.paths.model_call import ModelCall, UnfitError
from nereid_backend.paths.recurrent_cache import make_cache


class _Recorder:
    """An attention function that records its calls in a forward pass over one token.

    A single token attends only to itself, so the function returns the value of the token.

    Attributes:
        layers: the recorded layers, in the order of their calls.
        unsupported: the reason why a call is not supported; None if all calls are supported.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self.layers: list[LayerSpec] = []
        self.unsupported: str | None = None
        self._chunk = getattr(config, "attention_chunk_size", None)
        self._layer_types = list(getattr(config, "layer_types", None) or [])

    def __call__(
        self,
        module: torch.nn.Module,  # noqa: ARG002 - transformers passes it
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **kwargs: object,
    ) -> Tensor:
        """Record the attention layer that makes this call, and return the result of attention.

        The result has the shape [1, 1, num_heads, value_dim].
        """
        if kwargs.get("position_bias") is not None:
            self.unsupported = "its attention adds a position bias"
        if query.shape[0] != 1 or key.shape[2] != 1:
            self.unsupported = f"it calls attention with keys of shape {tuple(key.shape)}"
        spec = self._spec(query, key, value, kwargs)
        self.layers.append(spec)
        groups = spec.num_heads // spec.num_kv_heads
        return value.repeat_interleave(groups, dim=1).transpose(1, 2)

    def _spec(
        self, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, object]
    ) -> LayerSpec:
        """Determine the properties of a layer from the arguments of its attention call."""
        number = len(self.layers)
        kind = self._layer_types[number] if number < len(self._layer_types) else ""
        window = kwargs.get("sliding_window")
        softcap = kwargs.get("softcap")
        return LayerSpec(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            window=LayerWindow(
                size=window if isinstance(window, int) and window > 0 else None,
                chunk=self._chunk if kind == "chunked_attention" else None,
            ),
            softcap=float(softcap) if isinstance(softcap, int | float) else None,
            has_sinks=isinstance(kwargs.get("s_aux"), Tensor),
        )

    def checked(self) -> list[LayerSpec]:
        """Return the recorded layers.

        Raises:
            UnfitError: if a call is not supported.
        """
        if self.unsupported:
            raise UnfitError(self.unsupported)
        return self.layers


@torch.inference_mode()
def probe_layers(checkpoint: Checkpoint, hook: AttentionHook) -> list[LayerSpec]:
    """Run the model on one token without a cache, and return the attention layers in order.

    Raises:
        UnfitError: if the model does not use transformers' attention interface, or needs a feature
            that Nereid's attention does not support.
    """
    token = _one_token(checkpoint)
    arguments = {}
    if ModelCall(checkpoint.model).takes("logits_to_keep"):
        arguments["logits_to_keep"] = torch.zeros(1, dtype=torch.int64, device=checkpoint.device)
    layers = record_layers(
        checkpoint.text_config,
        hook,
        lambda: checkpoint.model(
            input_ids=token, position_ids=torch.zeros_like(token), use_cache=False, **arguments
        ),
    )
    if not layers:
        raise UnfitError("it does not use transformers' attention interface")
    return layers


def record_layers(
    config: PretrainedConfig, hook: AttentionHook, run: Callable[[], object]
) -> list[LayerSpec]:
    """Call `run`, and return the attention layers that run in this call, in order.

    Args:
        config: the config of the layers.
        hook: the engine's entry in transformers' attention interface.
        run: runs a model, or a part of a model, on one token.

    Raises:
        UnfitError: if the model needs a feature that Nereid's attention does not support.
    """
    recorder = _Recorder(config)
    with hook.serving(recorder):
        run()
    return recorder.checked()


@torch.inference_mode()
def probe_rows(checkpoint: Checkpoint, hook: AttentionHook) -> list[LayerSpec]:
    """Run the model on one token with a cache for recurrent state. Return the attention layers.

    The list is empty for a model without attention.

    Raises:
        UnfitError: if the model accepts no cache, has no recurrent state, or needs a feature that
            Nereid's attention does not support.
    """
    call = ModelCall(checkpoint.model)
    if call.cache_name is None:
        raise UnfitError("it accepts no cache")
    cache = make_cache(checkpoint.model.config)
    token = _one_token(checkpoint)
    return record_layers(
        checkpoint.text_config,
        hook,
        lambda: call(token, num_logits=1, position_ids=torch.zeros_like(token), cache=cache),
    )


def plain_token_ids(checkpoint: Checkpoint) -> list[int]:
    """Return token ids for test inputs. No id belongs to a special token.

    Special tokens, such as tokens for images, padding or the end of a text, can change the forward
    pass of a model.
    """
    size = checkpoint.vocab_size
    special = set(checkpoint.eos_token_ids)
    for config in (checkpoint.model.config, checkpoint.text_config):
        for name, value in config.to_dict().items():
            if name.endswith(("token_id", "token_index")) and isinstance(value, int):
                special.add(value)
    # Special tokens that the config does not name are usually at the beginning or at the end of the
    # vocabulary.
    middle = range(size // 8, max(size // 8 + 1, size // 2))
    return [token_id for token_id in middle if token_id not in special] or list(range(size))


def _one_token(checkpoint: Checkpoint) -> Tensor:
    return torch.tensor([[plain_token_ids(checkpoint)[0]]], device=checkpoint.device)
