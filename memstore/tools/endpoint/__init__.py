"""Memories behind an OpenAI-compatible endpoint: ``memstore serve``."""
