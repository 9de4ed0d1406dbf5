"""Landmark models: language models whose attention retrieves blocks of their own past, and the paper's baselines.

``LandmarkForCausalLM`` trains, saves and generates as any Hugging Face model does; ``make_landmark`` makes one of a
stock Llama-like model. ``Reader`` puts their blocks into a memory.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from memstore.models.landmark.cache import LandmarkCache
from memstore.models.landmark.configuration import LandmarkConfig
from memstore.models.landmark.modeling import LandmarkForCausalLM, LandmarkModel, LandmarkOutput
from memstore.models.landmark.past import Past, WindowCache
from memstore.models.landmark.reader import Reader

__all__ = [
    "LandmarkCache",
    "LandmarkConfig",
    "LandmarkForCausalLM",
    "LandmarkModel",
    "LandmarkOutput",
    "Past",
    "Reader",
    "WindowCache",
]

# So that transformers' own loaders know a saved landmark model once this package is imported.
AutoConfig.register(LandmarkConfig.model_type, LandmarkConfig, exist_ok=True)
AutoModelForCausalLM.register(LandmarkConfig, LandmarkForCausalLM, exist_ok=True)
