"""Fakes with real behaviour, which several tests share."""
