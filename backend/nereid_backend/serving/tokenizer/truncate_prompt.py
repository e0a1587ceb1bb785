# SPDX-License-Identifier: Apache-2.0
"""Reads the field `truncate_prompt_tokens`. Truncation removes tokens at the start of a prompt."""

from collections.abc import Mapping
from typing import Any

from nereid_backend.errors import RequestError
from nereid_backend.serving.tokenizer.request_fields import RequestFields

_FIELD = "truncate_prompt_tokens"
_AS_MANY_AS_FIT = -1


def read_num_kept(fields: Mapping[str, Any], max_model_len: int) -> int | None:
    """Return the number of tokens that truncation keeps; None if the prompt is not truncated.

    Truncation keeps the last tokens of a prompt. The value -1 means as many tokens as fit. Example:
    -1 with max_tokens=100 and max_model_len=4096 returns 3996.

    Args:
        fields: the request's fields.
        max_model_len: the length limit of the prompt and the output together, in tokens.

    Raises:
        RequestError: the value is neither -1 nor at least 1.
    """
    # Validate only this field. `check` refuses values below -1.
    num_kept = RequestFields.check({_FIELD: fields.get(_FIELD)}).truncate_prompt_tokens
    if num_kept is None:
        return None
    if num_kept == 0:
        raise RequestError(f"{_FIELD}: the value must be -1 or at least 1, but the request has 0.")
    if num_kept != _AS_MANY_AS_FIT:
        return num_kept
    # Leave space for max_tokens new tokens. A wrong value of max_tokens is refused later.
    max_tokens = fields.get("max_tokens")
    if isinstance(max_tokens, int) and 0 < max_tokens < max_model_len:
        return max_model_len - max_tokens
    return max_model_len - 1
