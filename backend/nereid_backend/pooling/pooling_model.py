# SPDX-License-Identifier: Apache-2.0
"""Loads a checkpoint, and computes vectors or scores of prepared items."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nereid_backend.attention.interface import AttentionHook
from nereid_backend.errors import ConfigError
from nereid_backend.load_checkpoint import choose_device
from nereid_backend.model.limits import usable_cpus
from nereid_backend.pooling.forward.choose_forward import (
    ChosenForward,
    choose_forward,
    choose_head,
    own_attention,
)
from nereid_backend.pooling.forward.image_forward import ImageForward
from nereid_backend.pooling.forward.image_text_towers import (
    ImageReader,
    check_towers,
    image_vectors,
    text_vectors,
)
from nereid_backend.pooling.forward.packed_texts import TokenBatch
from nereid_backend.pooling.forward.poolers import pool
from nereid_backend.pooling.forward.pooling_forward import Head, PaddedForward, token_logits
from nereid_backend.pooling.forward.pooling_outputs import (
    dense_outputs,
    multi_vector_output,
    score_outputs,
    sparse_output,
    splade_outputs,
    token_score_outputs,
)
from nereid_backend.pooling.inputs.generative_rerank import GenerativeReranker
from nereid_backend.pooling.inputs.prepare_items import ItemPreparer, Prepared
from nereid_backend.pooling.inputs.vision_language_prompts import (
    ChatPrompts,
    Prompts,
    RetrievalPrompts,
)
from nereid_backend.pooling.length_limit import length_limit
from nereid_backend.pooling.loading.checkpoint_spec import (
    CAUSAL,
    IMAGE_CAUSAL,
    MASKED,
    RETRIEVAL,
    SEQUENCE,
    TOKENS,
    TOWERS,
    CheckpointSpec,
    read_checkpoint_spec,
)
from nereid_backend.pooling.loading.integer_weights import store_as_integers
from nereid_backend.pooling.loading.load_encoder import Encoder, load_encoder
from nereid_backend.pooling.loading.output_layers import load_output_layers
from nereid_backend.pooling.loading.vector_layers import Layer
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.pooling.pooling_items import PoolingInfo, Value
from nereid_backend.text.prompt_encoder import PromptEncoder

# A new request waits for the current step, so steps are short. On a CPU, 512 to 4096 tokens per
# step are equally fast within 3 %.
_CPU_TOKENS = 1024
_GPU_TOKENS = 16384

NOT_FINITE = (
    "the model's output contains numbers that are not finite. The data type may overflow (set "
    "dtype=float32), or the weights are broken."
)
# A padded batch contains texts of similar lengths. A text that is longer than the shortest text of
# a batch by more than a quarter plus 8 tokens begins a new batch.
_PADDING_FACTOR = 1.25
_PADDING_TOKENS = 8


@contextmanager
def gpu_share(device: torch.device, share: float) -> Iterator[None]:
    """Limit the memory of this process on a GPU. The limit stays after the with statement.

    Args:
        device: the device of the model. If it is a CPU, nothing is limited.
        share: the setting gpu_memory_utilization.

    Raises:
        ConfigError: the code inside the with statement needed more memory.
    """
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share, device)
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"gpu_memory_utilization: the weights do not fit into the share {share:g} of the "
            f"memory of {device}. Raise the setting. The shares of all models on a GPU must not "
            "exceed 1."
        ) from error


class PoolingModel:
    """A loaded model that embeds, reranks or classifies.

    Attributes:
        info: the description of the loaded model.
        preparer: validates and tokenises items.
    """

    def __init__(self, config: PoolingConfig, progress: Callable[[str], None]) -> None:
        """Load the checkpoint, and choose how batches are computed.

        Args:
            config: the settings.
            progress: called with one line for each slow operation.

        Raises:
            ConfigError: the settings do not fit the checkpoint or the machine.
            ModelError: the checkpoint is missing, broken or not supported.
        """
        started = time.monotonic()
        torch.set_num_threads(config.num_threads or max(1, usable_cpus() - 1))
        self._spec = spec = read_checkpoint_spec(config)
        self._hook = AttentionHook()
        device = choose_device(config.device)
        with gpu_share(device, config.gpu_memory_utilization):
            self._encoder = encoder = load_encoder(
                spec,
                dtype=config.dtype,
                device=device,
                attention=self._hook.name,
                progress=progress,
            )
        store_as_integers(encoder, config.weight_dtype, spec.architecture, progress)
        max_len = length_limit(config, spec, encoder)
        progress("comparing the vectors of texts in a batch and one by one")
        # None for a model with a text and an image tower, which always computes padded batches, and
        # for a vision-language model whose inputs are all computed one by one.
        self._chosen: ChosenForward | None = None
        # None for a model that is no classifier.
        self._head: Head | None = None
        if spec.loader == TOWERS:
            difference = check_towers(encoder, spec.architecture, max_len)
        elif spec.loader in (IMAGE_CAUSAL, RETRIEVAL):
            difference = 0.0
        else:
            self._chosen = choose_forward(encoder, self._hook, spec.architecture, max_len)
            difference = self._chosen.difference
            if spec.loader in (SEQUENCE, TOKENS):
                is_per_token = spec.loader == TOKENS
                self._head = choose_head(
                    encoder, self._chosen, spec.architecture, max_len, per_token=is_per_token
                )
        self._poolers, self._normalizes = self._choose_pooling()
        self._layers = load_output_layers(Path(config.model), spec, encoder)
        self._reranker = None
        if spec.loader in (CAUSAL, IMAGE_CAUSAL):
            self._reranker = GenerativeReranker(
                encoder.tokenizer,
                spec.answer_tokens,
                spec.template_kwargs,
                has_parts=spec.loader == IMAGE_CAUSAL,
            )
        self.info = self._describe(
            config, max_len, difference, load_seconds=time.monotonic() - started
        )
        images = None
        if spec.loader == TOWERS:
            images = (ImageReader(spec), _image_tokens(encoder))
        prompts: Prompts | None = None
        if spec.takes_messages:
            prompts = ChatPrompts(spec, self._reranker)
        elif spec.loader == RETRIEVAL:
            prompts = RetrievalPrompts(spec)
        self._image_forward = ImageForward(encoder, spec) if prompts is not None else None
        self.preparer = ItemPreparer(
            spec,
            self.info,
            encoder.tokenizer,
            reranker=self._reranker,
            images=images,
            prompts=prompts,
        )

    def close(self) -> None:
        """Remove Nereid's attention from transformers, so that the model can be freed."""
        self._hook.remove()

    @torch.inference_mode()
    def run(self, batch: Sequence[Prepared]) -> list[Value | None]:
        """Compute the outputs of prepared items as one batch.

        Returns:
            The output of each item; None if the output contains numbers that are not finite.
        """
        outputs: list[Value | None] = [None] * len(batch)
        for indices in self._split(batch):
            items = [batch[i] for i in indices]
            if self._is_alone(items[0]):
                computed = self._run_alone(items)
            elif items[0].pixels is not None:
                computed = self._run_images(items)
            else:
                computed = self._run_texts(items)
            for i, output in zip(indices, computed, strict=True):
                outputs[i] = output
        return outputs

    def _split(self, batch: Sequence[Prepared]) -> list[list[int]]:
        """Divide a batch into smaller batches. Each smaller batch is a list of indices of items.

        All images of an image tower are one batch, and so are the inputs that a vision-language
        model computes one by one. All expanded queries are one batch. Packed texts are one batch.
        Padded texts are divided into batches of similar lengths, so that there is little padding.
        Example: padded texts with 50, 6 and 5 tokens return [[2, 1], [0]].
        """
        images = [i for i, prepared in enumerate(batch) if prepared.pixels is not None]
        alone = [i for i, prepared in enumerate(batch) if self._is_alone(prepared)]
        others = {*images, *alone}
        texts = [i for i in range(len(batch)) if i not in others]
        texts.sort(key=lambda i: len(batch[i].token_ids))
        batches = [indices for indices in (images, alone) if indices]
        # The expanded queries are a separate batch. All of them have the same length.
        expanded = [i for i in texts if batch[i].num_attended is not None]
        if expanded:
            batches.append(expanded)
            texts = [i for i in texts if batch[i].num_attended is None]
        if not texts:
            return batches
        if self._is_packed:
            return [*batches, texts]
        batches.append([texts[0]])
        shortest = len(batch[texts[0]].token_ids)
        for i in texts[1:]:
            length = len(batch[i].token_ids)
            if length > shortest * _PADDING_FACTOR + _PADDING_TOKENS:
                batches.append([])
                shortest = length
            batches[-1].append(i)
        return batches

    @property
    def _is_packed(self) -> bool:
        """Whether the token vectors and the output of the head are computed without padding."""
        has_padded_head = self._head is not None and self._head.rows in ("all", "whole")
        return self._chosen is not None and self._chosen.path == "packed" and not has_padded_head

    def _is_alone(self, prepared: Prepared) -> bool:
        """Return whether an input is computed without other inputs in the same forward pass."""
        if self._image_forward is None:
            return False
        return prepared.images is not None or self._chosen is None

    def _run_alone(self, items: list[Prepared]) -> list[Value | None]:
        """Compute the outputs of inputs that may contain images, one by one."""
        forward = self._image_forward
        assert forward is not None
        if self._reranker is not None:
            rows = torch.stack([forward.last_logits(prepared) for prepared in items])
            scores = _answer_scores(self._reranker, rows)
            return score_outputs(scores, items, activation=self._spec.activation)
        batch = TokenBatch.of(
            [prepared.token_ids for prepared in items],
            [prepared.type_ids for prepared in items],
            self._encoder.device,
        )
        with own_attention(self._encoder, self._chosen) if self._chosen else nullcontext():
            hidden = torch.cat([forward.token_vectors(prepared) for prepared in items])
        return self._embed(hidden, batch, items)

    def _run_images(self, items: list[Prepared]) -> list[Value | None]:
        """Compute the outputs of images as one batch."""
        pixels = torch.stack([prepared.pixels for prepared in items if prepared.pixels is not None])
        vectors = image_vectors(self._encoder, pixels)
        return dense_outputs(vectors, items, normalizes=self._normalizes)

    def _run_texts(self, items: list[Prepared]) -> list[Value | None]:
        """Compute the outputs of texts as one batch.

        The loaded model determines which computation follows: projection (towers), whole model or
        head (classifier), answer tokens (generative reranker), SPLADE, or pooling.
        """
        batch = TokenBatch.of(
            [prepared.token_ids for prepared in items],
            [prepared.type_ids for prepared in items],
            self._encoder.device,
        )
        if self._chosen is None:
            vectors = text_vectors(self._encoder, batch)
            return dense_outputs(vectors, items, normalizes=self._normalizes)
        if self._head is not None:
            needs_hidden = self._head.rows != "whole"
            hidden = self._chosen.forward(batch) if needs_hidden else None
            logits = self._head.logits(hidden, batch).float()
            if self._head.is_per_token:
                return token_score_outputs(logits, items, activation=self._spec.activation)
            return score_outputs(logits, items, activation=self._spec.activation)
        hidden = self._token_vectors(self._chosen, batch, items)
        if self._reranker is not None:
            logits = self._answer_logits(self._reranker, hidden, batch)
            return score_outputs(logits, items, activation=self._spec.activation)
        if self._spec.loader == MASKED:
            return splade_outputs(token_logits(self._encoder, hidden), batch, *self._spec.splade)
        return self._embed(hidden, batch, items)

    def _token_vectors(
        self, chosen: ChosenForward, batch: TokenBatch, items: list[Prepared]
    ) -> Tensor:
        """Return the token vectors of a batch, [num_tokens, hidden_size].

        Expanded queries need an attention mask that hides the mask tokens, so they are computed
        with the model's own attention.
        """
        attended = [prepared.num_attended for prepared in items]
        if attended[0] is None:
            return chosen.forward(batch)
        lens = tuple(length for length in attended if length is not None)
        with own_attention(self._encoder, chosen):
            return PaddedForward(self._encoder)(replace(batch, attended_lens=lens))

    def _answer_logits(
        self, reranker: GenerativeReranker, hidden: Tensor, batch: TokenBatch
    ) -> Tensor:
        """Return the scores [num_texts, 1]: the logit of "yes" minus the logit of "no"."""
        last = torch.tensor(batch.starts[1:], device=hidden.device) - 1
        slices = [logits for _, logits in token_logits(self._encoder, hidden[last])]
        return _answer_scores(reranker, torch.cat(slices).float())

    def _embed(
        self, hidden: Tensor, batch: TokenBatch, items: list[Prepared]
    ) -> list[Value | None]:
        """Compute the dense, sparse or multi-vector output of each item from its token vectors.

        Args:
            hidden: the token vectors, [num_tokens, hidden_size].
            batch: the texts.
            items: the items of the texts.
        """
        for layer in self._layers.tokens:
            hidden = layer(hidden.float())
        starts = batch.starts
        outputs = self._dense_outputs(hidden, starts, items)
        for i, prepared in enumerate(items):
            token_vectors = hidden[starts[i] : starts[i + 1]].float()
            if prepared.item.kind == "sparse":
                outputs[i] = sparse_output(token_vectors, prepared.token_ids, self._layers)
            elif prepared.item.kind == "multi_vector":
                outputs[i] = multi_vector_output(token_vectors, prepared, self._layers)
        return [outputs[i] for i in range(len(items))]

    def _dense_outputs(
        self, hidden: Tensor, starts: list[int], items: list[Prepared]
    ) -> dict[int, Value | None]:
        """Compute the outputs of the items with the kind "dense", by the index of the item.

        Args:
            hidden: the token vectors after the token layers, [num_tokens, size].
            starts: the index of each item's first token, followed by the number of all tokens.
            items: all items of the batch.
        """
        dense = [i for i, prepared in enumerate(items) if prepared.item.kind == "dense"]
        if not dense:
            return {}
        pooled_tokens = [(starts[i] + items[i].prompt_len, starts[i + 1]) for i in dense]
        vectors = pool(hidden, pooled_tokens, self._poolers)
        for layer in self._layers.vector:
            vectors = layer(vectors)
        dense_items = [items[i] for i in dense]
        outputs = dense_outputs(vectors, dense_items, normalizes=self._normalizes)
        return dict(zip(dense, outputs, strict=True))

    def _describe(
        self, config: PoolingConfig, max_len: int, difference: float, *, load_seconds: float
    ) -> PoolingInfo:
        """Return the description of the loaded model.

        Args:
            config: the settings.
            max_len: the length limit of inputs in tokens.
            difference: the result of the self-check (see PoolingInfo.self_check_difference).
            load_seconds: the duration of loading.
        """
        spec = self._spec
        encoder = self._encoder
        default_tokens = _CPU_TOKENS if encoder.device.type == "cpu" else _GPU_TOKENS
        return PoolingInfo(
            model=config.model,
            architecture=spec.architecture,
            task=spec.task,
            kinds=spec.kinds,
            dimension=self._dimension(),
            max_model_len=max_len,
            max_token_bytes=PromptEncoder(encoder.tokenizer).max_token_bytes,
            vocab_size=encoder.vocab_size,
            pooling=self._describe_pooling(),
            normalizes=self._normalizes,
            activation=spec.activation if spec.task != "embed" else "none",
            path=self._path(),
            labels=_labels(spec),
            prompts=dict(spec.prompts),
            default_prompt_name=spec.default_prompt_name,
            accepts_images=spec.takes_messages or spec.loader in (TOWERS, RETRIEVAL),
            device=str(encoder.device),
            dtype=str(encoder.dtype).removeprefix("torch."),
            max_batch_tokens=config.max_batch_tokens or default_tokens,
            self_check_difference=difference,
            load_seconds=load_seconds,
        )

    def _path(self) -> str:
        """Return how batches are computed (see PoolingInfo.path)."""
        if self._spec.loader in (IMAGE_CAUSAL, RETRIEVAL):
            return "single"
        # Towers, and heads that need the whole model, compute padded batches (see Head.rows).
        if self._chosen is None or (self._head is not None and self._head.rows == "whole"):
            return "padded"
        return self._chosen.path

    def _choose_pooling(self) -> tuple[tuple[str, ...], bool]:
        """Return the pooling methods, and whether vectors are scaled to length 1.

        If the checkpoint's files do not determine the methods, a causal model uses the last token,
        and any other model uses the mean. If the files do not determine the scaling, only the dense
        vectors of a causal model are scaled.
        """
        spec = self._spec
        is_causal = self._chosen is not None and self._chosen.is_causal
        poolers = spec.poolers or (("lasttoken",) if is_causal else ("mean",))
        if spec.normalizes is None:
            return poolers, is_causal and "dense" in spec.kinds
        return poolers, spec.normalizes

    def _dimension(self) -> int:
        """Return the size of the output vectors; 0 for scores (see PoolingInfo.dimension)."""
        spec = self._spec
        encoder = self._encoder
        if spec.task != "embed":
            return 0
        if spec.loader == TOWERS:
            return int(encoder.model.config.projection_dim)
        if spec.loader == MASKED:
            # A sparse vector has one weight for each entry of the vocabulary.
            return encoder.vocab_size
        if spec.loader == RETRIEVAL:
            return int(encoder.model.config.embedding_dim)
        text = encoder.model.config.get_text_config()
        # Some configs name the size of the token vectors d_model.
        hidden_size = int(getattr(text, "hidden_size", 0) or getattr(text, "d_model", 0))
        size = _output_size(self._layers.tokens, hidden_size)
        if "dense" in spec.kinds:
            # The vectors of several pooling methods are concatenated.
            size *= len(self._poolers)
        return _output_size(self._layers.vector, size)

    def _describe_pooling(self) -> str:
        """Return a readable description of the pooling method."""
        spec = self._spec
        if spec.loader == MASKED:
            return "splade"
        if spec.loader in (CAUSAL, IMAGE_CAUSAL):
            return "yes or no"
        if spec.loader in (SEQUENCE, TOKENS):
            return "the model's head"
        if spec.loader == TOWERS:
            return "the model's projection"
        return "none" if spec.kinds == ("multi_vector",) else "+".join(self._poolers)


