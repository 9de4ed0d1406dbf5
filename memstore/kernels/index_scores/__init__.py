"""The choice of a model's own index: the keys with the highest scores of its index heads for each query."""

from memstore.kernels.index_scores.api import choose, merge_choices

__all__ = ["choose", "merge_choices"]
