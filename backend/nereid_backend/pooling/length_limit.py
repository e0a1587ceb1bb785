# SPDX-License-Identifier: Apache-2.0
"""Determines the length limit of the inputs of a pooling model."""

from nereid_backend.errors import ConfigError
from nereid_backend.model.forward_path.length_limits import LengthLimit, model_limit
from nereid_backend.pooling.forward.choose_forward import position_table
from nereid_backend.pooling.loading.checkpoint_spec import CheckpointSpec
from nereid_backend.pooling.loading.load_encoder import Encoder
from nereid_backend.pooling.pooling_config import PoolingConfig

# Tokenizers without a length limit return a huge number as their limit.
_NO_LIMIT = 10**9


def length_limit(config: PoolingConfig, spec: CheckpointSpec, encoder: Encoder) -> int:
    """Return the largest number of tokens that an input may have.

    The limit is the setting max_model_len. If this setting is missing, the limit is the model's own
    limit, or a smaller length that the checkpoint's files recommend.

    Raises:
        ConfigError: the setting max_model_len is larger than the model's own limit.
    """
    own_limit = _own_limit(spec, encoder)
    configured = config.max_model_len
    if configured is None:
        recommended = _limit_in_files(spec, encoder)
        return min(own_limit.num_tokens, recommended or own_limit.num_tokens)
    if configured > own_limit.num_tokens:
        raise ConfigError(
            f"max_model_len: the value must be at most {own_limit.num_tokens} "
            f"({own_limit.reason}), but it is {configured}."
        )
    return configured


def _own_limit(spec: CheckpointSpec, encoder: Encoder) -> LengthLimit:
    """Return the largest length for which the model computes correct outputs.

    The length is limited by the config, and by the number of position embeddings.
    """
    limit = model_limit(spec.config.get_text_config())
    num_embeddings = _num_position_embeddings(encoder)
    if num_embeddings is not None and num_embeddings < limit.num_tokens:
        return LengthLimit(num_embeddings, "the number of position embeddings")
    return limit


def _limit_in_files(spec: CheckpointSpec, encoder: Encoder) -> int | None:
    """Return the length limit that the checkpoint's files recommend; None if there is none."""
    limit = spec.max_seq_length or encoder.tokenizer.model_max_length
    return int(limit) if 1 <= limit < _NO_LIMIT else None


def _num_position_embeddings(encoder: Encoder) -> int | None:
    """Return the number of token positions that have a position embedding.

    Return None if the model has no table of position embeddings. If the table has a padding
    embedding, the positions of tokens begin after the padding embedding.
    """
    table = position_table(encoder)
    if table is None:
        return None
    size = int(table.weight.shape[0])
    return size if table.padding_idx is None else size - table.padding_idx - 1
