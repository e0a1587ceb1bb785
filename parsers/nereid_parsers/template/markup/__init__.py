"""Markup: find the markers of a text, pair them, and compare texts token by token."""
