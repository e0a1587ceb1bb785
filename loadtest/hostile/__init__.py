"""Hostile requests for a real server, and a program that checks what they do to other clients."""
