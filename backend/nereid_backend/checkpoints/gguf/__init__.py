# SPDX-License-Identifier: Apache-2.0
"""Reads GGUF files, and describes a GGUF file as a checkpoint folder of transformers."""
