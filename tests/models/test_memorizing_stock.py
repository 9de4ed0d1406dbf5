"""A stock model gets a memory that changes nothing at first, learns, and can be taken out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

import memstore
from memstore.attention.knn_memory import RecentTokens
from memstore.errors import InvalidArgument, UnsupportedModel
from memstore.models.memorizing import KNNMemory, add_knn_memory, knn_memory_of, remove_knn_memory
from memstore.readers.caches import CACHE, cache_in
from tests.models.stock import small_llama
from tests.readers.models import tiny


@pytest.fixture
def model() -> LlamaForCausalLM:
    made: Any = small_llama(vocabulary=60, layers=5)
    return made.double()  # type: ignore[no-any-return]


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(60, (rows, length), generator=torch.Generator().manual_seed(rows * length))


def logits(model: LlamaForCausalLM, ids: Tensor, **named: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **named).logits  # type: ignore[no-any-return]


def test_nothing_changes_until_the_gate_opens(model: LlamaForCausalLM) -> None:
    first, second = tokens(2, 13), tokens(2, 7)
    before = [logits(model, ids) for ids in (first, second)]
    memory = add_knn_memory(model, top_k=3)
    assert memory is model.model.layers[1].self_attn.knn_memory  # the fourth from the end, as 9 of 12
    for expected, ids in zip(before, (first, second), strict=True):
        assert torch.equal(logits(model, ids), expected)
    with torch.no_grad():
        memory.gate.fill_(0.5)
    assert not torch.allclose(logits(model, second), before[1])


def test_what_is_found_is_mixed_in_as_the_equations_say(model: LlamaForCausalLM) -> None:
    memory = add_knn_memory(model, layer=0, top_k=100)  # the first layer's keys depend on the tokens alone
    with torch.no_grad():
        memory.gate.copy_(torch.tensor([0.3, -0.2, 1.0, 0.0]))
    attention: Any = model.model.layers[0].self_attn
    seen: list[Tensor] = []
    attention.o_proj.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    first, second = tokens(1, 13), tokens(1, 7)
    logits(model, first)
    logits(model, second)
    out = seen[-1].unflatten(-1, (4, 8)).transpose(1, 2)
    memory.clear()
    logits(model, second)
    local = seen[-1].unflatten(-1, (4, 8)).transpose(1, 2)

    def projected(ids: Tensor, name: str, heads: int) -> Tensor:
        x = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
        return getattr(attention, name)(x).unflatten(-1, (heads, 8)).transpose(1, 2)  # type: ignore[no-any-return]

    with torch.no_grad():
        q = projected(second, "q_proj", 4)
        k, v = (projected(first, name, 2)[:, :, 1:].repeat_interleave(2, 1) for name in ("k_proj", "v_proj"))
        scores = memory.scale.exp()[:, None, None] * (q @ k.mT) / 8**0.5
        far = scores.softmax(-1) @ v
        gate = memory.gate.tanh()[:, None, None]
        torch.testing.assert_close(out, gate * far + (1 - gate) * local, rtol=0, atol=1e-7)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "olmo2", "cohere", "granite"])
def test_norms_and_scale_are_those_of_the_layer(family: str) -> None:
    changes: dict[str, dict[str, Any]] = {"granite": {"attention_multiplier": 0.7}, "cohere": {"use_qk_norm": True}}
    model: Any = tiny(family, **changes.get(family, {}))
    attention = next(each for each in model.modules() if hasattr(each, "q_proj"))
    for norm in (each for name, each in attention.named_modules() if name.endswith("_norm")):
        torch.nn.init.uniform_(norm.weight, 0.5, 4)
    memory = add_knn_memory(model, layer=0, top_k=3)
    seen: dict[str, Tensor] = {}

    def turned(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **named: Any) -> Any:
        if module is attention:
            seen.update(q=q, k=k, v=v, scale=torch.tensor(named["scaling"]))
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2), None

    AttentionInterface.register("turned", turned)
    model.set_attn_implementation("turned")
    memory.found = lambda **told: seen.update(asked=told["queries"])
    logits(model, tokens(1, 1))  # at position 0 nothing is turned
    assert memory._waiting is not None
    for name, found in zip(("q", "k", "v"), (seen["asked"], *memory._waiting[:2]), strict=True):
        torch.testing.assert_close(found, seen[name])
    assert memory.scaling == pytest.approx(float(seen["scale"]))


def test_the_closed_gate_learns_and_then_the_rest(model: LlamaForCausalLM) -> None:
    memory = add_knn_memory(model, top_k=4)
    ids = tokens(2, 24)
    optimizer = torch.optim.SGD(memory.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        for part in ids.split(8, 1):
            model(input_ids=part, labels=part).loss.backward()
        assert memory.gate.grad is not None
        assert memory.scale.grad is not None
        assert bool((memory.gate.grad != 0).all())
        assert bool((memory.scale.grad != 0).any()) == (step > 0)
        optimizer.step()
        memory.clear()
    assert bool((memory.gate != 0).all())


def test_rows_are_documents_and_padding_is_left_out(model: LlamaForCausalLM) -> None:
    memory = add_knn_memory(model, memory_size=10, top_k=2)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    logits(model, tokens(2, 5), attention_mask=mask)
    logits(model, tokens(2, 5))
    assert isinstance(memory.memory, RecentTokens)
    assert memory.memory.added == [2, 3]  # what a call begins with is where heads rest
    memory.clear(1)
    assert memory.memory.added == [6, 0]
    logits(model, tokens(2, 9))
    logits(model, tokens(2, 1))
    assert [list(memory.memory.numbers(row)) for row in range(2)] == [list(range(4, 14)), list(range(8))]


def test_tokens_that_are_generated_are_remembered(model: LlamaForCausalLM) -> None:
    memory = add_knn_memory(model, top_k=2)
    with torch.no_grad():
        memory.gate.fill_(0.3)
    ids: Any = tokens(1, 6)
    model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    logits(model, tokens(1, 3))
    assert memory.memory is not None
    assert memory.memory.added == [9]  # the last token was never given, the first one is where heads rest
    memory.clear(0)
    assert memory.memory.added == [0]


def test_beams_have_memories_of_their_own(model: LlamaForCausalLM) -> None:
    memory, steps = add_knn_memory(model, layer=2, top_k=2), []
    with torch.no_grad():
        memory.gate.fill_(0.3)

    def compare(module: Any, arguments: Any, named: Any) -> None:
        """What is remembered of each beam is what the cache has of it, but for its first token."""
        if (past := cache_in(named)).get_seq_length():
            assert isinstance(memory.memory, RecentTokens)
            held = past.layers[2].values[:, :, 1:]
            assert torch.equal(memory.memory.values[:, :, : held.shape[2]], held)
            steps.append(held.shape[2])

    model.register_forward_pre_hook(compare, with_kwargs=True)
    given: Any = tokens(2, 6)
    options: dict[str, Any] = {"num_beams": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=6, **options)
    assert steps == [5, 6, 7, 8, 9]


def test_rows_are_repeated_to_generate_several_texts(model: LlamaForCausalLM) -> None:
    memory = add_knn_memory(model, top_k=2)
    with torch.no_grad():
        memory.gate.fill_(0.5)
    logits(model, tokens(2, 9))
    memory.reorder(torch.tensor([1, 1, 0]))
    repeated = logits(model, tokens(3, 4))
    memory.clear()
    logits(model, tokens(2, 9)[[1, 1, 0]])
    torch.testing.assert_close(repeated, logits(model, tokens(3, 4)))


def test_a_copy_of_the_model_has_a_memory_of_its_own(model: LlamaForCausalLM) -> None:
    memory = add_knn_memory(model, top_k=2)
    with torch.no_grad():
        memory.gate.fill_(0.5)
    logits(model, tokens(1, 9))
    other = copy.deepcopy(model)
    assert torch.equal(logits(other, tokens(1, 4)), logits(model, tokens(1, 4)))
    logits(other, tokens(1, 7))
    assert [knn_memory_of(each).remembered()["added"].tolist() for each in (model, other)] == [[11], [17]]
    remove_knn_memory(other)
    assert not torch.equal(logits(other, tokens(1, 4)), logits(model, tokens(1, 4)))


def test_what_is_taken_back_of_the_cache_is_not_remembered(model: LlamaForCausalLM) -> None:
    memory, cache = add_knn_memory(model), DynamicCache()
    logits(model, tokens(1, 9), **{CACHE: cache})
    logits(model, tokens(1, 1), **{CACHE: cache})
    cache.crop(-2)
    with pytest.raises(InvalidArgument, match="cut from 10 to 8 tokens, but a memory cannot be cut"):
        logits(model, tokens(1, 1), **{CACHE: cache})
    memory.clear()
    logits(model, tokens(1, 1), **{CACHE: cache})
    logits(model, tokens(1, 5))  # another text, without a cache


def test_taking_it_out_leaves_the_model_as_it_was(model: LlamaForCausalLM) -> None:
    ids = tokens(1, 12)
    before, names = logits(model, ids), list(model.state_dict())
    memory = add_knn_memory(model)
    assert len(model.state_dict()) == len(names) + 2
    with torch.no_grad():
        memory.gate.fill_(1.0)
    logits(model, ids)
    assert not torch.allclose(logits(model, ids), before)
    remove_knn_memory(model)
    assert torch.equal(logits(model, ids), before)
    assert list(model.state_dict()) == names
    assert not hasattr(model, "_reorder_cache")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert isinstance(add_knn_memory(model, layer=-1), KNNMemory)


def test_what_cannot_be_is_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(InvalidArgument, match="layer must be from -5 to 4"):
        add_knn_memory(model, layer=5)
    with pytest.raises(InvalidArgument, match=r"layer must be from -5 to 4, not 1\.5"):
        add_knn_memory(model, layer=1.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="at least 1"):
        add_knn_memory(model, top_k=0)
    for size in (-1, 2.5, "8K"):
        with pytest.raises(InvalidArgument, match="memory_size must be an integer of at least 0"):
            add_knn_memory(model, memory_size=size)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="no memory"):
        remove_knn_memory(model)
    add_knn_memory(model)
    with pytest.raises(InvalidArgument, match="already has a memory"):
        add_knn_memory(model)
    logits(model, tokens(2, 3))
    with pytest.raises(InvalidArgument, match="the memory has 2 rows, but the batch has 1"):
        logits(model, tokens(1, 3))
    with pytest.raises(InvalidArgument, match="row 2 does not exist"):
        knn_memory_of(model).clear(2)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(UnsupportedModel, match="q_proj"):
        add_knn_memory(gpt2)
    with pytest.raises(UnsupportedModel, match="needs queries without a gate"):
        add_knn_memory(tiny("qwen3_next"), layer=-1)


def test_a_document_is_found_as_if_the_model_had_just_read_it(model: LlamaForCausalLM) -> None:
    memory = add_knn_memory(model.float(), layer=2, top_k=5)
    model.config.knn_memory["window"] = 16
    with torch.no_grad():
        memory.gate.fill_(0.6)
    text, question = tokens(1, 45)[0], tokens(1, 7)
    context = torch.cat([text[:1], text])  # one token before each segment, which is not remembered
    for start in range(0, 45, 16):
        logits(model, context[None, start : start + 17])
    expected = logits(model, question)
    memory.clear()
    with memstore.attach(model, "ram:", block_size=8) as reader:
        reader.read(text[:21])
        reader.read(text)
        torch.testing.assert_close(logits(model, question), expected)
        torch.testing.assert_close(logits(model, question.repeat(2, 1)), expected.repeat(2, 1, 1))
        assert len(reader) == 45, "what is asked is not stored"
    assert not memory.remembered()
    assert not torch.allclose(logits(model, question), expected)
