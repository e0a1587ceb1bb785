# SPDX-License-Identifier: Apache-2.0
"""The forward paths packed, rows, padded and single. Each one can compute the steps of a model.

packed.py             `packed`: all tokens of a step as one row; attention reads blocks of the cache
recurrent.py          `rows`: models that keep a state for each sequence
recurrent_cache.py    the states of these models, and the cache that the models get
padded.py             `padded`: models with their own attention code, which get a padded cache
single_sequence.py    `single`: all other models, one sequence at a time
step_batch.py         converts a step plan into tensors
model_call.py         functions that several paths use
compiled_forward.py   the compiled forward pass of a model
build_library.py      traces the code of a model, and compiles it into a library
library_files.py      the folder of such a library
background_compilation.py, compile_process.py
                      compiles a forward pass in another process
model_skeleton.py     sends a model without its weights to this process
cuda_graphs.py        replays decode steps as CUDA graphs
piecewise_graphs.py   replays steps with prefills as several CUDA graphs each
cuda_capture.py       captures CUDA graphs
"""
