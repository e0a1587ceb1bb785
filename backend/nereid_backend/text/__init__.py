"""Conversion of generated tokens into text, stop strings and log-probabilities."""
