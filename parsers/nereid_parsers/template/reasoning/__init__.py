"""Infers how a chat template writes reasoning: its markers, and where reasoning may stand."""
