# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: their files on disk, and the adapters in memory."""
