# SPDX-License-Identifier: Apache-2.0
"""Reads GGUF files, and creates a checkpoint folder that describes a GGUF file."""
