"""DRT, the language model of grouped cross attention: it retrieves blocks of its own past and learns which.

``DRTForCausalLM`` trains, saves and generates as any Hugging Face model does; ``memstore.attach`` gives it a memory.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from memstore.models.drt.at_once import SharedBlocks
from memstore.models.drt.cache import DRTCache
from memstore.models.drt.configuration import DRTConfig
from memstore.models.drt.modeling import DRTForCausalLM, DRTModel, DRTOutput
from memstore.models.drt.reader import DRTReader

__all__ = ["DRTCache", "DRTConfig", "DRTForCausalLM", "DRTModel", "DRTOutput", "DRTReader", "SharedBlocks"]

# So that transformers' own loaders know a saved DRT once this package is imported.
AutoConfig.register(DRTConfig.model_type, DRTConfig, exist_ok=True)
AutoModelForCausalLM.register(DRTConfig, DRTForCausalLM, exist_ok=True)
