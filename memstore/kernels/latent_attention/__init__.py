"""Attention over rows chosen for each query: MLA latents, which are keys and values at once, or keys and values."""

from memstore.kernels.latent_attention.api import attend, attend_rows

__all__ = ["attend", "attend_rows"]
