"""Blocks that are made for reading are those of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memstore.attention.sliding import Window, WindowTiles, alibi_slopes
from memstore.models.drt import DRTConfig, DRTReader
from memstore.models.drt import reader as drt_reader
from memstore.models.drt.modeling import DRTForCausalLM
from memstore.models.drt.reader import BlockMaker, TooLarge
from tests.models.drt import make, tokens


def by_the_model(model: DRTForCausalLM, text: Tensor) -> list[Tensor]:
    """States and landmarks, as ``read_blocks`` makes them."""
    with DRTReader(model, "ram:") as reader:
        made = reader._passes(text)
    return [torch.cat(each) for each in zip(*made, strict=True)]


MODELS: dict[str, dict[str, Any]] = {
    "rope": {},
    "several layers": {"lower_layers": 3, "encoder_layers": 2},
    "a head for each": {"num_key_value_heads": 4},
    "alibi": {"positions": "alibi", "lower_layers": 2},
    "cosines": {"normalise_scores": True},
    "an odd window": {"window": 21, "lower_layers": 2},
    "a window longer than the text": {"window": 500},
}


@pytest.mark.parametrize(
    ("kind", "count"), [("rope", 7), ("rope", 8), ("rope", 100), *((kind, 263) for kind in MODELS)]
)
def test_blocks_are_those_of_the_model(kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = MODELS[kind]
    monkeypatch.setattr(drt_reader, "blocks_of_a_pass", lambda *_: 5)  # so that passes continue one another
    model, text = make(state_dtype="float32", **changes), tokens(count)[0]
    ours = [torch.cat(each) for each in zip(*BlockMaker(model.model)(text), strict=True)]
    assert len(ours[0]) == count // model.config.tokens_per_block
    theirs = by_the_model(model, text)
    model.double()
    truth = [torch.cat(each) for each in zip(*BlockMaker(model.model)(text), strict=True)]
    # Both are the same function: in float64 they agree as far as what stays in float32 (angles, slopes) lets them.
    for one, other in zip(truth, by_the_model(model, text), strict=True):
        torch.testing.assert_close(one, other, atol=5e-6, rtol=0)
    # In float32 what the layers make of rounding errors is for both about the same, in whatever order they are made.
    for one, other, true in zip(ours, theirs, truth, strict=True):
        error, usual = (float((each - true).abs().max()) if len(true) else 0.0 for each in (one, other))
        assert error <= 4 * usual


def test_less_than_a_block_makes_none() -> None:
    model = make()
    assert list(BlockMaker(model.model)(tokens(3)[0])) == []


def test_scores_that_do_not_fit_are_left_to_the_model() -> None:
    model, text = make(state_dtype="float32"), tokens(100)[0]
    with torch.no_grad():
        model.model.lower[0].attention.qkv.weight.mul_(100)
    with pytest.raises(TooLarge):
        list(BlockMaker(model.model)(text))
    with DRTReader(model, "ram:") as reader:
        reader.read(text)
        stored = reader.document.layer(0).gather(list(range(len(text) // model.config.tokens_per_block)))["c"]
    torch.testing.assert_close(stored, by_the_model(model, text)[0])


def test_whose_blocks_can_be_made() -> None:
    assert BlockMaker.serves(make().model)
    assert not BlockMaker.serves(make("external").model)
    assert not BlockMaker.serves(make("none").model)
    assert not BlockMaker.serves(make().double().model)


def test_what_was_put_into_a_model_is_not_passed_over() -> None:
    hooked, adapted = make(), make()
    layer: Any = hooked.model.lower[0]
    layer.feed_forward.register_forward_hook(lambda *_: None)
    layer = adapted.model.lower[0]
    layer.attention.qkv = torch.nn.Sequential(layer.attention.qkv)
    assert not BlockMaker.serves(hooked.model)
    assert not BlockMaker.serves(adapted.model)


@pytest.mark.parametrize("slopes", [None, alibi_slopes(4)], ids=["plain", "alibi"])
@pytest.mark.parametrize(("size", "count"), [(8, 40), (21, 64), (33, 5), (64, 200)])
def test_tiles_see_what_windows_see(size: int, count: int, slopes: Tensor | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads, count, 6, generator=generator) for heads in (4, 2, 2))
    want = Window(count, 0, size, slopes=slopes).attend(q[None], k[None], v[None])[0]
    before = torch.full((2, size, 6), 3.0)  # what does not exist must not be seen
    found = WindowTiles(size, slopes).attend(
        q * 6**-0.5, torch.cat([before, k], 1), torch.cat([before, v], 1), missing=size
    )
    assert found is not None
    torch.testing.assert_close(found, want, atol=2e-6, rtol=1e-5)


def test_the_preset_is_read_the_same_in_any_pieces() -> None:
    torch.manual_seed(0)
    model = DRTForCausalLM(DRTConfig.preset("tiny")).train(False)
    text = torch.randint(512, (31 * 150 + 7,))
    stored = []
    for cuts in ([len(text)], [31 * 70, len(text) - 31 * 70], [100, 2000, len(text) - 2100]):
        with DRTReader(model, "ram:", segment_blocks=64) as reader:
            for piece in text.split(cuts):
                reader.append(piece)
            stored.append(reader.document.layer(0).gather(list(range(150)))["c"].float())
    for other in stored[1:]:
        torch.testing.assert_close(other, stored[0], atol=1e-5, rtol=2e-3)
        assert (other != stored[0]).float().mean() < 0.01
