"""Models that bring their own index: trained sparse attention, from a memory.

DeepSeek-V3.2 and similar models score every past token (pool, run, block) with a small index, and attend to the best.
Here the index keys are the landmarks of a memory, and the states lie in its blocks. The model chooses as usual.
"""

from typing import TYPE_CHECKING

from memstore.lazy import lazy

if TYPE_CHECKING:
    from memstore.models.indexed.family import FAMILIES, IndexedFamily, IndexedLayer, Projections, family_of
    from memstore.models.indexed.reader import IndexedReader
else:
    __getattr__ = lazy(
        __name__, {"family": "FAMILIES, Projections, IndexedFamily, IndexedLayer, family_of", "reader": "IndexedReader"}
    )

__all__ = ["FAMILIES", "IndexedFamily", "IndexedLayer", "IndexedReader", "Projections", "family_of"]
