"""Functions and layers that query a memory: they choose blocks and attend to them."""

from memstore.attention.routing import Router as Router
from memstore.attention.routing import choose as choose
from memstore.attention.routing import late_interaction as late_interaction
from memstore.attention.routing import pooled as pooled
from memstore.attention.routing import slots_by_score as slots_by_score
from memstore.attention.routing import sub_block_means as sub_block_means
