# SPDX-License-Identifier: Apache-2.0
"""Determines the attention layers of a model.

The model computes one token, and a recorder stores the properties of each attention call.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from nereid_backend.attention.layers import LayerSpec, LayerWindow
from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.load_checkpoint import Checkpoint
from nereid_backend.paths.model_call import ModelCall, UnfitError
from nereid_backend.paths.recurrent_cache import make_cache


class _AttentionRecorder:
    """An attention function that records its calls in a forward pass over one token.

    A single token attends only to itself, so the function returns the value of the token.

    Attributes:
        layers: the recorded layers, in the order of their calls.
        unsupported: the reason why the last unsupported call is not supported; None if all calls
            are supported.
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
        """Record the properties of an attention layer, and return the result of its attention.

        The pass computes one token, which attends only to itself. The result of each query head is
        therefore the value of the token.

        If the call is not supported, store the reason in `unsupported`. The pass continues, and
        `supported_layers` raises the error after the pass.

        Args:
            module: the attention layer.
            query: [1, num_heads, 1, key_dim].
            key: [1, num_kv_heads, 1, key_dim].
            value: [1, num_kv_heads, 1, value_dim].
            kwargs: other arguments of transformers, such as sliding_window.

        Returns:
            The result, [1, 1, num_heads, value_dim].
        """
        reason = _why_unsupported(key, kwargs)
        if reason is not None:
            self.unsupported = reason
        spec = self._layer_spec(query, key, value, kwargs)
        self.layers.append(spec)
        num_heads_per_value = spec.num_heads // spec.num_kv_heads
        return value.repeat_interleave(num_heads_per_value, dim=1).transpose(1, 2)

    def _layer_spec(
        self, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, object]
    ) -> LayerSpec:
        """Determine the properties of a layer from the arguments of its attention call.

        `query`, `key` and `value` have the shape [1, number of heads, 1, size of a head], and
        `kwargs` contains transformers' other arguments.
        """
        softcap = kwargs.get("softcap")
        return LayerSpec(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            window=self._window(kwargs.get("sliding_window")),
            softcap=float(softcap) if isinstance(softcap, int | float) else None,
            # In transformers, the argument `s_aux` contains the attention sinks of a layer.
            has_sinks=isinstance(kwargs.get("s_aux"), Tensor),
        )

    def _window(self, sliding_window: object) -> LayerWindow:
        """Return the window of the layer that is recorded next.

        `sliding_window` is an argument of the attention call. If the argument is not a positive
        number, the layer has no sliding window.
        """
        size = sliding_window if isinstance(sliding_window, int) and sliding_window > 0 else None
        layer_index = len(self.layers)
        # Some configs contain no layer types, or fewer types than the model has layers.
        has_type = layer_index < len(self._layer_types)
        is_chunked = has_type and self._layer_types[layer_index] == "chunked_attention"
        return LayerWindow(size=size, chunk=self._chunk if is_chunked else None)

    def supported_layers(self) -> list[LayerSpec]:
        """Return the recorded layers.

        Raises:
            UnfitError: if a call is not supported.
        """
        if self.unsupported:
            raise UnfitError(self.unsupported)
        return self.layers


def _why_unsupported(key: Tensor, kwargs: dict[str, object]) -> str | None:
    """Return the reason why Nereid does not support a call of attention; None if it is supported.

    `key` are the keys of a pass over one token, [1, num_kv_heads, 1, key_dim]. `kwargs` contains
    transformers' other arguments of the call.
    """
    batch_size, num_tokens = key.shape[0], key.shape[2]
    if batch_size != 1 or num_tokens != 1:
        return f"it calls attention with keys of shape {tuple(key.shape)}"
    if kwargs.get("position_bias") is not None:
        return "its attention adds a position bias"
    return None


@torch.inference_mode()
def probe_layers(checkpoint: Checkpoint, hook: AttentionHook) -> list[LayerSpec]:
    """Run the model on one token without a cache, and return the attention layers that it calls.

    The layers are in the order of the calls. The arguments of each call show the properties of the
    layer, such as the number of heads and the sliding window.

    Raises:
        UnfitError: if the model does not use transformers' attention interface, or needs a feature
            that Nereid's attention does not support.
    """
    token = _one_token(checkpoint)
    arguments: dict[str, Any] = {
        "input_ids": token,
        "position_ids": torch.zeros_like(token),
        "use_cache": False,
    }
    if ModelCall(checkpoint.model).takes("logits_to_keep"):
        # `logits_to_keep` selects the tokens whose logits are needed. The forward path `packed`
        # passes a tensor of token indices. Pass a tensor here, too, so that a model that accepts
        # only a number fails during this test.
        arguments["logits_to_keep"] = torch.zeros(1, dtype=torch.int64, device=checkpoint.device)
    layers = record_layers(checkpoint.text_config, hook, lambda: checkpoint.model(**arguments))
    if not layers:
        raise UnfitError("it does not use transformers' attention interface")
    return layers


def record_layers(
    config: PretrainedConfig, hook: AttentionHook, run: Callable[[], object]
) -> list[LayerSpec]:
    """Call `run`, and return the attention layers that `run` calls, in the order of the calls.

    While `run` is called, transformers calls a recorder as the attention function of each layer.

    Args:
        config: the config of the layers.
        hook: Nereid's attention function, which transformers calls in each layer.
        run: runs a model, or a part of a model, on one token.

    Raises:
        UnfitError: if the model needs a feature that Nereid's attention does not support.
    """
    recorder = _AttentionRecorder(config)
    with hook.serving(recorder):
        run()
    return recorder.supported_layers()


@torch.inference_mode()
def probe_recurrent_model(checkpoint: Checkpoint, hook: AttentionHook) -> list[LayerSpec]:
    """Run a model with recurrent states on one token, and return its attention layers.

    The list is empty if the model has only convolutions or recurrences, and no attention.

    Raises:
        UnfitError: if the model accepts no cache, has no recurrent state, or needs a feature that
            Nereid's attention does not support.
    """
    call = ModelCall(checkpoint.model)
    if call.cache_name is None:
        raise UnfitError("it accepts no cache")
    cache = make_cache(checkpoint.model.config)  # an UnfitError if the model has no recurrent state
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
    special_ids = _special_token_ids(checkpoint)
    # Special tokens that the config does not name are usually at the beginning or at the end of the
    # vocabulary, so the test inputs consist of tokens from its middle.
    vocab_size = checkpoint.vocab_size
    first = vocab_size // 8
    end = max(first + 1, vocab_size // 2)
    plain_ids = [token_id for token_id in range(first, end) if token_id not in special_ids]
    return plain_ids or list(range(vocab_size))


def _special_token_ids(checkpoint: Checkpoint) -> set[int]:
    """Return the ids of all special tokens in the configs of a checkpoint.

    Example: the config values eos_token_id 2 and image_token_index 9 give {2, 9}.
    """
    special_ids = set(checkpoint.eos_token_ids)
    for config in (checkpoint.model.config, checkpoint.text_config):
        for name, value in config.to_dict().items():
            if name.endswith(("token_id", "token_index")) and isinstance(value, int):
                special_ids.add(value)
    return special_ids


def _one_token(checkpoint: Checkpoint) -> Tensor:
    return torch.tensor([[plain_token_ids(checkpoint)[0]]], device=checkpoint.device)
