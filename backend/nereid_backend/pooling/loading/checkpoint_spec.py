# SPDX-License-Identifier: Apache-2.0
"""The description of a checkpoint: its task, its kinds of output, and its layers."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from nereid_backend.pooling.loading.late_interaction_files import LateInteraction
from nereid_backend.pooling.loading.sentence_modules import ModuleSpec

# The kinds of models. For each kind except RETRIEVAL, transformers has an auto class that loads the
# model. A RETRIEVAL model is loaded by the class that its config names.
BASE = "base"  # a model without a head, whose token vectors are pooled
SEQUENCE = "sequence"  # a classifier or reranker of whole texts
TOKENS = "tokens"  # a classifier of single tokens
MASKED = "masked"  # a masked language model, whose logits determine SPLADE weights
CAUSAL = "causal"  # a language model that reranks by answering "yes" or "no"
TOWERS = "towers"  # a model with a text encoder and an image encoder
IMAGE_CAUSAL = "image_causal"  # a vision-language model that reranks by answering "yes" or "no"
RETRIEVAL = "retrieval"  # a model with one vector for each token of a page
# The class name of a RETRIEVAL model ends with this text.
RETRIEVAL_HEAD = "ForRetrieval"


class AnswerTokens(NamedTuple):
    """The tokens whose logits give the score of a generative reranker.

    Attributes:
        yes: the token id of "yes".
        no: the token id of "no". The score is the logit of "yes" minus the logit of "no". If `no`
            is None, the score is the logit of "yes" alone.
    """

    yes: int
    no: int | None


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """The description of a checkpoint. It is read from the checkpoint's files.

    Attributes:
        folder: the folder of the transformers model.
        config: the model's config.
        architecture: the name of the model's class in the config.
        task: "embed", "rerank" or "classify".
        kinds: the kinds of output. The default kind is first (see PoolingItem.kind).
        loader: the kind of model that is loaded: BASE, SEQUENCE, TOKENS, MASKED, CAUSAL, TOWERS,
            IMAGE_CAUSAL or RETRIEVAL.
        has_modules: whether the checkpoint has a modules.json.
        takes_messages: whether inputs are converted to chat messages, which the checkpoint's
            processor renders. The messages can contain images.
        renders_messages: whether the files of sentence-transformers require that texts are rendered
            with the chat template of the tokenizer.
        message_format: the form of a message's content in these files: "flat" (a text),
            "structured" (a list of parts), or another value if the files do not define the form.
        poolers: the methods that combine token vectors into one vector. The results of several
            methods are concatenated. An empty tuple means the default for the model.
        include_prompt: whether the tokens of a prompt are pooled, too.
        token_modules: the modules that replace each token vector by a new token vector, in order.
        vector_modules: the modules that convert the pooled vector to a vector, in order.
        normalizes: whether the vector is scaled to length 1. None means the default for the model.
        activation: the activation of scores: "none", "sigmoid" or "softmax".
        answer_tokens: for a generative reranker, the token ids of "yes" and "no" in the
            checkpoint's files. None means that the files contain no token ids.
        template_kwargs: the variables of the chat template.
        splade: the SPLADE pooling: "max" or "sum", and the number of times that log1p is applied.
        late_interaction: for a checkpoint with only multi-vector output, the rules for queries and
            documents.
        prompts: the texts of prompts by name.
        default_prompt_name: the name of the prompt for inputs that name no prompt.
        max_seq_length: the length limit of inputs in tokens. None means that the files contain no
            limit.
        truncate_dim: the number of elements of a dense vector that are returned if the request does
            not contain `dimensions`. None means all elements.
        max_active_dims: the largest number of weights of a sparse vector in a SPLADE model. None
            means that there is no limit.
        lower_case: whether text is converted to lower case before the text is tokenised.
    """

    folder: Path
    config: PretrainedConfig
    architecture: str
    task: str
    kinds: tuple[str, ...] = ()
    loader: str = BASE
    has_modules: bool = False
    takes_messages: bool = False
    renders_messages: bool = False
    message_format: str | None = None
    poolers: tuple[str, ...] = ()
    include_prompt: bool = True
    token_modules: tuple[ModuleSpec, ...] = ()
    vector_modules: tuple[ModuleSpec, ...] = ()
    normalizes: bool | None = None
    activation: str = "none"
    answer_tokens: AnswerTokens | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    splade: tuple[str, int] = ("max", 1)
    late_interaction: LateInteraction = field(default_factory=LateInteraction)
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    max_seq_length: int | None = None
    truncate_dim: int | None = None
    max_active_dims: int | None = None
    lower_case: bool = False
