# SPDX-License-Identifier: Apache-2.0
"""Computes prompts that contain images, videos or audio in the forward paths of the engine."""
