"""HiLS attention: blocks are chosen and weighted by an estimate of their log-sum-exp, beside a window."""

from memstore.kernels.hils_attention.api import (
    attend_chosen,
    best_blocks,
    block_weights,
    choose_blocks,
    hils_attention,
    pool_landmarks,
    window_attention,
)

__all__ = [
    "attend_chosen",
    "best_blocks",
    "block_weights",
    "choose_blocks",
    "hils_attention",
    "pool_landmarks",
    "window_attention",
]
