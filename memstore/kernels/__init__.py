"""Pure tensor functions, one folder each: ``api.py`` checks and dispatches, ``reference.py`` defines the truth."""

from memstore.kernels.block_attention import block_attention, merge_attention

__all__ = ["block_attention", "merge_attention"]
