"""Landmark attention: a softmax over landmarks decides how much attention each earlier block gets."""

from memstore.kernels.landmark_attention.api import landmark_attention

__all__ = ["landmark_attention"]
