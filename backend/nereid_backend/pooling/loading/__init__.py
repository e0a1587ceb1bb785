# SPDX-License-Identifier: Apache-2.0
"""Loading of pooling models: the description of a checkpoint, its weights and output layers."""
