"""Functions and layers that query a memory: they choose blocks and attend to them."""

from memstore.attention.routing import Router, choose, late_interaction, pooled, slots_by_score, sub_block_means

__all__ = [
    "Router",
    "choose",
    "late_interaction",
    "pooled",
    "slots_by_score",
    "sub_block_means",
]
