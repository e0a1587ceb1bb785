# SPDX-License-Identifier: Apache-2.0
"""Reads the files of LoRA adapters, and stores the adapters in memory."""
