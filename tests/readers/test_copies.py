"""Models, configs and caches that are copied while a memory is attached."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import memstore
from memstore.errors import InvalidArgument
from memstore.memory.append import as_tokens
from memstore.readers.caches import CACHE
from tests.models import drt
from tests.models.stock import small_llama

TEXT, PROMPT = torch.arange(1, 150), torch.arange(1, 11)[None]


def test_a_model_with_a_memory_is_not_copied_and_is_free_afterwards(tmp_path: Path) -> None:
    """A copy would run the original's ``generate``."""
    stock: Any = small_llama()
    for model in (stock, drt.make("rope")):
        with memstore.attach(model, tmp_path / model.config.model_type) as reader:
            reader.read(TEXT % 50)
            for copied in (copy.deepcopy, pickle.dumps):
                with pytest.raises(InvalidArgument, match="cannot be copied or pickled: leave the with block first"):
                    copied(model)
        assert copy.deepcopy(model).config.to_dict() == model.config.to_dict()
    twin = copy.deepcopy(stock)
    with torch.no_grad():
        assert torch.equal(twin(PROMPT).logits, stock(PROMPT).logits)


def test_a_cache_with_a_memory_is_not_copied() -> None:
    model: Any = small_llama()
    with torch.no_grad(), memstore.attach(model, "ram:") as reader:
        reader.read(TEXT)
        cache = model(PROMPT, use_cache=True)[CACHE]
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(InvalidArgument, match="a cache with a memory cannot be copied"):
                copied(cache)


def test_a_model_that_shares_its_config_is_told_so_and_both_work_afterwards() -> None:
    model: Any = small_llama()
    other: Any = LlamaForCausalLM(model.config).eval()
    with torch.no_grad():
        before = [each(PROMPT).logits for each in (model, other)]
        with memstore.attach(model, "ram:") as reader:
            reader.read(TEXT)
            for config in (model.config, copy.deepcopy(model.config)):
                made: Any = LlamaForCausalLM(config).eval()
                with pytest.raises(InvalidArgument, match="Give the model a config of its own"):
                    made(PROMPT)
            with pytest.raises(InvalidArgument, match="Give the model a config of its own"):
                memstore.attach(other, "ram:").open()
        assert all(torch.equal(each(PROMPT).logits, was) for each, was in zip((model, other), before, strict=True))
    with memstore.attach(other, "ram:") as reader:
        assert reader.read(TEXT).tokens == len(TEXT)


def test_a_document_that_is_named_twice_is_attached_once() -> None:
    model: Any = small_llama()
    with memstore.attach(model, "ram:") as reader:
        reader.read(TEXT, document="d")
        named = memstore.attach(small_llama(), reader.memory, document=["d", "d"], mode="r")
        assert named.names == ["d"]


def test_tokens_may_be_unsigned_and_a_tokenizers_output_is_named() -> None:
    assert as_tokens(TEXT.to(torch.uint16)).tolist() == TEXT.tolist()
    for given in ("words", {"input_ids": [1, 2]}):
        with pytest.raises(InvalidArgument, match="of a tokenizer's output pass input_ids"):
            as_tokens(given)  # type: ignore[arg-type]
