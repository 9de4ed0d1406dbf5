"""Models that compute with quantised weights: with a memory their logits are what they are without one."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import memstore
from memstore import Retrieval
from memstore.readers.caches import CACHE
from tests.readers.models import tokens

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
READ, PIECE = 213, 32
TORCHAO, BITSANDBYTES = "torchao", "bitsandbytes"
# As they are named in the page: the package, and what makes a model's configuration of it.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "`Int8WeightOnlyConfig`": (TORCHAO, {}),
    "`Float8WeightOnlyConfig`": (TORCHAO, {}),
    "`IntxWeightOnlyConfig` of 4 bits": (TORCHAO, {"weight_dtype": torch.int4}),  # type: ignore[attr-defined]  # mypy does not know it
    "`Int8DynamicActivationInt8WeightConfig`": (TORCHAO, {}),
    "`load_in_8bit`": (BITSANDBYTES, {"load_in_8bit": True}),
    "`load_in_4bit`": (BITSANDBYTES, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
}
EXACT, ROUNDED = "exact", "as near as in pieces"


def configured(name: str) -> Any:
    """What makes transformers quantise a model as it is loaded."""
    package, options = KINDS[name]
    pytest.importorskip(package)
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if package == BITSANDBYTES:
        return BitsAndBytesConfig(**options)
    return TorchAoConfig(getattr(importlib.import_module("torchao.quantization"), name.split("`")[1])(**options))


def saved(folder: Path, name: str) -> Path:
    """A folder with a quantised tiny model, as its makers publish them."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=256))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    model.save_pretrained(folder / "floats")
    quantised = AutoModelForCausalLM.from_pretrained(
        folder / "floats", quantization_config=configured(name), dtype=torch.float32, device_map="cpu"
    )
    quantised.save_pretrained(folder / "quantised")
    return folder / "quantised"


def documented() -> dict[str, str]:
    """What the page says."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines()]
    return {row[1]: row[2] for row in rows if len(row) == 3 and row[0] in (TORCHAO, BITSANDBYTES)}


def test_the_page_has_every_kind() -> None:
    assert list(documented()) == list(KINDS)


# What is loaded warns of what it does without a GPU, and of PyTorch's next version.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_a_memory_leaves_a_quantised_model_as_it_is(name: str, tmp_path: Path) -> None:
    model, ids = load(saved(tmp_path, name)), tokens(250)
    with torch.no_grad():
        want, cache = model(ids[None]).logits[0, READ:], DynamicCache()
        pieces = [model(piece[None], **{CACHE: cache}).logits[0] for piece in ids.split(PIECE)]
    sizes: dict[str, Any] = {"window": 32, "sink": 16, "segment": PIECE, "block_size": 16}
    everything = Retrieval(top_k="all", positions="true")
    with memstore.attach(model, tmp_path / "m", document="text", retrieval=everything, **sizes) as reader:
        reader.read(ids[:READ])
        with torch.no_grad():
            got = model(ids[None, READ:]).logits[0]
    difference, own = float((got - want).abs().max()), float((torch.cat(pieces)[READ:] - want).abs().max())
    if documented()[name] == EXACT:
        assert difference < 1e-4
    else:
        assert documented()[name] == ROUNDED
        assert 1e-4 < difference < 2 * own
    # Another process finds its memory again.
    with memstore.attach(load(tmp_path / "quantised"), tmp_path / "m", document="text", retrieval=everything) as reader:
        assert len(reader.document) == READ


def load(folder: Path) -> Any:
    """As ``--model`` does; the tiny model has no tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval().to("cpu")