def _answer_scores(reranker: GenerativeReranker, logits: Tensor) -> Tensor:
    """Return the scores [num_items, 1]: the logit of "yes" minus the logit of "no".

    `logits` are the logits after the last token of each item, float32 [num_items, vocab_size].
    """
    score = logits[:, reranker.yes]
    if reranker.no is not None:
        score = score - logits[:, reranker.no]
    return score[:, None]


def _output_size(layers: Sequence[Layer], size: int) -> int:
    """Return the size of the vectors that the last layer returns.

    `size` is the size of the vectors that the first layer gets.
    """
    for layer in layers:
        if layer.out_features is not None:
            size = layer.out_features
    return size


def _labels(spec: CheckpointSpec) -> tuple[str, ...]:
    """Return the labels of a classifier; empty for other models."""
    if spec.loader not in (SEQUENCE, TOKENS):
        return ()
    names: dict[Any, Any] = spec.config.id2label or {}
    count = int(spec.config.num_labels or 0)
    return tuple(str(names.get(i, f"LABEL_{i}")) for i in range(count))


def _image_tokens(encoder: Encoder) -> int:
    """Return the number of tokens that one image uses up: the number of its patches plus one.

    Example: an image size of 224 and a patch size of 16 return 14 * 14 + 1 = 197.
    """
    vision = encoder.model.config.vision_config
    side = getattr(vision, "image_size", 224) // max(1, getattr(vision, "patch_size", 16))
    return int(side * side + 1)
