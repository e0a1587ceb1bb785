# SPDX-License-Identifier: Apache-2.0
"""A registry of pre-tokenizers that GGUF files name in `tokenizer.ggml.pre`.

The names and their rules are those of llama.cpp.
"""

# The vocabularies of these pre-tokenizers have tiktoken's format. For this format, llama.cpp has
# two rules: a word that is in the vocabulary is one token, even if the merges do not produce this
# token, and a BOS token is added by default.
TIKTOKEN_PRE_TOKENIZERS = frozenset(
    (
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
        *("lfm2", "jina-v5-nano", "tekken"),
    )
)
# The original tokenizers of these pre-tokenizers compose characters (Unicode normalization form C)
# before they divide a text into words. Example: "e" and a combining accent become "é".
NFC_PRE_TOKENIZERS = frozenset(("qwen2", "deepseek-r1-qwen"))
