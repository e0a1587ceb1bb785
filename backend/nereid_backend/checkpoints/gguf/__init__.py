# SPDX-License-Identifier: Apache-2.0
"""GGUF files: reading them, and describing them as a checkpoint folder of transformers."""
