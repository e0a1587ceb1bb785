"""Converts generated tokens into text, and finds stop strings in the text."""
