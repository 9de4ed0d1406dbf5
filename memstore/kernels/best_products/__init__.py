"""The largest product of each group of keys with each query, in 8 bits: what searches of many keys look at first."""

from memstore.kernels.best_products.api import best_products

__all__ = ["best_products"]
