from __future__ import annotations

from typing import Any

import memstore
from benchmarks.questions.cut import cut_off
from tests.eval.drts import byte_tokenizer
from tests.readers.models import tiny

TEXT = " ".join(
    f"Boat {number} carries {number * 7} barrels of {['salt', 'tar', 'rum'][number % 3]}." for number in range(60)
)


def found(model: Any, layer: int | None) -> list[list[tuple[int, float]]]:
    options: dict[str, Any] = {} if layer is None else {"routing_layers": (layer,)}
    tokenizer: Any = byte_tokenizer()
    with memstore.attach(model, "ram:", tokenizer=tokenizer, block_size=8, window=64, segment=64, **options) as reader:
        reader.read(TEXT, document="boats")
        return [[(m.block, m.score) for m in reader.search(text, 8)] for text in ("Boat 7", "barrels of rum")]


def test_a_model_that_is_cut_off_finds_what_the_whole_one_finds() -> None:
    model = tiny("llama", vocab_size=300, num_hidden_layers=8)
    whole = found(model, None)
    layer = cut_off(model)
    assert layer == 2
    assert found(model, layer) == whole


def test_a_model_some_of_whose_layers_slide_stays_whole() -> None:
    model = tiny("gemma3_text")  # "gemma3" would bring eyes of the usual size
    layers = model.config.num_hidden_layers
    assert cut_off(model) is None
    assert model.config.num_hidden_layers == layers
