# SPDX-License-Identifier: Apache-2.0
"""Determines the largest length of a sequence for which a model computes correct logits."""

from dataclasses import dataclass

from transformers import PretrainedConfig

# The length limit for models without position embeddings. The configs of such models have no limit.
_NO_MODEL_LIMIT = 2**17
_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """The length limit of a sequence in tokens, and a clause that names the source of the limit."""

    num_tokens: int
    reason: str


def model_limit(config: PretrainedConfig, *, is_batched: bool = True) -> LengthLimit:
    """Return the largest length of a sequence for which a model computes correct logits.

    The limit is usually the model's own limit, such as max_position_embeddings. Batches can have a
    lower limit: some models compute all tokens of a batch differently if the longest sequence
    exceeds a threshold. Other models count positions in the batch instead of the sequence, and use
    these positions above a threshold.

    Args:
        config: the config of the decoder.
        is_batched: whether several sequences share a forward pass.
    """
    own_limit = _limit_in_config(config)
    if not is_batched:
        return own_limit
    limits = [own_limit, *_rope_limits(config), *_attention_scaling_limits(config)]
    return min(limits, key=lambda limit: limit.num_tokens)


def _attention_scaling_limits(config: PretrainedConfig) -> list[LengthLimit]:
    """Return the length limits of models that scale the attention depending on the position.

    The code of these models counts positions in the batch instead of the sequence, so the scale is
    wrong if several sequences share a batch. Below a threshold, the scale is the same at all
    positions, so the threshold is a limit. The threshold is the field floor_scale or
    log_scaling_n_floor of the config. The result is empty if the config has no threshold.
    """
    fields = ["log_scaling_n_floor"]
    if getattr(config, "attn_temperature_tuning", None):
        fields.append("floor_scale")  # has no effect without attn_temperature_tuning
    limits = []
    for field in fields:
        threshold = getattr(config, field, None)
        if isinstance(threshold, int | float) and threshold > 0:
            reason = f"{field}, because the model counts positions above this limit in the batch"
            limits.append(LengthLimit(int(threshold), reason))
    return limits


def _rope_limits(config: PretrainedConfig) -> list[LengthLimit]:
    """Return the length limits that follow from the rotary embeddings of a model.

    The types "longrope" and "dynamic" depend on the longest sequence in a batch: if this sequence
    exceeds a threshold, the embeddings of all sequences change. The threshold is then a limit. The
    result is empty for a config without a threshold, because transformers then changes the
    embeddings only above the model's own limit.
    """
    limits = []
    for rope in _rope_parameters(config):
        rope_type = rope.get("rope_type")
        threshold = rope.get("original_max_position_embeddings")
        depends_on_batch = rope_type in ("longrope", "dynamic")
        if depends_on_batch and isinstance(threshold, int):
            reason = (
                f"original_max_position_embeddings of {rope_type} position embeddings, because a "
                "longer request would change the output of the other requests in its batch"
            )
            limits.append(LengthLimit(threshold, reason))
    return limits


def _limit_in_config(config: PretrainedConfig) -> LengthLimit:
    """Return the length limit in a model's config, or the default if the config has no limit.

    YaRN extends the limit by a factor. Some configs contain only the original limit, because users
    add the fields of YaRN to config.json and leave max_position_embeddings unchanged. Example: a
    max_position_embeddings of 32768 and a YaRN factor of 4 give the limit 131072.
    """
    for name in _LENGTH_FIELDS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            limits = [LengthLimit(value, name), *_yarn_limits(config)]
            return max(limits, key=lambda limit: limit.num_tokens)
    return LengthLimit(_NO_MODEL_LIMIT, "the default for models without a limit")


def _yarn_limits(config: PretrainedConfig) -> list[LengthLimit]:
    """Return the lengths to which the rotary embeddings of the type "yarn" extend a model."""
    limits = []
    for rope in _rope_parameters(config):
        factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
        if rope.get("rope_type") != "yarn":
            continue
        if isinstance(factor, int | float) and isinstance(original, int):
            reason = "factor * original_max_position_embeddings of yarn position embeddings"
            limits.append(LengthLimit(int(factor * original), reason))
    return limits


def sparse_limit(config: PretrainedConfig) -> LengthLimit | None:
    """Return the largest length of a sequence for which sparse attention attends to every token.

    Return None for a model without sparse attention. Examples: a model that selects 2048 tokens
    (index_topk 2048) attends to every token of a sequence of up to 2048 tokens. A model that
    selects 16 blocks of 64 tokens (index_topk_blocks 16, index_block_size 64) attends to every
    token of a sequence of up to 1024 tokens.
    """
    num_tokens = getattr(config, "index_topk", None)
    if isinstance(num_tokens, int):
        return LengthLimit(num_tokens, f"index_topk {num_tokens}")
    num_blocks = getattr(config, "index_topk_blocks", None)
    block_size = getattr(config, "index_block_size", None)
    if isinstance(num_blocks, int) and isinstance(block_size, int):
        reason = f"index_topk_blocks {num_blocks} of {block_size}"
        return LengthLimit(num_blocks * block_size, reason)
    return None


def _rope_parameters(config: PretrainedConfig) -> list[dict[str, object]]:
    """Return the dicts that describe the rotary embeddings in a config.

    A config contains one dict for all layers, or one dict for each type of layer.

    Example: {"full": {"rope_type": "default"}, "local": {"rope_type": "yarn"}} gives the two inner
    dicts, and {"rope_type": "yarn"} gives itself.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return []
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]
