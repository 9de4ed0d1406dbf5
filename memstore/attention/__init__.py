"""Functions and layers that query a memory: where blocks are placed, and how they are chosen."""

from memstore.attention.positions import Placement, place
from memstore.attention.routing import Router, choose, late_interaction, pooled, slots_by_score, sub_block_means

__all__ = ["Placement", "Router", "choose", "late_interaction", "place", "pooled", "slots_by_score", "sub_block_means"]
