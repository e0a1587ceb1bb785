"""The blocks of the KV cache: their allocation, the prefix cache, and the attention window."""
# SPDX-License-Identifier: Apache-2.0
