# SPDX-License-Identifier: Apache-2.0
"""Chat with images: decoding, the checkpoint's processor, and the forward paths of images."""
