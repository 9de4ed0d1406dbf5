"""A model cut off behind the layer that routes: it finds the same blocks, and reads in a third of the time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from memstore.readers.stock.architecture import examine
from memstore.readers.stock.reader import usual_routing_layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def cut_off(model: PreTrainedModel) -> int | None:
    """Remove the layers behind the routing one from ``model``, which then cannot answer; return that layer's number.

    The rest finds the same blocks as the whole model, and reads in a third of the time. The layers before the routing
    one see only sink and window, so its choice does not depend on later layers. Return None, and keep the model whole,
    if some of its layers see only a few tokens, or do not attend. Then the first layers do not show which layers need
    the memory.
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
