# SPDX-License-Identifier: Apache-2.0
"""The names of the models `embedding` and `rerank`, and of their tensors."""

EMBEDDING = "embedding"
RERANK = "rerank"

# embedding: inputs
TEXTS = "texts"
INPUT_IDS = "input_ids"
INPUT_LENGTHS = "input_lengths"
PARTS = "parts"
# rerank: inputs, beside TEXTS
QUERY = "query"
DOCUMENTS = "documents"
# both: inputs
OPTIONS = "options"
RETURN_INFO = "return_info"

# embedding: outputs
EMBEDDINGS = "embeddings"
NUM_VECTORS = "num_vectors"
SPARSE = "sparse"
# rerank: outputs
SCORES = "scores"
PROBABILITIES = "probabilities"
# both: outputs
NUM_TOKENS = "num_tokens"
INFO = "info"
