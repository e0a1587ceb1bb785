# SPDX-License-Identifier: Apache-2.0
"""Prepares a checkpoint for the engine: choice of path, self-check and memory limits."""
