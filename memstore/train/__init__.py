"""Training the models of ``memstore.models`` on texts, on recipes that need no data, and on prompts with answers.

``memstore train drt`` calls ``train_on_texts``, ``train_recipe`` and ``train_on_pairs``, ``train landmark`` the first
two of them, ``train memorizing`` ``train_on_documents`` and ``train_stock_memory``, and ``train router``
``train_router``. They need transformers and accelerate: ``pip install "torch-memstore[train]"``.
"""

from memstore.eval.pairs import align
from memstore.train.documents import train_on_documents
from memstore.train.drt import train_on_pairs, train_on_texts, train_recipe
from memstore.train.recipes import RECIPES, Recipe
from memstore.train.router import RouterOptions, train_router
from memstore.train.settings import Optimisation, Runtime
from memstore.train.stock import train_stock_memory

__all__ = [
    "RECIPES",
    "Optimisation",
    "Recipe",
    "RouterOptions",
    "Runtime",
    "align",
    "train_on_documents",
    "train_on_pairs",
    "train_on_texts",
    "train_recipe",
    "train_router",
    "train_stock_memory",
]
