"""Deltas of the postprocessor to chunks, events and whole answers."""
