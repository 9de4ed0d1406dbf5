"""DRT, the language model of grouped cross attention: it retrieves blocks of its own past and learns which ones.

``DRTForCausalLM`` trains, saves and generates as any Hugging Face model does. ``memstore.attach`` gives it a memory.
"""

from typing import TYPE_CHECKING

from memstore.lazy import lazy

if TYPE_CHECKING:
    from memstore.models.drt.cache import DRTCache as DRTCache
    from memstore.models.drt.configuration import DRTConfig as DRTConfig
    from memstore.models.drt.modeling import DRTForCausalLM as DRTForCausalLM
    from memstore.models.drt.reader import DRTReader as DRTReader
    from memstore.models.drt.retrieval import SharedBlocks as SharedBlocks
else:
    __getattr__ = lazy(
        __name__,
        {
            "cache": "DRTCache",
            "configuration": "DRTConfig",
            "modeling": "DRTForCausalLM",
            "reader": "DRTReader",
            "retrieval": "SharedBlocks",
        },
    )
