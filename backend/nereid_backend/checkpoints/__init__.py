# SPDX-License-Identifier: Apache-2.0
"""The file formats of checkpoints: safetensors with quantised weights, and GGUF."""
