# SPDX-License-Identifier: Apache-2.0
"""An engine that writes scripted answers without a model, for tests and load tests."""
