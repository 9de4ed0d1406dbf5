"""The version of memstore, and its only home."""

__version__ = "0.1.0"
