"""A model cut off behind the layer that routes: it finds what the whole model finds, and reads in a third of the time.

The layers before the routing one see sink and window only, so what is chosen there does not depend on what comes after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from memstore.readers.stock.architecture import examine
from memstore.readers.stock.reader import usual_routing_layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def cut_off(model: PreTrainedModel) -> int | None:
    """Take the layers behind the routing one out of ``model``, which then cannot answer; the number of that layer.

    None, and the model stays whole, where some of its layers see a few tokens only, or do not attend: which ones need
    the memory could not be told from the first layers.
    """
    architecture = examine(model)
    plans = architecture.layers
    if architecture.linear is not None or any(plan.local for plan in plans):
        return None
    layer = usual_routing_layer(len(plans))
    (blocks,) = (each for each in model.modules() if isinstance(each, nn.ModuleList) and plans[0].block in set(each))
    del blocks[layer + 1 :]
    config = model.config.get_text_config(decoder=True)
    config.num_hidden_layers = layer + 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: layer + 1]
    return layer
