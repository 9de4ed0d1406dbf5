"""Training models that retrieve: on texts, on recipes that need no data, and on prompts with answers.

Code for one kind of model is in its folder (``memstore.models.<kind>.training``), where ``memstore train`` finds it.
Training needs transformers and accelerate: ``pip install "torch-memstore[train]"``.
"""

from typing import TYPE_CHECKING

from memstore.lazy import lazy

if TYPE_CHECKING:
    from memstore.train.options import Optimisation as Optimisation
    from memstore.train.options import Runtime as Runtime
    from memstore.train.recipes import Recipe as Recipe
    from memstore.train.router import train_router as train_router
    from memstore.train.texts import train_on_pairs as train_on_pairs
    from memstore.train.texts import train_on_texts as train_on_texts
    from memstore.train.texts import train_recipe as train_recipe
else:
    __getattr__ = lazy(
        __name__,
        {
            "options": "Optimisation, Runtime",
            "recipes": "Recipe",
            "router": "train_router",
            "texts": "train_on_pairs, train_on_texts, train_recipe",
        },
    )
