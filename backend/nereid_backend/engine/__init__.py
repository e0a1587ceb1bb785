# SPDX-License-Identifier: Apache-2.0
"""The engine, which generates tokens for many requests at the same time.

engine.py               the interface, `Engine`
step_engine.py          the part of the interface that drives the steps
engine_parts.py         loads a model, and creates the parts that belong to the model
reload_weights.py       replaces these parts by the parts of a model with other weights
new_sequences.py        checks new requests, and creates their sequences
request_preparation.py, pending_grammars.py
                        compiles grammars and reads cached prefixes before a request starts
step_loop.py            plans, runs and commits the steps
offline.py              generates the outputs of a list of prompts
disk_tier.py            the prefix cache on disk
prefix_sessions.py      the sessions of the prefix cache
"""
