# SPDX-License-Identifier: Apache-2.0
"""Loads a checkpoint, and computes vectors or scores of prepared items."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nereid_backend.attention.interface import AttentionHook
from nereid_backend.checkpoint import choose_device
from nereid_backend.errors import ConfigError
from nereid_backend.model.limits import model_limit, usable_cpus
from nereid_backend.pooling.checkpoint_spec import (
    CAUSAL,
    MASKED,
    SEQUENCE,
    TOWERS,
    CheckpointSpec,
    read_checkpoint_spec,
)
from nereid_backend.pooling.choose_forward import (
    ChosenForward,
    choose_forward,
    choose_head,
    position_table,
)
from nereid_backend.pooling.generative_rerank import GenerativeReranker
from nereid_backend.pooling.image_reader import ImageReader
from nereid_backend.pooling.image_text_towers import check_towers, image_vectors, text_vectors
from nereid_backend.pooling.load_encoder import Encoder, load_encoder
from nereid_backend.pooling.packed_texts import TokenBatch
from nereid_backend.pooling.poolers import Layer, load_layer, load_linear, pool
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.pooling.pooling_forward import Head, token_logits
from nereid_backend.pooling.pooling_items import PoolingInfo, Value
from nereid_backend.pooling.prepare_items import ItemPreparer, Prepared

# A new request waits for the current step, so steps are short. On a CPU, 512 to 4096 tokens per
# step are equally fast within 3 %.
_CPU_TOKENS, _GPU_TOKENS = 1024, 16384
# Tokenizers without a length limit return a huge number as their limit.
_NO_LIMIT = 10**9

NOT_FINITE = (
    "the model's output contains numbers that are not finite. The data type may overflow (set "
    "dtype=float32), or the weights are broken."
)
# A padded batch contains texts of similar lengths. A text that is longer than the shortest text of
# a batch by more than a quarter plus 8 tokens begins a new batch.
_PADDING_FACTOR = 1.25
_PADDING_TOKENS = 8
# The smallest norm by which a vector is divided.
_MIN_NORM = 1e-12


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers between token vectors and the output.

    Attributes:
        tokens: the layers that map token vectors, in order.
        vector: the layers that map the pooled vector, in order.
        sparse: the layer that maps a token vector to its weight, for models with dense and sparse
            output.
        multi_vector: the layer that maps token vectors, for models with dense and multi-vector
            output.
        skipped: the tokens without a weight and without a vector.
    """

    tokens: list[Layer] = field(default_factory=list)
    vector: list[Layer] = field(default_factory=list)
    sparse: Layer | None = None
    multi_vector: Layer | None = None
    skipped: frozenset[int] = frozenset()


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
        spec = read_checkpoint_spec(config)
        device = choose_device(config.device)
        self._spec = spec
        self._hook = AttentionHook()
        encoder = load_encoder(
            spec, dtype=config.dtype, device=device, attention=self._hook.name, progress=progress
        )
        self._encoder = encoder
        limit = _length_limit(config, spec, encoder)
        progress("comparing a batch of texts with each text alone")
        self._head: Head | None = None
        self._chosen: ChosenForward | None = None
        images = None
        if spec.loader == TOWERS:
            path = "padded"
            difference = check_towers(encoder, spec.architecture, limit)
            images = (ImageReader(spec), _image_tokens(encoder))
        else:
            self._chosen = choose_forward(encoder, self._hook, spec.architecture, limit)
            path = self._chosen.path
            difference = self._chosen.difference
            if spec.loader == SEQUENCE:
                self._head = choose_head(encoder, self._chosen, spec.architecture, limit)
                path = "padded" if self._head.rows == "whole" else path
        self._poolers, self._normalizes = self._choose_pooling()
        self._layers = _load_layers(config, spec, encoder)
        self._reranker = None
        if spec.loader == CAUSAL:
            self._reranker = GenerativeReranker(
                encoder.tokenizer, spec.answer_tokens, spec.template_kwargs
            )
        self.info = self._describe(
            config, limit, path, difference, load_seconds=time.monotonic() - started
        )
        self.preparer = ItemPreparer(
            spec,
            self.info,
            encoder.tokenizer,
            reranker=self._reranker,
            images=images,
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
        images = [i for i, one in enumerate(batch) if one.pixels is not None]
        texts = [i for i, one in enumerate(batch) if one.pixels is None]
        values: list[Value | None] = [None] * len(batch)
        if images:
            pixels = torch.stack([_pixels(batch[i]) for i in images])
            vectors = image_vectors(self._encoder, pixels)
            for i, value in zip(
                images, self._finish_dense(vectors, _take(batch, images)), strict=True
            ):
                values[i] = value
        for part in self._split(batch, texts):
            for i, value in zip(part, self._run_texts(_take(batch, part)), strict=True):
                values[i] = value
        return values

    def _split(self, batch: Sequence[Prepared], texts: list[int]) -> list[list[int]]:
        """Return the indices of texts as batches, ordered by length.

        Packed texts are one batch. Padded texts are split into batches of similar lengths, so that
        there is little padding.
        """
        order = sorted(texts, key=lambda i: len(batch[i].token_ids))
        has_padded_head = self._head is not None and self._head.rows in ("all", "whole")
        is_packed = (
            self._chosen is not None and self._chosen.path == "packed" and not has_padded_head
        )
        if is_packed or not order:
            return [order] if order else []
        batches = [[order[0]]]
        shortest = len(batch[order[0]].token_ids)
        for i in order[1:]:
            length = len(batch[i].token_ids)
            if length > shortest * _PADDING_FACTOR + _PADDING_TOKENS:
                batches.append([])
                shortest = length
            batches[-1].append(i)
        return batches

    def _run_texts(self, items: list[Prepared]) -> list[Value | None]:
        """Compute the outputs of texts as one batch."""
        encoder = self._encoder
        batch = TokenBatch.of(
            [one.token_ids for one in items], [one.type_ids for one in items], encoder.device
        )
        if self._chosen is None:
            return self._finish_dense(text_vectors(encoder, batch), items)
        if self._head is not None and self._head.rows == "whole":
            return self._finish_scores(self._head.logits(None, batch).float(), items)
        hidden = self._chosen.forward(batch)
        if self._head is not None:
            return self._finish_scores(self._head.logits(hidden, batch).float(), items)
        if self._reranker is not None:
            return self._finish_scores(self._answer_logits(hidden, batch), items)
        if self._spec.loader == MASKED:
            return [_nonzero(row) for row in self._splade(hidden, batch)]
        return self._embed(hidden, batch, items)

    def _answer_logits(self, hidden: Tensor, batch: TokenBatch) -> Tensor:
        """Return the scores [num_texts, 1]: the logit of "yes" minus the logit of "no"."""
        assert self._reranker is not None
        last = torch.tensor(batch.starts[1:], device=hidden.device) - 1
        parts = [logits for _, logits in token_logits(self._encoder, hidden[last])]
        logits = torch.cat(parts).float()
        score = logits[:, self._reranker.yes]
        if self._reranker.no is not None:
            score = score - logits[:, self._reranker.no]
        return score[:, None]

    def _splade(self, hidden: Tensor, batch: TokenBatch) -> Tensor:
        """Return the SPLADE weights, [num_texts, vocab_size], of each text for each token."""
        strategy, times = self._spec.splade
        starts = batch.starts
        rows: Tensor | None = None
        for first, logits in token_logits(self._encoder, hidden):
            logits = logits.float()
            if rows is None:
                # Start the maximum with 0, because the ReLU of a maximum is the maximum with 0.
                rows = logits.new_zeros(len(batch.lens), logits.shape[1])
            for number, (start, end) in enumerate(itertools.pairwise(starts)):
                # The slice of logits begins at the token `first`. Take the text's part of it.
                text_logits = logits[max(0, start - first) : max(0, end - first)]
                if len(text_logits) == 0:
                    continue
                if strategy == "max":
                    rows[number] = torch.maximum(rows[number], text_logits.amax(0))
                else:
                    rows[number] += _log1p(text_logits.relu(), times).sum(0)
        assert rows is not None
        return _log1p(rows, times) if strategy == "max" else rows

    def _embed(
        self, hidden: Tensor, batch: TokenBatch, items: list[Prepared]
    ) -> list[Value | None]:
        """Compute dense, sparse and multi-vector outputs from token vectors."""
        for layer in self._layers.tokens:
            hidden = layer(hidden.float())
        starts = batch.starts
        values: list[Value | None] = [None] * len(items)
        dense = [i for i, one in enumerate(items) if one.item.kind == "dense"]
        if dense:
            spans = [(starts[i] + items[i].prompt_len, starts[i + 1]) for i in dense]
            vectors = pool(hidden, spans, self._poolers)
            for layer in self._layers.vector:
                vectors = layer(vectors)
            for i, value in zip(
                dense, self._finish_dense(vectors, _take(items, dense)), strict=True
            ):
                values[i] = value
        for i, one in enumerate(items):
            rows = hidden[starts[i] : starts[i + 1]].float()
            if one.item.kind == "sparse":
                values[i] = self._sparse_weights(rows, one.token_ids)
            elif one.item.kind == "multi_vector":
                values[i] = self._token_vectors(rows, one)
        return values

    def _sparse_weights(self, rows: Tensor, token_ids: list[int]) -> Value | None:
        """Return the weights of a text by token id. For a repeated token the largest one counts."""
        assert self._layers.sparse is not None
        weights = self._layers.sparse(rows).squeeze(-1).relu()
        if not weights.isfinite().all():
            return None
        weight_of_token: dict[int, float] = {}
        for token_id, weight in zip(token_ids, weights.tolist(), strict=True):
            if weight > weight_of_token.get(token_id, 0.0) and token_id not in self._layers.skipped:
                weight_of_token[token_id] = weight
        return weight_of_token

    def _token_vectors(self, rows: Tensor, one: Prepared) -> Value | None:
        """Return the multi-vector output of a text."""
        if self._layers.multi_vector is not None:
            # The vector of the first token is left out. It describes the whole text, like the dense
            # vector.
            rows = functional.normalize(self._layers.multi_vector(rows[1:]), dim=-1)
        elif self._layers.skipped:
            kept = [i for i, t in enumerate(one.token_ids) if t not in self._layers.skipped]
            rows = rows[torch.tensor(kept, dtype=torch.int64, device=rows.device)]
        if one.item.dimensions is not None:
            rows = functional.normalize(rows[:, : one.item.dimensions], dim=-1)
        return _array(rows) if rows.isfinite().all() else None

    def _finish_dense(self, vectors: Tensor, items: list[Prepared]) -> list[Value | None]:
        """Truncate each vector to `dimensions`, and scale it to length 1 if requested."""
        rows = _array(vectors)
        values: list[Value | None] = []
        for row, one in zip(rows, items, strict=True):
            value = row[: one.item.dimensions]
            normalizes = self._normalizes if one.item.normalize is None else one.item.normalize
            if normalizes:
                norm = float(np.linalg.norm(value.astype(np.float64)))
                value = value / max(norm, _MIN_NORM)
            value = np.ascontiguousarray(value, dtype=np.float32)
            values.append(value if np.isfinite(value).all() else None)
        return values

    def _finish_scores(self, logits: Tensor, items: list[Prepared]) -> list[Value | None]:
        """Apply the activation to the logits [num_texts, num_labels] of each text."""
        outputs: list[Value | None] = []
        for row, one in zip(logits, items, strict=True):
            values = _activate(row, one.item.activation or self._spec.activation)
            if not values.isfinite().all():
                outputs.append(None)
            elif one.item.kind == "score":
                outputs.append(float(values[0]))
            else:
                outputs.append(_array(values))
        return outputs

    def _describe(
        self,
        config: PoolingConfig,
        limit: int,
        path: str,
        difference: float,
        *,
        load_seconds: float,
    ) -> PoolingInfo:
        """Return the description of the loaded model."""
        spec = self._spec
        encoder = self._encoder
        default_tokens = _CPU_TOKENS if encoder.device.type == "cpu" else _GPU_TOKENS
        return PoolingInfo(
            model=config.model,
            architecture=spec.architecture,
            task=spec.task,
            kinds=spec.kinds,
            dimension=self._dimension(),
            max_model_len=limit,
            vocab_size=encoder.vocab_size,
            pooling=self._describe_pooling(),
            normalizes=self._normalizes,
            activation=spec.activation if spec.task != "embed" else "none",
            path=path,
            labels=_labels(spec),
            prompts=dict(spec.prompts),
            default_prompt_name=spec.default_prompt_name,
            accepts_images=spec.loader == TOWERS,
            device=str(encoder.device),
            dtype=str(encoder.dtype).removeprefix("torch."),
            max_batch_tokens=config.max_batch_tokens or default_tokens,
            self_check_difference=difference,
            load_seconds=load_seconds,
        )

    def _choose_pooling(self) -> tuple[tuple[str, ...], bool]:
        """Return the pooling methods, and whether vectors are scaled to length 1.

        Where the checkpoint's files do not determine them, a causal model uses the last token and
        scaled vectors, and another model the mean and unscaled vectors.
        """
        spec = self._spec
        is_causal = self._chosen is not None and self._chosen.is_causal
        poolers = spec.poolers or (("lasttoken",) if is_causal else ("mean",))
        if spec.normalizes is None:
            return poolers, is_causal and "dense" in spec.kinds
        return poolers, spec.normalizes

    def _dimension(self) -> int:
        """Return the size of the output vectors; 0 for scores (see PoolingInfo.dimension)."""
        spec, encoder = self._spec, self._encoder
        if spec.task != "embed":
            return 0
        if spec.loader == TOWERS:
            return int(encoder.model.config.projection_dim)
        if spec.loader == MASKED:
            return encoder.vocab_size
        text = encoder.model.config.get_text_config()
        size = int(getattr(text, "hidden_size", 0) or getattr(text, "d_model", 0))
        for layer in self._layers.tokens:
            size = layer.out_features or size
        if "dense" in spec.kinds:
            size *= len(self._poolers)
        for layer in self._layers.vector:
            size = layer.out_features or size
        return size

    def _describe_pooling(self) -> str:
        """Return a readable description of the pooling method."""
        spec = self._spec
        if spec.loader == MASKED:
            return "splade"
        if spec.loader == CAUSAL:
            return "yes or no"
        if spec.loader == SEQUENCE:
            return "the model's head"
        if spec.loader == TOWERS:
            return "the model's projection"
        return "none" if spec.kinds == ("multi_vector",) else "+".join(self._poolers)


def _take(items: Sequence[Prepared], places: list[int]) -> list[Prepared]:
    return [items[i] for i in places]


def _array(values: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return values.float().cpu().numpy()


def _pixels(one: Prepared) -> Tensor:
    assert one.pixels is not None
    return one.pixels


def _nonzero(row: Tensor) -> Value | None:
    """Return the weights that are not 0 by token id; None if a weight is not finite."""
    if not row.isfinite().all():
        return None
    places = row.nonzero().squeeze(1)
    return dict(zip(places.tolist(), row[places].tolist(), strict=True))


def _log1p(values: Tensor, times: int) -> Tensor:
    for _ in range(times):
        values = values.log1p()
    return values


def _activate(row: Tensor, name: str) -> Tensor:
    """Apply the activation `name` to the logits [num_labels] of one text."""
    if name == "none":
        return row
    return row.sigmoid() if name == "sigmoid" else row.softmax(-1)


def _labels(spec: CheckpointSpec) -> tuple[str, ...]:
    """Return the labels of a classifier; empty for other models."""
    if spec.loader != SEQUENCE:
        return ()
    names: dict[Any, Any] = spec.config.id2label or {}
    count = int(spec.config.num_labels or 0)
    return tuple(str(names.get(i, f"LABEL_{i}")) for i in range(count))


def _image_tokens(encoder: Encoder) -> int:
    """Return the number of tokens that an image counts as: its patches and one more."""
    vision = encoder.model.config.vision_config
    side = getattr(vision, "image_size", 224) // max(1, getattr(vision, "patch_size", 16))
    return int(side * side + 1)


def _length_limit(config: PoolingConfig, spec: CheckpointSpec, encoder: Encoder) -> int:
    """Return the length limit of inputs in tokens.

    Raises:
        ConfigError: the setting max_model_len is larger than the number of the model's positions.
    """
    limit = model_limit(spec.config.get_text_config())
    largest = limit.num_tokens
    reason = limit.reason
    table = position_table(encoder)
    if table is not None:
        positions = int(table.weight.shape[0])
        if table.padding_idx is not None:
            positions -= table.padding_idx + 1
        if positions < largest:
            largest = positions
            reason = "the number of position embeddings"
    configured = config.max_model_len
    if configured is not None:
        if configured > largest:
            raise ConfigError(
                f"max_model_len: the value must be at most {largest} ({reason}), but it is "
                f"{configured}."
            )
        return configured
    file_limit = spec.max_seq_length or encoder.tokenizer.model_max_length
    return min(largest, file_limit) if 0 < file_limit < _NO_LIMIT else largest


def _load_layers(config: PoolingConfig, spec: CheckpointSpec, encoder: Encoder) -> Layers:
    """Load the layers between token vectors and the output."""
    device = encoder.device
    root = Path(config.model)
    skipped: set[int] = set()
    sparse = multi_vector = None
    if "sparse" in spec.kinds and spec.loader != MASKED:
        sparse = load_linear(root / "sparse_linear.pt", device)
        names = ("cls_token_id", "eos_token_id", "sep_token_id", "pad_token_id", "unk_token_id")
        special_ids = (getattr(encoder.tokenizer, name, None) for name in names)
        skipped = {token_id for token_id in special_ids if token_id is not None}
    if "multi_vector" in spec.kinds and "dense" in spec.kinds:
        multi_vector = load_linear(root / "colbert_linear.pt", device)
    vocabulary = encoder.tokenizer.get_vocab() if spec.skip_words else {}
    skipped |= {vocabulary[word] for word in spec.skip_words if word in vocabulary}
    return Layers(
        tokens=[load_layer(part, device) for part in spec.token_modules],
        vector=[load_layer(part, device) for part in spec.vector_modules],
        sparse=sparse,
        multi_vector=multi_vector,
        skipped=frozenset(skipped),
    )
