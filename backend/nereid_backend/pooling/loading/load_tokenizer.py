# SPDX-License-Identifier: Apache-2.0
"""Loads the tokenizer of an embedding, rerank or classification checkpoint."""

from tokenizers.normalizers import Lowercase, Normalizer, Sequence
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerBase

from nereid_backend.errors import ModelError, UnsupportedModelError
from nereid_backend.pooling.loading.checkpoint_spec import TOKENS, CheckpointSpec
from nereid_backend.pooling.loading.sentence_modules import read_tokenizer_arguments
from nereid_backend.text.chat_template_files import complete_chat_template
from nereid_backend.text.vocabulary_files import (
    check_vocabulary_file,
    describe_tokenizer_error,
)
from nereid_backend.tokenizer_file import apply_tokenizer_file


def load_tokenizer(spec: CheckpointSpec) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint, and adapt it to the checkpoint's rules.

    If the checkpoint requires it, the tokenizer converts texts to lower case. The tokenizer also
    converts each marker, such as "[unused0] " before the queries of ColBERT, to one token.

    Raises:
        ModelError: the tokenizer is missing or broken.
        UnsupportedModelError: the model classifies single tokens, but the tokenizer cannot report
            the characters of each token.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            spec.folder,
            local_files_only=True,
            trust_remote_code=False,
            **read_tokenizer_arguments(spec.folder),
        )
        apply_tokenizer_file(tokenizer, spec.folder)
    except Exception as error:
        # If a file is broken, the tokenizers library raises a plain Exception, not a subclass.
        raise ModelError(
            f"the tokenizer in {spec.folder} cannot be loaded: "
            f"{describe_tokenizer_error(spec.folder, error)}"
        ) from error
    check_vocabulary_file(spec.folder, tokenizer)
    tokenizer.chat_template = complete_chat_template(tokenizer.chat_template, spec.folder)
    limit = tokenizer.model_max_length
    if type(limit) not in (int, float):
        raise ModelError(
            f"{spec.folder}: model_max_length of the tokenizer must be a number, but it is "
            f"{limit!r}. Correct tokenizer_config.json."
        )
    if spec.lower_case:
        _convert_to_lower_case(tokenizer)
    if spec.loader == TOKENS and not tokenizer.is_fast:
        raise UnsupportedModelError(
            f"{spec.architecture} requires a tokenizer that reports the characters of each token, "
            f"but {type(tokenizer).__name__} does not. Add a tokenizer.json to {spec.folder}."
        )
    _add_markers_as_tokens(tokenizer, spec)
    return tokenizer


def _convert_to_lower_case(tokenizer: PreTrainedTokenizerBase) -> None:
    """Change a tokenizer so that the tokenizer first converts each text to lower case.

    Only fast tokenizers, which have the attribute `backend_tokenizer`, are changed.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    parts: list[Normalizer] = [Lowercase()]
    if backend.normalizer is not None:
        parts.append(backend.normalizer)
    backend.normalizer = Sequence(parts)


def _add_markers_as_tokens(tokenizer: PreTrainedTokenizerBase, spec: CheckpointSpec) -> None:
    """Change a tokenizer so that the tokenizer converts each marker to one token.

    A marker, such as "[unused0] ", precedes each query or document of a model such as ColBERT.
    Without this function, a tokenizer may split the marker into several tokens, because the marker
    is an ordinary entry of the vocabulary. A marker that the vocabulary does not contain stays
    ordinary text, as in sentence-transformers.
    """
    vocabulary = tokenizer.get_vocab()
    for _, marker in spec.late_interaction.markers:
        # A marker, such as "[Q] ", ends with a space. The vocabulary may contain the marker either
        # with the space or without the space.
        entry = marker if marker in vocabulary else marker.strip()
        if entry in vocabulary and tokenizer.tokenize(entry) != [entry]:
            token = AddedToken(entry, normalized=False, special=True)
            tokenizer.add_tokens([token], special_tokens=True)
