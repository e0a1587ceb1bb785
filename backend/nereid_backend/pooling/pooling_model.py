# SPDX-License-Identifier: Apache-2.0
"""A loaded checkpoint: prepared items in, vectors or scores out."""

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
    Recipe,
    read_recipe,
)
from nereid_backend.pooling.choose_forward import Way, choose_head, choose_way, position_table
from nereid_backend.pooling.generative_rerank import Judge
from nereid_backend.pooling.image_reader import ImageReader
from nereid_backend.pooling.image_text_towers import choose_towers, image_vectors, text_vectors
from nereid_backend.pooling.load_encoder import Encoder, load_encoder
from nereid_backend.pooling.packed_texts import TokenBatch
from nereid_backend.pooling.poolers import Layer, load_layer, load_linear, pool
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.pooling.pooling_forward import Head, token_logits
from nereid_backend.pooling.pooling_items import PoolingInfo, Value
from nereid_backend.pooling.prepare_items import Prepared, Preparer

# On a CPU 512 to 4096 are equally fast within 3 %, and a step is what a new request waits for.
_CPU_TOKENS, _GPU_TOKENS = 1024, 16384
# Tokenizers without a limit of their own say a number beyond all bounds.
_NO_LIMIT = 10**9

NOT_FINITE = "the model's answer is not finite numbers; its weights or this dtype may overflow"


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers between token vectors and answers.

    Attributes:
        tokens: on token vectors.
        vector: on the pooled vector.
        sparse: from a token vector to its weight, for sparse vectors beside dense ones.
        many: from a token vector to what several are kept of, for multi-vectors beside dense ones.
        skipped: tokens that get no weight and no vector.
    """

    tokens: list[Layer] = field(default_factory=list)
    vector: list[Layer] = field(default_factory=list)
    sparse: Layer | None = None
    many: Layer | None = None
    skipped: frozenset[int] = frozenset()


class PoolingModel:
    """A checkpoint that embeds, scores or classifies.

    Attributes:
        info: facts about it.
        preparer: makes items ready.
    """

    def __init__(self, config: PoolingConfig, progress: Callable[[str], None]) -> None:
        """Load it and find out how it runs.

        Raises:
            ConfigError: the settings do not fit the checkpoint or the machine.
            ModelError: the checkpoint is missing, broken, or does not run exactly.
        """
        started = time.monotonic()
        torch.set_num_threads(config.num_threads or max(1, usable_cpus() - 1))
        self._recipe = recipe = read_recipe(config)
        device = choose_device(config.device)
        self._hook = AttentionHook()
        self._encoder = encoder = load_encoder(
            recipe, dtype=config.dtype, device=device, attention=self._hook.name, progress=progress
        )
        limit = _longest(config, recipe, encoder)
        progress("comparing a mixed batch with each text alone")
        self._head: Head | None = None
        images = None
        if recipe.loader == TOWERS:
            self._way: Way | None = None
            path, difference = "padded", choose_towers(encoder, recipe.architecture, limit)
            images = (ImageReader(recipe), _image_tokens(encoder))
        else:
            self._way = way = choose_way(encoder, self._hook, recipe.architecture, limit)
            path, difference = way.path, way.difference
            if recipe.loader == SEQUENCE:
                self._head = choose_head(encoder, way, recipe.architecture, limit)
                path = "padded" if self._head.rows == "whole" else path
        self._poolers, self._normalizes = self._choose_pooling()
        self._layers = _load_layers(config, recipe, encoder)
        self._judge = None
        if recipe.loader == CAUSAL:
            self._judge = Judge(encoder.tokenizer, recipe.judge_tokens, recipe.template_kwargs)
        default = _CPU_TOKENS if device.type == "cpu" else _GPU_TOKENS
        self.info = PoolingInfo(
            model=config.model,
            architecture=recipe.architecture,
            task=recipe.task,
            kinds=recipe.kinds,
            dimension=self._dimension(),
            max_model_len=limit,
            vocab_size=encoder.vocab_size,
            pooling=self._describe_pooling(),
            normalizes=self._normalizes,
            activation=recipe.activation if recipe.task != "embed" else "none",
            path=path,
            labels=_labels(recipe),
            prompts=dict(recipe.prompts),
            default_prompt_name=recipe.default_prompt_name,
            accepts_images=recipe.loader == TOWERS,
            device=str(device),
            dtype=str(encoder.dtype).removeprefix("torch."),
            max_batch_tokens=config.max_batch_tokens or default,
            self_check_difference=difference,
            load_seconds=time.monotonic() - started,
        )
        self.preparer = Preparer(
            recipe,
            self.info,
            encoder.tokenizer,
            judge=self._judge,
            images=images,
        )

    def close(self) -> None:
        """Take the model out of transformers' attention interface, so that it can be freed."""
        self._hook.remove()

    @torch.inference_mode()
    def run(self, batch: Sequence[Prepared]) -> list[Value | None]:
        """Compute prepared items together.

        Returns:
            One value each; None where it is not made of finite numbers.
        """
        images = [i for i, one in enumerate(batch) if one.pixels is not None]
        texts = [i for i, one in enumerate(batch) if one.pixels is None]
        found: list[Value | None] = [None] * len(batch)
        if images:
            pixels = torch.stack([_pixels(batch[i]) for i in images])
            vectors = image_vectors(self._encoder, pixels)
            for i, value in zip(
                images, self._finish_dense(vectors, _take(batch, images)), strict=True
            ):
                found[i] = value
        for part in self._split(batch, texts):
            for i, value in zip(part, self._run_texts(_take(batch, part)), strict=True):
                found[i] = value
        return found

    def _split(self, batch: Sequence[Prepared], texts: list[int]) -> list[list[int]]:
        """Texts in order of length; where batches are padded, cut where padding would grow."""
        order = sorted(texts, key=lambda i: len(batch[i].token_ids))
        has_padded_head = self._head is not None and self._head.rows in ("all", "whole")
        is_packed = self._way is not None and self._way.path == "packed" and not has_padded_head
        if is_packed or not order:
            return [order] if order else []
        parts, first = [[order[0]]], len(batch[order[0]].token_ids)
        for i in order[1:]:
            length = len(batch[i].token_ids)
            if length > first * 1.25 + 8:
                parts.append([])
                first = length
            parts[-1].append(i)
        return parts

    def _run_texts(self, items: list[Prepared]) -> list[Value | None]:
        encoder = self._encoder
        batch = TokenBatch.of(
            [one.token_ids for one in items], [one.type_ids for one in items], encoder.device
        )
        if self._way is None:
            return self._finish_dense(text_vectors(encoder, batch), items)
        if self._head is not None and self._head.rows == "whole":
            return self._finish_scores(self._head.logits(None, batch).float(), items)
        hidden = self._way.forward(batch)
        if self._head is not None:
            return self._finish_scores(self._head.logits(hidden, batch).float(), items)
        if self._judge is not None:
            return self._finish_scores(self._judge_logits(hidden, batch), items)
        if self._recipe.loader == MASKED:
            return [_nonzero(row) for row in self._splade(hidden, batch)]
        return self._embed(hidden, batch, items)

    def _judge_logits(self, hidden: Tensor, batch: TokenBatch) -> Tensor:
        """[num_texts, 1]: the logit of yes, less that of no."""
        assert self._judge is not None
        last = torch.tensor(batch.starts[1:], device=hidden.device) - 1
        parts = [logits for _, logits in token_logits(self._encoder, hidden[last])]
        logits = torch.cat(parts).float()
        score = logits[:, self._judge.yes]
        if self._judge.no is not None:
            score = score - logits[:, self._judge.no]
        return score[:, None]

    def _splade(self, hidden: Tensor, batch: TokenBatch) -> Tensor:
        """[num_texts, vocab_size]: how much each text is about each token."""
        strategy, times = self._recipe.splade
        starts = batch.starts
        rows: Tensor | None = None
        for first, logits in token_logits(self._encoder, hidden):
            logits = logits.float()
            if rows is None:
                # The largest of what is not negative: the same as the ReLU of the largest.
                rows = logits.new_zeros(len(batch.lens), logits.shape[1])
            for number, (start, end) in enumerate(itertools.pairwise(starts)):
                part = logits[max(0, start - first) : max(0, end - first)]
                if len(part) == 0:
                    continue
                if strategy == "max":
                    rows[number] = torch.maximum(rows[number], part.amax(0))
                else:
                    rows[number] += _log1p(part.relu(), times).sum(0)
        assert rows is not None
        return _log1p(rows, times) if strategy == "max" else rows

    def _embed(
        self, hidden: Tensor, batch: TokenBatch, items: list[Prepared]
    ) -> list[Value | None]:
        for layer in self._layers.tokens:
            hidden = layer(hidden.float())
        starts = batch.starts
        found: list[Value | None] = [None] * len(items)
        dense = [i for i, one in enumerate(items) if one.item.kind == "dense"]
        if dense:
            spans = [(starts[i] + items[i].prompt_len, starts[i + 1]) for i in dense]
            vectors = pool(hidden, spans, self._poolers)
            for layer in self._layers.vector:
                vectors = layer(vectors)
            for i, value in zip(
                dense, self._finish_dense(vectors, _take(items, dense)), strict=True
            ):
                found[i] = value
        for i, one in enumerate(items):
            rows = hidden[starts[i] : starts[i + 1]].float()
            if one.item.kind == "sparse":
                found[i] = self._lexical(rows, one.token_ids)
            elif one.item.kind == "multi_vector":
                found[i] = self._many_vectors(rows, one)
        return found

    def _lexical(self, rows: Tensor, token_ids: list[int]) -> Value | None:
        """Weight of each token of a text, the largest where it comes more than once."""
        assert self._layers.sparse is not None
        weights = self._layers.sparse(rows).squeeze(-1).relu()
        if not weights.isfinite().all():
            return None
        found: dict[int, float] = {}
        for token_id, weight in zip(token_ids, weights.tolist(), strict=True):
            if weight > found.get(token_id, 0.0) and token_id not in self._layers.skipped:
                found[token_id] = weight
        return found

    def _many_vectors(self, rows: Tensor, one: Prepared) -> Value | None:
        if self._layers.many is not None:
            # The first token stands for the whole text, which the dense vector already does.
            rows = functional.normalize(self._layers.many(rows[1:]), dim=-1)
        elif self._layers.skipped:
            kept = [i for i, t in enumerate(one.token_ids) if t not in self._layers.skipped]
            rows = rows[torch.tensor(kept, dtype=torch.int64, device=rows.device)]
        if one.item.dimensions is not None:
            rows = functional.normalize(rows[:, : one.item.dimensions], dim=-1)
        return _array(rows) if rows.isfinite().all() else None

    def _finish_dense(self, vectors: Tensor, items: list[Prepared]) -> list[Value | None]:
        """Cut each vector to what was asked for, then bring it to length 1 if it was asked for."""
        rows = _array(vectors)
        found: list[Value | None] = []
        for row, one in zip(rows, items, strict=True):
            value = row[: one.item.dimensions]
            wants = one.item.normalize
            if self._normalizes if wants is None else wants:
                value = value / max(float(np.linalg.norm(value.astype(np.float64))), 1e-12)
            value = np.ascontiguousarray(value, dtype=np.float32)
            found.append(value if np.isfinite(value).all() else None)
        return found

    def _finish_scores(self, logits: Tensor, items: list[Prepared]) -> list[Value | None]:
        found: list[Value | None] = []
        for row, one in zip(logits, items, strict=True):
            values = _activate(row, one.item.activation or self._recipe.activation)
            if not values.isfinite().all():
                found.append(None)
            elif one.item.kind == "score":
                found.append(float(values[0]))
            else:
                found.append(_array(values))
        return found

    def _choose_pooling(self) -> tuple[tuple[str, ...], bool]:
        """Poolers and whether vectors get length 1; the usual where the files say nothing."""
        recipe = self._recipe
        is_causal = self._way is not None and self._way.is_causal
        poolers = recipe.poolers or (("lasttoken",) if is_causal else ("mean",))
        usual = is_causal and "dense" in recipe.kinds
        return poolers, usual if recipe.normalizes is None else recipe.normalizes

    def _dimension(self) -> int:
        recipe, encoder = self._recipe, self._encoder
        if recipe.task != "embed":
            return 0
        if recipe.loader == TOWERS:
            return int(encoder.model.config.projection_dim)
        if recipe.loader == MASKED:
            return encoder.vocab_size
        text = encoder.model.config.get_text_config()
        size = int(getattr(text, "hidden_size", 0) or getattr(text, "d_model", 0))
        for layer in self._layers.tokens:
            size = layer.out_features or size
        if "dense" in recipe.kinds:
            size *= len(self._poolers)
        for layer in self._layers.vector:
            size = layer.out_features or size
        return size

    def _describe_pooling(self) -> str:
        recipe = self._recipe
        if recipe.loader == MASKED:
            return "splade"
        if recipe.loader == CAUSAL:
            return "yes or no"
        if recipe.loader == SEQUENCE:
            return "the model's head"
        if recipe.loader == TOWERS:
            return "the model's projection"
        return "none" if recipe.kinds == ("multi_vector",) else "+".join(self._poolers)


