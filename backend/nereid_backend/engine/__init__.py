# SPDX-License-Identifier: Apache-2.0
"""The engine, which generates tokens for many requests at the same time.

engine.py               the interface, `Engine`
engine_protocol.py      the protocol that `Engine` and the scripted engine of the tests implement
engine_parts.py         loads a model, and creates the objects that depend on the model
reload_weights.py       replaces the weights of the model by the weights of another checkpoint
new_sequences.py        checks new requests, and creates their sequences
request_preparation.py  compiles grammars and reads cached prefixes before a request starts
step_loop.py            plans, runs and commits the steps
offline.py              generates the outputs of a list of prompts
disk_tier.py            the prefix cache on disk
open_disk_tier.py       opens the folder of the prefix cache on disk
prefix_sessions.py      the sessions of the prefix cache
"""
