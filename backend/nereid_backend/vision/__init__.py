# SPDX-License-Identifier: Apache-2.0
"""Chat with images: preparation of prompts and images, and forward paths for images."""