def _take(items: Sequence[Prepared], places: list[int]) -> list[Prepared]:
    return [items[i] for i in places]


def _array(values: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return values.float().cpu().numpy()


def _pixels(one: Prepared) -> Tensor:
    assert one.pixels is not None
    return one.pixels


def _nonzero(row: Tensor) -> Value | None:
    if not row.isfinite().all():
        return None
    places = row.nonzero().squeeze(1)
    return dict(zip(places.tolist(), row[places].tolist(), strict=True))


def _log1p(values: Tensor, times: int) -> Tensor:
    for _ in range(times):
        values = values.log1p()
    return values


def _activate(row: Tensor, name: str) -> Tensor:
    """Scores [num_labels] of logits [num_labels]."""
    if name == "none":
        return row
    return row.sigmoid() if name == "sigmoid" else row.softmax(-1)


def _labels(recipe: Recipe) -> tuple[str, ...]:
    if recipe.loader != SEQUENCE:
        return ()
    names: dict[Any, Any] = recipe.config.id2label or {}
    count = int(recipe.config.num_labels or 0)
    return tuple(str(names.get(i, f"LABEL_{i}")) for i in range(count))


def _image_tokens(encoder: Encoder) -> int:
    """What an image counts for: its patches."""
    vision = encoder.model.config.vision_config
    side = getattr(vision, "image_size", 224) // max(1, getattr(vision, "patch_size", 16))
    return int(side * side + 1)


def _longest(config: PoolingConfig, recipe: Recipe, encoder: Encoder) -> int:
    """Longest input in tokens.

    Raises:
        ConfigError: the setting is beyond what the model has positions for.
    """
    limit = model_limit(recipe.config.get_text_config())
    most, reason = limit.num_tokens, limit.reason
    table = position_table(encoder)
    if table is not None:
        positions = int(table.weight.shape[0])
        if table.padding_idx is not None:
            positions -= table.padding_idx + 1
        if positions < most:
            most, reason = positions, "its position embeddings"
    asked = config.max_model_len
    if asked is not None:
        if asked > most:
            raise ConfigError(f"max_model_len: must be at most {most} ({reason}), got {asked}")
        return asked
    said = recipe.max_seq_length or encoder.tokenizer.model_max_length
    return min(most, said) if 0 < said < _NO_LIMIT else most


def _load_layers(config: PoolingConfig, recipe: Recipe, encoder: Encoder) -> Layers:
    device, root = encoder.device, Path(config.model)
    skipped: set[int] = set()
    sparse = many = None
    if "sparse" in recipe.kinds and recipe.loader != MASKED:
        sparse = load_linear(root / "sparse_linear.pt", device)
        names = ("cls_token_id", "eos_token_id", "sep_token_id", "pad_token_id", "unk_token_id")
        found = (getattr(encoder.tokenizer, name, None) for name in names)
        skipped = {token_id for token_id in found if token_id is not None}
    if "multi_vector" in recipe.kinds and "dense" in recipe.kinds:
        many = load_linear(root / "colbert_linear.pt", device)
    vocabulary = encoder.tokenizer.get_vocab() if recipe.skip_words else {}
    skipped |= {vocabulary[word] for word in recipe.skip_words if word in vocabulary}
    return Layers(
        tokens=[load_layer(part, device) for part in recipe.token_parts],
        vector=[load_layer(part, device) for part in recipe.vector_parts],
        sparse=sparse,
        many=many,
        skipped=frozenset(skipped),
    )
