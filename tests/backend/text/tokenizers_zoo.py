"""Small tokenizers of the three common kinds, trained on a few lines of text."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog. Numbers 12345, tabs\tand  double spaces.",
    "Ünïcödé – 你好，世界 🎉👩‍👩‍👧 日本語 ✅ العربية",
    "def f(x):\n    return {'a': [1, 2, 3]}\n",
] * 3
SPECIAL = "<|end|>"


@cache
def byte_level() -> Tokenizer:
    """Return a tokenizer with byte-level BPE, as in GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """Return a tokenizer with BPE and byte fallback, as in Llama 2 and Mistral."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = sorted({c for line in TEXT for c in line if c.isascii() and c.isprintable()} - {" "})
    pieces = ["<unk>", SPECIAL, *bytes_, "▁", *letters, "▁the", "▁qu", "ick", "th", "er", "▁f"]
    vocab = {piece: at for at, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("t", "h"), ("e", "r")]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.add_special_tokens([SPECIAL])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@cache
def unigram() -> Tokenizer:
    """Return a Unigram tokenizer with a Metaspace decoder, as in T5 and XLM-R."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", SPECIAL], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


ALL = {"byte_level": byte_level, "byte_fallback": byte_fallback, "unigram": unigram}
