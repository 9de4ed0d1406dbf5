"""Attention over rows that were chosen for each query: latents of MLA, which are keys and values at once, or both."""

from memstore.kernels.latent_attention.api import attend, attend_rows

__all__ = ["attend", "attend_rows"]
