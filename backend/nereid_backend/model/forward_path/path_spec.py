# SPDX-License-Identifier: Apache-2.0
"""Describes a forward path, which is a way in which the engine runs a model."""

from collections.abc import Callable
from dataclasses import dataclass

from nereid_backend.attention.layers import LayerSpec
from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.load_checkpoint import Checkpoint
from nereid_backend.paths.model_call import Sizes, UnfitError
from nereid_backend.step_runner import ForwardPath


@dataclass(frozen=True, slots=True)
class PathSpec:
    """Describes one way in which the engine can run a certain model (a forward path).

    Attributes:
        name: "packed", "rows", "padded" or "single".
        build: builds the path with the given sizes.
        layers: the attention layers whose keys and values are stored in blocks.
        hook: the attention that the model must use, or None for the model's own attention.
        detail: a clause that describes a variant of the path, for the log; empty for the normal
            variant.
        bytes_per_sequence: the number of bytes outside of blocks that a running sequence needs.
        bytes_per_token: the number of bytes outside of blocks that a token needs.
        shares_blocks: whether the blocks of a sequence contain its whole state. If True, sequences
            with the same tokens can share blocks, and tokens can be removed from the end of a
            sequence. If False, speculative decoding is off, and the prefix cache is on only if
            `has_snapshots` is True.
        whole_prefill: whether a prompt must be computed in one forward pass.
        is_batched: whether several sequences share a forward pass.
        has_snapshots: whether a sequence gets the same logits if it continues from a copy of its
            recurrent state. If True, there is a prefix cache even if `shares_blocks` is False.
        uses_generated_reference: whether the logits of the path are compared with the logits of
            transformers' `generate`. If False, the logits of the path are compared with the logits
            of one pass over each whole test sequence.
    """

    name: str
    build: Callable[[Sizes], ForwardPath]
    layers: list[LayerSpec]
    hook: AttentionHook | None = None
    detail: str = ""
    bytes_per_sequence: int = 0
    bytes_per_token: int = 0
    shares_blocks: bool = True
    whole_prefill: bool = False
    is_batched: bool = True
    has_snapshots: bool = False
    uses_generated_reference: bool = False

    @property
    def removes_tokens(self) -> bool:
        """Whether tokens, for example draft tokens, can be removed from the end of a sequence."""
        return self.shares_blocks and not self.whole_prefill


def set_attention(checkpoint: Checkpoint, hook: AttentionHook | None) -> None:
    """Let a model call Nereid's attention function (`hook`), or its own attention code.

    A forward path that stores keys and values in blocks needs Nereid's attention function. The
    logits of the unmodified model are computed with the model's own attention.

    Args:
        checkpoint: the model. Mutated.
        hook: Nereid's attention function, which transformers then calls in each layer. None
            selects the model's own attention in torch.

    Raises:
        UnfitError: if the attention of the model cannot be set.
    """
    if not checkpoint.takes_hook:
        if hook is not None:
            raise UnfitError("it does not use transformers' attention interface")
        return
    name = "eager" if hook is None else hook.name
    checkpoint.model.set_attn_implementation(name)
    # If transformers cannot change the attention of a model, it only logs a warning. Raise an error
    # in this case, because the model would use its own attention without the masks that this
    # attention needs.
    config = checkpoint.model.config
    actual = getattr(config, "text_config", config)._attn_implementation
    if actual != name:
        raise UnfitError(f"its attention cannot be changed from {actual}")
