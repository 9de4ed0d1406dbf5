"""A forward pass of a DRT, against the slow one of ``tests.models.drt``, and what may depend on what."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.models.drt import DRTConfig, DRTForCausalLM
from tests.models.drt import KINDS, SIZES, TOLERANCE, VOCABULARY, Reference, logits, make, tokens

CAUSAL = [name for name, options in KINDS.items() if options.get("retrieval", "causal") == "causal"]


@pytest.mark.parametrize("kind", CAUSAL)
def test_it_is_what_the_paper_says(kind: str) -> None:
    # In float64, or else states near the middle of two float16 numbers would be rounded to either.
    model = make(kind).double()
    for count in (1, 7, 8, 75):
        ids = tokens(count)
        torch.testing.assert_close(logits(model, ids)[0], Reference(model).logits(ids[0].tolist()), atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_influences_logits_before_it(kind: str) -> None:
    model, ids = make(kind), tokens(70, rows=2)
    before = logits(model, ids)
    for place in (0, 6, 7, 13, 14, 40, 69):
        changed = ids.clone()
        changed[0, place] = ids[0, place] % (VOCABULARY - 1) + 1
        after = logits(model, changed)
        # Exactly: each row of a product is computed the same way whatever the others hold.
        assert torch.equal(after[0, :place], before[0, :place])
        assert torch.equal(after[1], before[1]), "rows have nothing to do with one another"
        assert not torch.equal(after[0, place], before[0, place])


@pytest.mark.parametrize("kind", ["rope", "alibi, two groups", "random", "external"])
def test_lists_hold_blocks_strictly_before_the_one_that_chose(kind: str) -> None:
    model = make(kind)
    chosen = model(tokens(100, rows=2), use_cache=False, output_retrieval=True).retrieval
    assert len(chosen) == len(model.config.upper_layers)
    for lists in chosen:
        assert lists.blocks.shape == (2, 100 // 7, 3)
        for block in range(100 // 7):
            there = [b for b in lists.blocks[0, block].tolist() if b >= 0]
            assert len(there) == len(set(there)) == min(block, 3)
            assert all(b < block for b in there)


def gradient_at(model: DRTForCausalLM, ids: Tensor, place: int) -> Tensor:
    """How much the logits at ``place`` depend on each token, ``[T]``."""
    embedded: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: object, output: Tensor) -> None:
        output.retain_grad()
        embedded.append(output)

    handle = model.model.embed_tokens.register_forward_hook(keep)
    torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0)).dot(
        model(ids, use_cache=False).logits[0, place]
    ).backward()
    handle.remove()
    assert embedded[0].grad is not None
    stream = embedded[0].grad[0].abs().sum(-1)
    landmarks = torch.arange(len(stream)) % SIZES["block_size"] == SIZES["block_size"] - 1
    return stream[~landmarks]


def test_beyond_its_windows_a_token_depends_on_what_was_retrieved_and_on_nothing_else() -> None:
    """What is retrieved depends on a window of its own, that of the lower layers before the block."""
    model = make("rope", retrieval_top_k=1, window=3, lower_layers=1, upper_layers=(1,))
    ids = tokens(140)
    lists = model(ids, use_cache=False, output_retrieval=True).retrieval[0].blocks[0, :, 0].tolist()
    block, chosen = next((block, chosen) for block, chosen in enumerate(lists, 1) if 0 <= chosen < block - 3)
    place = 7 * block + 6
    influence = gradient_at(model, ids, place).nonzero().flatten().tolist()
    # One lower layer of window 3 in front of the block, and the same two layers before the token itself.
    expected = {*range(7 * chosen - 2, 7 * chosen + 7), *range(place - 4, place + 1)}
    assert set(influence) <= expected
    assert set(range(7 * chosen, 7 * chosen + 7)) <= set(influence), "all of the block is read"


def test_the_loss_reaches_every_parameter() -> None:
    model = make("alibi, two groups").train()
    ids = tokens(100, rows=2)
    model(ids, labels=ids).loss.backward()
    assert [name for name, x in model.named_parameters() if x.grad is None or not bool(x.grad.any())] == []


def test_the_loss_teaches_the_retriever_through_the_weights_of_blocks_only() -> None:
    ids = tokens(100)
    for kind, reaches in (("rope", True), ("chunked", False)):
        model = make(kind).train()
        model(ids, labels=ids).loss.backward()
        gradients = [x.grad for x in model.model.retrievers.parameters()]
        assert all((x is not None and bool(x.any())) == reaches for x in gradients)


def test_rounding_states_does_not_round_their_gradient() -> None:
    """Gradients of 1e-12 are nothing in float16; those of both models agree but for the states that were rounded."""
    ids, gradients = tokens(100), []
    for state_dtype in ("float32", "float16"):
        model = make("rope", state_dtype=state_dtype)
        (1e-12 * model(ids, labels=ids, use_cache=False).loss).backward()
        gradients.append(torch.cat([x.grad.flatten() for x in model.model.encoder.parameters() if x.grad is not None]))
    assert bool((gradients[1] != 0).all())
    cosine = torch.cosine_similarity(gradients[0] * 1e12, gradients[1] * 1e12, dim=0)
    assert float(cosine) > 0.99


def test_padding_and_labels_on_it_count_for_nothing() -> None:
    model, ids = make(), tokens(60)
    alone = model(ids[:, 20:], labels=ids[:, 20:]).loss
    mask = torch.ones_like(ids)
    mask[:, :20] = 0
    labels = ids.masked_fill(mask == 0, -100)
    torch.testing.assert_close(model(ids, attention_mask=mask, labels=labels).loss, alone)
    scrambled = torch.where(mask == 0, 5, ids)
    torch.testing.assert_close(model(scrambled, attention_mask=mask, labels=labels).loss, alone)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size"),
        ({"block_size": "32"}, "block_size"),
        ({"window": 0}, "window"),
        ({"upper_layers": ()}, "upper_layers"),
        ({"upper_layers": (0,)}, "upper_layers"),
        ({"num_attention_heads": 5}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"hidden_size": 12, "num_attention_heads": 4}, "even"),
        ({"positions": "learned"}, "alibi, rope"),
        ({"fusion": "sum"}, "grouped, chunked"),
        ({"gumbel": -1.0}, "gumbel"),
        ({"gumbel": math.nan}, "gumbel"),
        ({"upper_layers": (1.5,)}, "upper_layers"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        DRTConfig(**{**SIZES, **changes})


def test_presets_have_about_the_sizes_that_their_names_say() -> None:
    """The paper names them for a Transformer of as many layers: encoder and cross attention come on top."""
    expected = {"tiny": 0.23e6, "small-128m": 128e6, "medium-350m": 350e6}
    for name, size in expected.items():
        with torch.device("meta"):
            model = DRTForCausalLM(DRTConfig.preset(name))
        assert abs(model.num_parameters() / size - 1) < 0.2, (name, model.num_parameters())
    with pytest.raises(InvalidArgument, match="tiny, small-128m, medium-350m"):
        DRTConfig.preset("huge")


@pytest.mark.parametrize("bad", [[[-1, 3]], [[VOCABULARY]], [[0.5]], [], [[]]])
def test_tokens_that_do_not_exist_are_refused(bad: list[object]) -> None:
    with pytest.raises(InvalidArgument, match="token ids"):
        make()(torch.tensor(bad))


def test_a_mask_or_a_cache_that_does_not_fit_is_refused() -> None:
    model, ids = make(), tokens(10, rows=2)
    with pytest.raises(InvalidArgument, match="mask"):
        model(ids, attention_mask=torch.ones(2, 9))
    with pytest.raises(InvalidArgument, match="rows"):
        model(ids, past_key_values=model(ids[:1]).past_key_values)
    with pytest.raises(InvalidArgument, match="DRTCache"):
        model(ids, past_key_values=((),))
    with pytest.raises(InvalidArgument, match="another"):
        make("alibi, two groups")(ids, past_key_values=model(ids).past_key_values)


def test_tokens_are_a_tensor() -> None:
    with pytest.raises(InvalidArgument, match="as a tensor, got a list"):
        make()([[1, 2, 3]])


def test_labels_have_a_place_for_every_token() -> None:
    model, ids = make(), tokens(10, rows=2)
    mask = torch.ones_like(ids).index_fill(1, torch.tensor([0]), 0)
    for labels in (ids[:, :9], ids[:1], ids[0]):
        with pytest.raises(InvalidArgument, match=r"labels need the logits of all \[2, 10\] tokens"):
            model(ids, attention_mask=mask, labels=labels)
    with pytest.raises(InvalidArgument, match="logits_to_keep=3"):
        model(ids, labels=ids, logits_to_keep=3)


def test_the_last_tokens_of_a_row_are_not_its_padding() -> None:
    model, ids = make(), tokens(40)
    padded = torch.cat([torch.cat([ids, ids[:, :5]], 1), tokens(45, seed=1)])
    mask = torch.ones_like(padded)
    mask[0, 40:] = 0
    last = logits(model, padded, attention_mask=mask, logits_to_keep=3)
    torch.testing.assert_close(last[:1], logits(model, ids)[:, -3:], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(last[1:], logits(model, padded[1:])[:, -3:], atol=TOLERANCE, rtol=0)


def test_logits_of_the_last_tokens_alone_are_the_same() -> None:
    model, ids = make(), tokens(40)
    torch.testing.assert_close(logits(model, ids, logits_to_keep=3), logits(model, ids)[:, -3:], atol=TOLERANCE, rtol=0)
