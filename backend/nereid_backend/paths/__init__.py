# SPDX-License-Identifier: Apache-2.0
"""The paths on which a model computes a step: packed, rows, padded and single.

packed.py             all tokens of a step as one row; attention reads the KV cache in blocks
recurrent.py          the path "rows": models that keep a state for each sequence
recurrent_cache.py    the states of these models, and the cache that the models get
padded.py             models with an attention of their own, which get a padded cache
single_sequence.py    all other models, one sequence at a time
step_batch.py         converts a step plan into tensors
model_call.py         functions that several paths use
compiled_forward.py   compiles a model's forward pass
cuda_graphs.py        replays decode steps as CUDA graphs
cuda_capture.py       captures CUDA graphs
"""
