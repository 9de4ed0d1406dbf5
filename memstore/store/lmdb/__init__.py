"""Memories in one LMDB environment."""
