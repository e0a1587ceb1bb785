"""Builds the prompts of completions with the field `suffix`.

A model that can fill in the middle was trained on prompts with markers. The markers separate the
text before the gap from the text after the gap. The tokenizer has a special token for each marker.

Example: the prompt "a = " and the suffix " + 1" become the prompt
"<|fim_prefix|>a = <|fim_suffix|> + 1<|fim_middle|>", and the model continues with the middle.
"""

import json
from dataclasses import dataclass

from nereid_client.errors import ApiError
from nereid_client.language_model.backend import Backend, Generation

_NO_ADDED_TOKENS = json.dumps({"add_special_tokens": False})
"""The sampling parameters with which the tokenizer adds no token, such as `<s>`, to a text."""


@dataclass(frozen=True)
class MarkerFormat:
    """A prompt format that asks a model to fill a gap between two texts.

    Special tokens, called markers, separate the two texts in the prompt.

    Attributes:
        markers: the markers, which must be special tokens of the tokenizer.
        template: the pieces of the prompt. The pieces "{prefix}" and "{suffix}" are replaced by the
            two texts.
    """

    markers: tuple[str, ...]
    template: tuple[str, ...]

    def prompt(self, prefix: str, suffix: str) -> str:
        """Return a prompt that makes the model generate the text between `prefix` and `suffix`."""
        texts = {"{prefix}": prefix, "{suffix}": suffix}
        return "".join(texts.get(part, part) for part in self.template)


def _prefix_first(begin: str, gap: str, end: str) -> MarkerFormat:
    """Return a fill-in-the-middle format in which the prefix comes before the suffix."""
    return MarkerFormat((begin, gap, end), (begin, "{prefix}", gap, "{suffix}", end))


FORMATS = (
    _prefix_first("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    _prefix_first("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    _prefix_first("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    _prefix_first("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    _prefix_first("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    _prefix_first("▁<PRE>", "▁<SUF>", "▁<MID>"),
    MarkerFormat(("[SUFFIX]", "[PREFIX]"), ("[SUFFIX]", "{suffix}", "[PREFIX]", "{prefix}")),
)
"""The known formats. A tokenizer is compared with the formats in this order."""


class FillInMiddle:
    """Creates fill-in-the-middle prompts for one language model.

    Such a prompt contains the text before a gap and the text after the gap. The model generates the
    text in the gap.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._format: MarkerFormat | None = None

    async def prompt(self, prefix: str, suffix: str, request_id: str) -> str:
        """Return a prompt that makes the model generate the text between `prefix` and `suffix`.

        Raises:
            ApiError: 400 if the tokenizer has the markers of no known format.
            BackendError: the tokenizer does not answer.
        """
        if self._format is None:
            self._format = await self._find_format(request_id)
        return self._format.prompt(prefix, suffix)

    async def _find_format(self, request_id: str) -> MarkerFormat:
        """Return the first format whose markers are all special tokens of the tokenizer."""
        for form in FORMATS:
            if await self._has_tokens(form.markers, request_id):
                return form
        raise ApiError(
            400,
            "suffix is not supported, because the tokenizer of this model has no known markers for "
            "filling in the middle. Remove suffix, or write the markers into the prompt.",
            param="suffix",
        )

    async def _has_tokens(self, markers: tuple[str, ...], request_id: str) -> bool:
        """Return whether the tokenizer has a separate token for every marker."""
        for marker in markers:
            if not await self._is_one_token(marker, request_id):
                return False
        return True

    async def _is_one_token(self, marker: str, request_id: str) -> bool:
        """Return whether the tokenizer has a separate token for the marker.

        Some tokenizers encode every unknown text as the same token, such as `<unk>`. The method
        therefore decodes the token, and compares the decoded text with the marker.
        """
        # `tokenize` accepts only a `Generation` object, so the marker becomes the prompt of a
        # `Generation`.
        generation = Generation(
            f"{request_id}-fim", text_input=marker, sampling_parameters=_NO_ADDED_TOKENS
        )
        token_ids = await self._backend.tokenize(generation)
        if len(token_ids) != 1:
            return False
        text = await self._backend.detokenize(
            generation.request_id, token_ids, skip_special_tokens=False
        )
        # When some tokenizers decode a special token, they add a space before or after the token.
        return text.strip() == marker
