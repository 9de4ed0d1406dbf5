"""Readers of a memory: each reads a text into it with a model, and lets the model see it."""
