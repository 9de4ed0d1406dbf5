"""The largest product of each block's codes with each query, where the codes lie: in 8 bits or in one, on a GPU too."""

from memstore.kernels.best_codes.api import best_codes
from memstore.kernels.best_codes.encoding import hold, numbers

__all__ = ["best_codes", "hold", "numbers"]
