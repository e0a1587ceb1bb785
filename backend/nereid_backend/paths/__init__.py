# SPDX-License-Identifier: Apache-2.0
"""The forward paths packed, rows, padded and single. A model uses one of these paths.

packed.py             `packed`: all tokens of a step as one row; attention reads blocks of the cache
recurrent.py          `rows`: models with a recurrent state for each sequence
recurrent_cache.py    the states of these models, and the cache that the models get
row_keys.py           the keys and values of the path `rows`
gathered_cache.py     a cache of transformers that reads keys and values from blocks
padded.py             `padded`: models with their own attention code, which get a padded cache
single_sequence.py    `single`: all other models, one sequence at a time
step_batch.py         converts a step plan into tensors
length_groups.py      divides the decodes of a step into groups of similar lengths
block_table_rows.py   the block tables of running sequences as arrays
model_call.py         functions that several paths use
position_embeddings.py
                      sets the positions in modules that derive positions from the cache
stored_prefixes.py    converts blocks and snapshots to bytes and back
compiled_forward/     compiles the forward pass of a model into a library, and loads the library
cuda_graphs/          replays steps as CUDA graphs
"""
