# SPDX-License-Identifier: Apache-2.0
"""The names of the models `embedding` and `rerank`, and the names of their tensors."""

EMBEDDING = "embedding"
RERANK = "rerank"

# Inputs of the model `embedding`
TEXTS = "texts"
INPUT_IDS = "input_ids"
INPUT_LENGTHS = "input_lengths"
PARTS = "parts"
# Inputs of the model `rerank`, in addition to TEXTS and PARTS
QUERY = "query"
DOCUMENTS = "documents"
# Inputs of the two models
OPTIONS = "options"
RETURN_INFO = "return_info"

# Outputs of the model `embedding`
EMBEDDINGS = "embeddings"
NUM_VECTORS = "num_vectors"
SPARSE = "sparse"
# Outputs of the model `rerank`
SCORES = "scores"
PROBABILITIES = "probabilities"
OFFSETS = "offsets"
# Outputs of the two models
NUM_TOKENS = "num_tokens"
INFO = "info"
