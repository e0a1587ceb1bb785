# SPDX-License-Identifier: Apache-2.0
"""Chats that contain images: preparation of the prompts, and computation with the model."""
