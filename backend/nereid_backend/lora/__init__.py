# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: reading their files, and keeping the adapters in memory."""
