# SPDX-License-Identifier: Apache-2.0
"""Compiles the forward pass of a model into a library on disk, and runs the library.

load_library.py             loads the library into the engine, or compiles it first
build_library.py            traces the code of a model, and compiles the trace into a library
library_files.py            manages the folder of a library
background_compilation.py   starts another process that compiles the forward pass
compile_process.py          the program that runs in this process
model_skeleton.py           sends a model without its weights to this process
"""
