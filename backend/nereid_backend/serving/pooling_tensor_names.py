# SPDX-License-Identifier: Apache-2.0
"""Names in the interface of the models `embedding` and `rerank`: tensors and settings."""

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

# The fields of PoolingConfig and of PoolingServing. The list repeats them so that the language
# model's stubs can recognise the pooling models' environment variables without importing either
# class.
SETTINGS = (
    *("model", "task", "pooling", "dtype", "device", "max_batch_tokens", "max_model_len"),
    *("max_num_waiting", "num_threads"),
    *("served_model_name", "max_requests", "start_timeout_s", "hang_timeout_s"),
    "max_restarts",
)
SETTING_NAMES = frozenset(f"{kind}_{name}" for kind in (EMBEDDING, RERANK) for name in SETTINGS)
"""The names of all settings of the two models, in lower case and without the prefix NEREID_."""
