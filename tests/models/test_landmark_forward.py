"""A forward pass of a landmark model, against the slow one of ``tests.models.landmark`` and the published code."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from memstore.attention.positions import positional_jumps
from memstore.errors import InvalidArgument
from memstore.models.landmark import LandmarkConfig, LandmarkForCausalLM, modeling
from memstore.models.landmark.modeling import WholeStream
from tests.models.landmark import KINDS, SIZES, VOCABULARY, Reference, close, logits, make, tokens

PUBLISHED = Path(__file__).parents[1] / "data" / "landmark_llama_infer_f7.npz"


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_the_paper_says(kind: str) -> None:
    model = make(kind).double()
    for count in (1, 7, 8, 45):
        ids = tokens(count)
        expected = Reference(model).logits(ids[0].tolist())
        torch.testing.assert_close(logits(model, ids)[0], expected, atol=1e-9, rtol=0)


def test_it_is_what_the_published_code_computes() -> None:
    with np.load(PUBLISHED) as published:
        weights = {name[2:]: torch.from_numpy(published[name]) for name in published if name.startswith("w.")}
        ids, expected = torch.from_numpy(published["tokens_no_landmark"]), published["logits_full_nocache"][0]
        ordinary = published["ids"][0] != VOCABULARY - 1
    config = LandmarkConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_hidden_layers=2, block_size=8
    )
    model = LandmarkForCausalLM(config)
    weights = {name: tensor for name, tensor in weights.items() if "inv_freq" not in name}
    weights["model.landmark.weight"] = weights["model.embed_tokens.weight"][-1:]  # a word of the vocabulary there
    model.load_state_dict(weights)
    largest = float(abs(expected).max())
    torch.testing.assert_close(
        logits(model, ids[None])[0], torch.from_numpy(expected[ordinary]), atol=2e-5 * largest, rtol=0
    )


@pytest.mark.parametrize("under", [[], [0], [1, 3], [0, 1, 2, 3, 4, 5]], ids=str)
def test_landmarks_under_the_context_miss_token_get_its_weight(under: list[int]) -> None:
    """Appendix D, also for the queries that see none of them, whose share is lost."""
    model, ids = make("context miss").double(), tokens(45)
    controlled = [block in under for block in range(7)]

    def drawn(*arguments: object, **options: object) -> WholeStream:
        made = WholeStream(*arguments, **options)  # type: ignore[arg-type]  # as the model passes them
        items = made.is_landmark.shape[1]
        of_item = torch.tensor([controlled[item // 8] for item in range(items)])
        made.controlled = made.is_landmark & of_item
        return made

    with patch("memstore.models.landmark.modeling.WholeStream", drawn):
        ours = logits(model, ids)[0]
    expected = Reference(model).logits(ids[0].tolist(), controlled)
    torch.testing.assert_close(ours, expected, atol=1e-9, rtol=0)


def test_the_context_miss_token_is_learned_with_landmarks_drawn_at_random() -> None:
    model, ids = make("context miss").train(), tokens(60, rows=3)
    one, other = (model(ids).logits for _ in range(2))
    assert not torch.equal(one, other)
    with patch.object(model.config, "context_miss_share", 0.0):
        close(model(ids).logits, logits(model.eval(), ids))
    model.train()
    model(ids, labels=ids).loss.backward()
    assert [name for name, x in model.named_parameters() if x.grad is None or not bool(x.grad.any())] == []
    model(ids[:, :5], labels=ids[:, :5]).loss.backward()  # too short for a landmark
    assert all(bool(x.grad.isfinite().all()) for x in model.parameters() if x.grad is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_influences_logits_before_it(kind: str) -> None:
    model, ids = make(kind), tokens(50, rows=2)
    before = logits(model, ids)
    for place in (0, 6, 7, 13, 14, 40, 49):
        changed = ids.clone()
        changed[0, place] = ids[0, place] % (VOCABULARY - 1) + 1
        after = logits(model, changed)
        close(after[0, :place], before[0, :place])
        close(after[1], before[1])
        assert float((after[0, place] - before[0, place]).abs().max()) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_padding_anywhere_changes_nothing_and_predicts_nothing(kind: str) -> None:
    model, texts = make(kind), [tokens(length, seed=length)[0] for length in (40, 13, 1)]
    generator = torch.Generator().manual_seed(0)
    places = [torch.randperm(40, generator=generator)[: len(text)].sort().values for text in texts]
    places[2] = torch.tensor([39])  # left
    ids, mask = torch.zeros(3, 40, dtype=torch.long), torch.zeros(3, 40, dtype=torch.long)
    for row, (text, at) in enumerate(zip(texts, places, strict=True)):
        ids[row, at], mask[row, at] = text, 1
    out = logits(model, ids, attention_mask=mask)
    for row, (text, at) in enumerate(zip(texts, places, strict=True)):
        close(out[row, at], logits(model, text[None])[0])
    scrambled = torch.where(mask == 0, 5, ids)
    assert torch.equal(logits(model, scrambled, attention_mask=mask)[mask == 1], out[mask == 1])


def test_labels_are_those_of_the_next_token_and_none_behind_padding() -> None:
    model, ids = make(), tokens(60)
    expected = torch.nn.functional.cross_entropy(logits(model, ids)[0, :-1], ids[0, 1:])
    torch.testing.assert_close(model(ids, labels=ids).loss, expected)
    alone = model(ids[:, 20:], labels=ids[:, 20:]).loss
    mask = torch.ones_like(ids)
    mask[:, :20] = 0
    labels = ids.masked_fill(mask == 0, -100)
    torch.testing.assert_close(model(ids, attention_mask=mask, labels=ids).loss, alone)
    torch.testing.assert_close(model(ids, attention_mask=mask, labels=labels).loss, alone)


def test_a_short_text_has_no_landmark_and_the_ramp_starts_at_plain_attention() -> None:
    landmark, full = make(), make("full")
    weights = {name: tensor for name, tensor in landmark.state_dict().items() if "landmark" not in name}
    full.load_state_dict(weights)
    short = tokens(6, rows=2)
    close(logits(landmark, short), logits(full, short))
    ids = tokens(45)
    at_one = logits(landmark, ids)
    landmark.ramp = 0.0
    assert float((logits(landmark, ids) - at_one).abs().max()) > 0.1
    landmark.ramp = 1
    close(logits(landmark, ids), at_one)
    with pytest.raises(InvalidArgument, match="ramp"):
        landmark.ramp = 1.5


def test_a_model_with_ramp_zero_attends_to_ordinary_tokens_with_one_softmax() -> None:
    """The landmarks are there, with a place of their own, and nobody looks at them."""
    model, ids = make().double(), tokens(45)
    model.ramp = 0.0
    reference = Reference(model)

    def shares(i: int, scores: list[float], chance: float, controlled: list[bool]) -> list[float]:
        seen = [j for j in range(i + 1) if j % 8 != 7]
        total = sum(scores[j] for j in seen)
        return [scores[j] / total if j in seen else 0.0 for j in range(i + 1)]

    with patch.object(reference, "shares", shares):
        expected = reference.logits(ids[0].tolist())
    torch.testing.assert_close(logits(model, ids)[0], expected, atol=1e-9, rtol=0)


def test_positions_jump_after_landmarks_while_training_only() -> None:
    model, ids = make(position_jump=100), tokens(45)
    close(logits(model, ids), logits(make(), ids))
    with patch.object(modeling, "positional_jumps", wraps=positional_jumps) as called:
        assert float((model.train()(ids).logits.detach() - logits(make(), ids)).abs().max()) > 1e-3
    called.assert_called_once()


def test_no_gradient_flows_into_the_window_before() -> None:
    model, ids = make("xl", num_hidden_layers=1), tokens(30)
    embedded: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        output.retain_grad()
        embedded.append(output)

    handle = model.model.embed_tokens.register_forward_hook(keep)
    model(ids).logits[0, 15].sum().backward()
    handle.remove()
    assert embedded[0].grad is not None
    assert embedded[0].grad[0].any(-1).nonzero().flatten().tolist() == [11, 12, 13, 14, 15]
    changed = ids.clone()
    changed[0, 2] = ids[0, 2] % (VOCABULARY - 1) + 1
    assert not torch.equal(logits(model, changed)[0, 15], logits(model, ids)[0, 15]), "but what is in it counts"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size"),
        ({"block_size": "32"}, "block_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": 5}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "even"),
        ({"architecture": "bert"}, "llama, gpt2"),
        ({"attention": "linear"}, "landmark, full, window, xl"),
        ({"local_layers": (3,)}, "local_layers"),
        ({"context_miss_share": 2.0}, "context_miss_share"),
        ({"context_miss": True, "attention": "full"}, "context_miss"),
        ({"position_jump": 0}, "position_jump"),
        ({"rope_theta": 0}, "rope_theta"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        LandmarkConfig(**{**SIZES, **changes})


def test_presets_have_the_sizes_that_they_are_known_for() -> None:
    expected = {"tiny": 254_528 + 64, "paper": 12 * 12 * 1024**2 + 50_257 * 1024 + 25 * 1024 + 1024}
    for name, size in expected.items():
        with torch.device("meta"):
            model = LandmarkForCausalLM(LandmarkConfig.preset(name))
        assert model.num_parameters() == size
    with pytest.raises(InvalidArgument, match="tiny, paper"):
        LandmarkConfig.preset("huge")


@pytest.mark.parametrize("bad", [[[-1, 3]], [[VOCABULARY]], [[0.5]], [], [[]]])
def test_tokens_that_do_not_exist_are_refused(bad: list[object]) -> None:
    with pytest.raises(InvalidArgument, match="token ids"):
        make()(torch.tensor(bad))


def test_a_mask_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="mask"):
        make()(tokens(10, rows=2), attention_mask=torch.ones(2, 9))
    with pytest.raises(InvalidArgument, match="hides all"):
        make()(tokens(10, rows=2), attention_mask=torch.zeros(2, 10))


def test_logits_of_the_last_tokens_alone_are_the_same() -> None:
    model, ids = make(), tokens(40)
    close(logits(model, ids, logits_to_keep=3), logits(model, ids)[:, -3:])
