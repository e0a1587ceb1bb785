"""Tiny random checkpoints of encoders, with a tokenizer and the files that configure pooling."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
)

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
WORDS = [f"w{i}" for i in range(240)]
VOCABULARY = [*SPECIAL, "yes", "no", ",", "query", ":", *WORDS]
_COMMON = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
}
_AUTO = {
    "base": AutoModel,
    "sequence": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
    "masked": AutoModelForMaskedLM,
    "causal": AutoModelForCausalLM,
}


@dataclass(frozen=True)
class Family:
    """An architecture: the values of its config, and the forward path that it uses."""

    name: str
    model_type: str
    extra: dict = field(default_factory=dict)
    path: str = "packed"
    decodes: bool = False

    def save(self, folder: Path, head: str = "base", **config) -> Path:
        """Write a checkpoint with random weights and its tokenizer, and return the folder.

        Args:
            folder: the folder of the checkpoint.
            head: the kind of model, a key of `_AUTO`.
            config: values that replace values of the family's config.
        """
        torch.manual_seed(0)
        settings = AutoConfig.for_model(self.model_type, **{**_COMMON, **self.extra, **config})
        model = _AUTO[head].from_config(settings)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    # The weights are larger than usual, so that the vector of each token depends on
                    # the other tokens.
                    parameter.normal_(0.0, 0.2 if "embed" not in name else 0.5)
                elif "bias" in name:
                    parameter.normal_(0.0, 0.1)
        model.eval().save_pretrained(folder)
        # The tokenizers of encoders add <s> before each text. Some of them also return token types.
        has_types = getattr(settings, "type_vocab_size", 0) > 1
        save_tokenizer(folder, types=has_types, starts=not self.decodes)
        return folder


def save_tokenizer(
    folder: Path,
    *,
    types: bool,
    starts: bool = True,
    template: str | None = None,
    end: str = "</s>",
) -> None:
    """Save a tokenizer with one token for each word of `VOCABULARY`.

    Args:
        folder: the folder of the checkpoint.
        types: whether the tokenizer returns token types.
        starts: whether the token <s> is added before a text.
        template: the chat template, if any.
        end: the token that is added after a text.
    """
    ids = {word: token_id for token_id, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    if starts:
        tokenizer.post_processor = TemplateProcessing(
            single=f"<s> $A {end}",
            pair="<s> $A </s> $B:1 </s>:1",
            special_tokens=[(token, ids[token]) for token in ("<s>", "</s>", end)],
        )
    else:
        tokenizer.post_processor = TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", ids["</s>"])]
        )
    type_names = ["token_type_ids"] if types else []
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        cls_token="<s>",
        pad_token="<pad>",
        eos_token=end,
        sep_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=128,
        model_input_names=["input_ids", *type_names, "attention_mask"],
        chat_template=template,
    ).save_pretrained(folder)


def add_modules(folder: Path, *modules: tuple[str, str, dict], **settings) -> Path:
    """Add the files of sentence-transformers to a checkpoint, and return the folder.

    Args:
        folder: the folder of the checkpoint.
        modules: a tuple (class, subfolder, config) for each module after the transformer.
        settings: the content of config_sentence_transformers.json.
    """
    entries = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    ]
    for number, (class_name, path, config) in enumerate(modules, start=1):
        entries.append({"idx": number, "name": str(number), "path": path, "type": class_name})
        (folder / path).mkdir(exist_ok=True)
        (folder / path / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


def copy_of(folder: Path, target: Path) -> Path:
    """Link the files of a checkpoint in `target`, where a test can replace and add files."""
    for path in folder.iterdir():
        if path.is_file():
            (target / path.name).symlink_to(path)
    return target


def pooling(*modes: str, size: int = 48, **extra) -> tuple[str, str, dict]:
    """Return a pooling module for `add_modules`. The pooled vectors have `size` numbers."""
    config = {"embedding_dimension": size, "pooling_mode": list(modes), **extra}
    return (
        "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
        "1_Pooling",
        config,
    )


NORMALIZE = ("sentence_transformers.base.modules.normalize.Normalize", "2_Normalize", {})

_SLIDING = ["sliding_attention", "full_attention"]
FAMILIES = [
    Family("bert", "bert"),
    Family("roberta", "roberta", {"type_vocab_size": 1}),
    Family("xlm-roberta", "xlm-roberta", {"type_vocab_size": 1}),
    Family(
        "modernbert",
        "modernbert",
        {
            "local_attention": 24,
            "global_attn_every_n_layers": 2,
            "cls_token_id": 0,
            "sep_token_id": 2,
        },
    ),
    Family("distilbert", "distilbert", {"dim": 48, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}),
    Family("mpnet", "mpnet", path="padded"),
    Family(
        "deberta-v2",
        "deberta-v2",
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        path="padded",
    ),
    Family("electra", "electra", {"embedding_size": 48}),
    Family("albert", "albert", {"embedding_size": 32}),
    Family("nomic_bert", "nomic_bert"),
    Family(
        "t5",
        "t5",
        {"d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        path="padded",
    ),
    Family("fnet, mixes along the row", "fnet", path="rows"),
    Family("convbert, convolves along the row", "convbert", {"embedding_size": 48}, path="rows"),
    Family("llama", "llama", {"num_key_value_heads": 2}, decodes=True),
    Family(
        "mistral, sliding window",
        "mistral",
        {"num_key_value_heads": 2, "sliding_window": 12},
        decodes=True,
    ),
    Family("qwen2", "qwen2", {"num_key_value_heads": 2}, decodes=True),
    Family("qwen3", "qwen3", {"num_key_value_heads": 2, "head_dim": 12}, decodes=True),
    Family(
        "gemma2, softcap and sliding window",
        "gemma2",
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "sliding_window": 12,
            "query_pre_attn_scalar": 12,
        },
        decodes=True,
    ),
    Family(
        "gemma3, bidirectional",
        "gemma3_text",
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "sliding_window": 12,
            "layer_types": _SLIDING,
            "use_bidirectional_attention": True,
        },
    ),
]
BY_NAME = {family.name: family for family in FAMILIES}


def text(rng, length: int) -> str:
    """Return a text of random words."""
    return " ".join(rng.choice(WORDS) for _ in range(length))
