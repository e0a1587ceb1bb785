# SPDX-License-Identifier: Apache-2.0
"""Computes the vectors or scores of prepared items with a loaded model."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from nereid_backend.cpu_threads import CpuThreads, set_cpu_threads
from nereid_backend.errors import ModelError, first_line
from nereid_backend.pooling.describe_model import describe_model
from nereid_backend.pooling.forward.choose_forward import ChosenForward, own_attention
from nereid_backend.pooling.forward.image_forward import ImageForward
from nereid_backend.pooling.forward.image_text_towers import (
    image_vectors,
    num_image_tokens,
    text_vectors,
)
from nereid_backend.pooling.forward.packed_texts import TokenBatch
from nereid_backend.pooling.forward.poolers import Ranges, pool
from nereid_backend.pooling.forward.pooling_forward import Head, PaddedForward, token_logits
from nereid_backend.pooling.forward.pooling_outputs import (
    dense_outputs,
    multi_vector_output,
    score_outputs,
    sparse_output,
    splade_outputs,
    token_score_outputs,
)
from nereid_backend.pooling.forward.self_check_texts import MODEL_ERRORS, random_batch
from nereid_backend.pooling.inputs.image_requests import TowerImages
from nereid_backend.pooling.inputs.prepare_items import ItemPreparer, Prepared
from nereid_backend.pooling.inputs.vision_language_prompts import (
    ChatPrompts,
    Prompts,
    RetrievalPrompts,
)
from nereid_backend.pooling.load_model import LoadedModel, load_model
from nereid_backend.pooling.loading.checkpoint_spec import (
    CAUSAL,
    MASKED,
    RETRIEVAL,
    TOWERS,
    AnswerTokens,
)
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.pooling.pooling_items import PoolingInfo, PoolingItem, Value
from nereid_backend.pooling.split_batch import split_batch

# The number of tokens of the text with which the layers are tested.
_TEST_TOKENS = 2

NOT_FINITE = (
    "the model's output contains numbers that are not finite. The data type may overflow (set "
    "dtype=float32), or the weights are broken."
)


class PoolingModel:
    """A loaded model that embeds, reranks or classifies.

    Attributes:
        info: the description of the loaded model.
        preparer: validates and tokenises items.
    """

    def __init__(self, loaded: LoadedModel, info: PoolingInfo, cpu_threads: CpuThreads) -> None:
        """Create the objects that prepare items and run the model. Only `load` calls `__init__`.

        Args:
            loaded: the loaded model.
            info: the description of the loaded model.
            cpu_threads: adjusts the number of torch's threads before each batch.
        """
        self._loaded = loaded
        self.info = info
        self._cpu_threads = cpu_threads
        # Builds the prompts of a vision-language model; None for other models.
        prompts = _vision_language_prompts(loaded)
        is_vision_language = prompts is not None
        # Runs a vision-language model on one prompt at a time; None for other models.
        self._image_forward = (
            ImageForward(loaded.encoder, loaded.spec) if is_vision_language else None
        )
        self.preparer = ItemPreparer(
            loaded.spec,
            info,
            loaded.encoder.tokenizer,
            text_prompts=loaded.prompts,
            images=_tower_images(loaded),
            prompts=prompts,
        )

    @classmethod
    def load(cls, config: PoolingConfig, progress: Callable[[str], None]) -> Self:
        """Load the checkpoint, and choose the method of computing batches.

        Args:
            config: the settings.
            progress: called with one line for each slow operation.

        Raises:
            ConfigError: the settings do not fit the checkpoint or the machine.
            ModelError: the checkpoint is missing, broken or not supported.
        """
        started = time.monotonic()
        cpu_threads = set_cpu_threads(config.num_threads)
        loaded = load_model(config, progress)
        info = describe_model(config, loaded, load_seconds=time.monotonic() - started)
        model = cls(loaded, info, cpu_threads)
        model._check_layers()
        return model

    def _check_layers(self) -> None:
        """Test the layers that follow the transformers model. Each layer computes a test input.

        The self-check of the transformers model does not run these layers. Without this test, a
        layer with a wrong size would fail in each request.

        Raises:
            ModelError: a layer does not fit the vectors, or its output is not finite.
        """
        layers = self._loaded.layers
        has_layers = any((layers.tokens, layers.vector, layers.sparse, layers.multi_vector))
        has_vocabulary_head = self._loaded.spec.loader in (MASKED, CAUSAL)
        # The test runs the layers on the token vectors of a text. If the model does not compute
        # such vectors, the test is skipped.
        computes_token_vectors = self._loaded.forward is not None
        if not computes_token_vectors or not (has_layers or has_vocabulary_head):
            return
        text_len = min(_TEST_TOKENS, self.info.max_model_len)
        token_ids = random_batch(self._loaded.encoder, (text_len,)).token_ids.tolist()
        for kind in self.info.kinds:
            try:
                (output,) = self.run([Prepared(PoolingItem(kind=kind), token_ids)])
            except MODEL_ERRORS as error:
                raise ModelError(
                    f"{self.info.model}: the layers that compute {kind} output from the vectors of "
                    f"{self.info.architecture} do not fit these vectors ({first_line(error)}). "
                    "Download the checkpoint again, or use a model of another architecture."
                ) from error
            if output is None:
                raise ModelError(f"{self.info.model}: {NOT_FINITE}")

    def close(self) -> None:
        """Remove Nereid's attention from transformers, so that the model's memory can be freed.

        End the process that decodes images.
        """
        self._loaded.hook.remove()
        self.preparer.close()

    def pause(self) -> None:
        """Ignore the CPU time of other processes until the next batch; see `CpuThreads.pause`."""
        self._cpu_threads.pause()

    @torch.inference_mode()
    def run(self, batch: Sequence[Prepared]) -> list[Value | None]:
        """Compute the outputs of prepared items.

        The items are divided into parts, and each part is computed by one method. "images": an
        image tower computes a batch of images. "alone": a vision-language model computes the items
        one by one. "texts": the model computes a batch of texts.

        Returns:
            One output for each item. If an output contains numbers that are not finite, None
            replaces the output.
        """
        # Other processes may use the same CPUs, so the best number of torch's threads can change.
        # Before each batch, set the number of threads that is expected to compute the batch in the
        # shortest time.
        self._cpu_threads.adjust()
        outputs: list[Value | None] = [None] * len(batch)
        # Each part is computed by one call of a method in `run_methods`. If texts are packed, one
        # part can contain texts of different lengths. Otherwise, the texts of a part have similar
        # lengths, so that they need little padding.
        parts = split_batch(
            batch, computes_all_alone=self._computes_all_alone, is_packed=self._is_packed
        )
        run_methods = {
            "images": self._run_images,
            "alone": self._run_alone,
            "texts": self._run_texts,
        }
        for part in parts:
            items = [batch[index] for index in part.indices]
            outputs_of_part = run_methods[part.method](items)
            for index, output in zip(part.indices, outputs_of_part, strict=True):
                outputs[index] = output
        return outputs

    @property
    def _computes_all_alone(self) -> bool:
        """Whether the model computes all inputs one by one, even inputs that are texts."""
        return self._image_forward is not None and self._loaded.forward is None

    @property
    def _is_packed(self) -> bool:
        """Whether the model computes its outputs without padding."""
        forward = self._loaded.forward
        head = self._loaded.head
        has_padded_head = head is not None and head.method in ("all", "whole")
        return forward is not None and forward.path == "packed" and not has_padded_head

    def _run_alone(self, items: list[Prepared]) -> list[Value | None]:
        """Compute inputs one by one, and return their outputs. The inputs may contain images."""
        image_forward = self._image_forward
        loaded = self._loaded
        assert image_forward is not None
        if loaded.answer_tokens is not None:
            rows = torch.stack([image_forward.last_logits(prepared) for prepared in items])
            scores = _answer_scores(loaded.answer_tokens, rows)
            return score_outputs(scores, items, activation=loaded.spec.activation)
        with own_attention(loaded.encoder, loaded.forward) if loaded.forward else nullcontext():
            hidden = torch.cat([image_forward.token_vectors(prepared) for prepared in items])
        return self._embed(hidden, self._token_batch(items), items)

    def _run_images(self, items: list[Prepared]) -> list[Value | None]:
        """Compute a batch of images with an image tower, and return the vectors."""
        pixels = torch.stack([prepared.pixels for prepared in items if prepared.pixels is not None])
        vectors = image_vectors(self._loaded.encoder, pixels)
        return dense_outputs(vectors, items, normalizes=self._loaded.normalizes)

    def _run_texts(self, items: list[Prepared]) -> list[Value | None]:
        """Compute a batch of texts, and return the outputs.

        There are three kinds of models: models with a text tower and an image tower, which return
        one vector for a text; classifiers, whose head computes scores; and models whose outputs are
        computed from token vectors.
        """
        loaded = self._loaded
        batch = self._token_batch(items)
        if loaded.spec.loader == TOWERS:
            vectors = text_vectors(loaded.encoder, batch)
            return dense_outputs(vectors, items, normalizes=loaded.normalizes)
        assert loaded.forward is not None, "without towers, a batch is computed from token vectors"
        if loaded.head is not None:
            return self._classify(loaded.forward, loaded.head, batch, items)
        hidden = self._token_vectors(loaded.forward, batch, items)
        return self._outputs_of_vectors(hidden, batch, items)

    def _outputs_of_vectors(
        self, hidden: Tensor, batch: TokenBatch, items: list[Prepared]
    ) -> list[Value | None]:
        """Compute the output for each text from the token vectors.

        A generative reranker compares the logits of the answer tokens. A SPLADE model computes
        sparse weights from the logits of all tokens. Other models return or pool the vectors.

        Args:
            hidden: the token vectors, [num_tokens, hidden_size].
            batch: the texts.
            items: the items of the texts.
        """
        loaded = self._loaded
        is_splade = loaded.spec.loader == MASKED
        if loaded.answer_tokens is not None:
            scores = self._answer_scores_of_texts(loaded.answer_tokens, hidden, batch)
            return score_outputs(scores, items, activation=loaded.spec.activation)
        if is_splade:
            return self._splade_outputs(hidden, batch)
        return self._embed(hidden, batch, items)

    def _splade_outputs(self, hidden: Tensor, batch: TokenBatch) -> list[Value | None]:
        """Return the sparse weights of each text (see `splade_outputs` for the formula)."""
        spec = self._loaded.spec
        logits = token_logits(self._loaded.encoder, hidden)
        return splade_outputs(logits, batch, *spec.splade, spec.max_active_dims)

    def _token_batch(self, items: list[Prepared]) -> TokenBatch:
        """Return a batch that contains the tokens of all items."""
        return TokenBatch.of(
            [prepared.token_ids for prepared in items],
            [prepared.type_ids for prepared in items],
            self._loaded.encoder.device,
        )

    def _classify(
        self, forward: ChosenForward, head: Head, batch: TokenBatch, items: list[Prepared]
    ) -> list[Value | None]:
        """Compute scores of texts or of single tokens with the head of a classifier."""
        # With the method "whole", `head.logits` runs the whole model and needs no token vectors.
        hidden = forward.forward(batch) if head.method != "whole" else None
        logits = head.logits(hidden, batch).float()
        activation = self._loaded.spec.activation
        if head.is_per_token:
            return token_score_outputs(logits, items, activation=activation)
        return score_outputs(logits, items, activation=activation)

    def _token_vectors(
        self, forward: ChosenForward, batch: TokenBatch, items: list[Prepared]
    ) -> Tensor:
        """Return the token vectors of a batch, [num_tokens, hidden_size].

        An expanded query ends with mask tokens, to which no token attends. Therefore a batch of
        expanded queries is computed with an attention mask, which only the model's own attention
        supports. A batch contains either only expanded queries or none.
        """
        # For each expanded query, the number of tokens before the mask tokens.
        attended_lens = tuple(
            prepared.num_attended for prepared in items if prepared.num_attended is not None
        )
        if not attended_lens:
            return forward.forward(batch)
        assert len(attended_lens) == len(items), "`split_batch` separates expanded queries"
        encoder = self._loaded.encoder
        masked_batch = replace(batch, attended_lens=attended_lens)
        with own_attention(encoder, forward):  # `forward` may have set Nereid's attention.
            return PaddedForward(encoder)(masked_batch)

    def _answer_scores_of_texts(
        self, answer_tokens: AnswerTokens, hidden: Tensor, batch: TokenBatch
    ) -> Tensor:
        """Return one score for each text, float32 [num_texts, 1] (see `_answer_scores`).

        Shapes: hidden [num_tokens, hidden_size].
        """
        last_tokens = torch.tensor(batch.starts[1:], device=hidden.device) - 1
        slices = [logits for _, logits in token_logits(self._loaded.encoder, hidden[last_tokens])]
        return _answer_scores(answer_tokens, torch.cat(slices).float())

    def _embed(
        self, hidden: Tensor, batch: TokenBatch, items: list[Prepared]
    ) -> list[Value | None]:
        """Convert the token vectors of each item to its dense, sparse or multi-vector output.

        If the last layer of the checkpoint computes scores, return the score of each item.

        Args:
            hidden: the token vectors, [num_tokens, hidden_size].
            batch: the texts.
            items: the items of the texts.
        """
        layers = self._loaded.layers
        for layer in layers.tokens:  # the layers that convert token vectors to token vectors
            hidden = layer(hidden.float())
        starts = batch.starts  # the index of each text's first token, and the number of all tokens
        if self._loaded.spec.task == "rerank":
            scores = self._pooled_vectors(hidden, starts, items, list(range(len(items))))
            return score_outputs(scores, items, activation=self._loaded.spec.activation)
        # Dense vectors are computed in one batch, and other outputs one by one. `outputs` maps the
        # index of each item to its output.
        dense_indices = [i for i, prepared in enumerate(items) if prepared.item.kind == "dense"]
        outputs = self._dense_outputs(hidden, starts, items, dense_indices)
        for i, prepared in enumerate(items):
            token_vectors = hidden[starts[i] : starts[i + 1]]
            if prepared.item.kind == "sparse":
                outputs[i] = sparse_output(token_vectors.float(), prepared.token_ids, layers)
            elif prepared.item.kind == "multi_vector":
                outputs[i] = multi_vector_output(token_vectors.float(), prepared, layers)
        return [outputs[i] for i in range(len(items))]

    def _dense_outputs(
        self, hidden: Tensor, starts: list[int], items: list[Prepared], dense_indices: list[int]
    ) -> dict[int, Value | None]:
        """Compute the dense vectors of some items. Return a mapping from indices to vectors.

        `_pooled_vectors` describes the arguments.
        """
        if not dense_indices:
            return {}
        vectors = self._pooled_vectors(hidden, starts, items, dense_indices)
        dense_items = [items[i] for i in dense_indices]
        outputs = dense_outputs(vectors, dense_items, normalizes=self._loaded.normalizes)
        return dict(zip(dense_indices, outputs, strict=True))

    def _pooled_vectors(
        self, hidden: Tensor, starts: list[int], items: list[Prepared], indices: list[int]
    ) -> Tensor:
        """Pool the token vectors of some items, and apply the layers that follow the pooling.

        The token vectors of an item are pooled: they are combined into one vector, for example by
        their mean. The tokens of a prompt are left out if the checkpoint requires this (see
        Prepared.prompt_len).

        Example: the indices [1], the starts [0, 4, 9] and a prompt of 2 tokens in item 1 return one
        vector, which is pooled from the tokens 6 to 8.

        Args:
            hidden: the outputs of the token layers, [num_tokens, size].
            starts: the index of each item's first token, followed by the number of all tokens.
            items: all items of the batch.
            indices: the indices of the items whose vectors are computed.
        """
        loaded = self._loaded
        ranges: Ranges = []
        for i in indices:
            prompt_len = items[i].prompt_len
            ranges.append((starts[i] + prompt_len, starts[i + 1], prompt_len))
        vectors = pool(hidden, ranges, loaded.poolers)
        for layer in loaded.layers.vector:
            vectors = layer(vectors)
        return vectors


def _answer_scores(answer_tokens: AnswerTokens, logits: Tensor) -> Tensor:
    """Return the scores [num_items, 1]. A score is the logit of "yes" minus the logit of "no".

    `logits` are the logits that follow the last token of each item, float32 [num_items,
    vocab_size].
    """
    score = logits[:, answer_tokens.yes]
    if answer_tokens.no is not None:
        score = score - logits[:, answer_tokens.no]
    return score[:, None]


def _vision_language_prompts(loaded: LoadedModel) -> Prompts | None:
    """Return the object that prepares inputs; None if the model is not a vision-language model."""
    if loaded.spec.takes_messages:
        return ChatPrompts(loaded.spec, loaded.prompts)
    return RetrievalPrompts(loaded.spec) if loaded.spec.loader == RETRIEVAL else None


def _tower_images(loaded: LoadedModel) -> TowerImages | None:
    """Return the object that prepares images; None if the model has no image tower."""
    if loaded.spec.loader != TOWERS:
        return None
    return TowerImages(loaded.spec, num_image_tokens(loaded.encoder))
