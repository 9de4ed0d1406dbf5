"""Functions and layers that query a memory: where blocks are placed, how they are chosen and attended to."""

from memstore.attention.gca import BlockEncoder, CausalRetriever, GroupedCrossAttention
from memstore.attention.positions import Placement, place
from memstore.attention.routing import Router, choose, late_interaction, pooled, slots_by_score, sub_block_means

__all__ = [
    "BlockEncoder",
    "CausalRetriever",
    "GroupedCrossAttention",
    "Placement",
    "Router",
    "choose",
    "late_interaction",
    "place",
    "pooled",
    "slots_by_score",
    "sub_block_means",
]
