"""The blocks whose landmarks match best: scores and their top k in one go, without holding all scores."""

from memstore.kernels.search_blocks.api import search_blocks

__all__ = ["search_blocks"]
