# SPDX-License-Identifier: Apache-2.0
"""Prefill attention of the library cuDNN.

torch's function for scaled dot product attention calls cuDNN. cuDNN requires contiguous keys and
values, so it computes only prompts without cached tokens. The speed has not been measured on a GPU.
"""

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from nereid_backend.attention.gpu.backends.attention_backend import (
    LayerInputs,
    Situation,
    first_refusal,
)
from nereid_backend.attention.layers import LayerSpec

_DTYPES = (torch.bfloat16, torch.float16)


class CudnnSdpa:
    """The fused attention of cuDNN; see `AttentionBackend`."""

    name = "cuDNN"
    situations = frozenset({Situation.PROMPT})
    # This constant makes torch use cuDNN. Tests on a machine without a GPU replace the constant,
    # because cuDNN needs a GPU.
    implementation = SDPBackend.CUDNN_ATTENTION

    def refusal(self, spec: LayerSpec, block_size: int, dtype: torch.dtype) -> str | None:  # noqa: ARG002
        """Return the reason why cuDNN cannot compute a layer; None if cuDNN can compute it.

        See `AttentionBackend.refusal` for the arguments.
        """
        if dtype not in _DTYPES:
            return f"it does not support {dtype}"
        return first_refusal(spec, supports_window=False, supports_softcap=False)

    def attend(self, situation: Situation, inputs: LayerInputs, out: Tensor) -> None:  # noqa: ARG002
        """Compute the attention of the step's prompts with one call of cuDNN for each prompt.

        The prompts have no cached tokens, so the cache is not read. The layer has neither an
        attention window nor a softcap, because `refusal` refuses such layers.
        `AttentionBackend.attend` documents the arguments. Mutates: out.
        """
        assert inputs.new is not None, "a step of prompts has its keys and values"
        spec = inputs.call.spec
        key, value = inputs.new
        with sdpa_kernel(self.implementation):  # makes torch's function call cuDNN
            for prefill in inputs.batch.prefills:
                tokens = slice(prefill.start, prefill.end)
                # The tensors are [1, num_heads, num_tokens, dim], as torch's function requires.
                result = functional.scaled_dot_product_attention(
                    inputs.query[None, :, tokens],
                    key[None, :, tokens],
                    value[None, :, tokens],
                    is_causal=True,
                    scale=inputs.call.scale,
                    enable_gqa=spec.num_heads != spec.num_kv_heads,
                )
                out[tokens] = result[0].transpose(0, 1)
