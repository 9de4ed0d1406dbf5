"""What a DRT does where a block of its memory is damaged: it says so, or does without it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import memstore
from memstore.errors import DamagedError, InvalidArgument
from memstore.models.drt import DRTReader
from tests.models.drt import close, make, tokens
from tests.models.test_drt_reader import asked


def damage(document: memstore.Document, blocks: Sequence[int]) -> None:
    """Flip a bit in the stored states of ``blocks``."""
    with memstore.open(document.memory.url, mode="r") as memory:
        states = memory.document(document.name).layer(0).gather(blocks)["c"]
    path = Path(document.memory.url) / "data.mdb"
    data = bytearray(path.read_bytes())
    for each in states:
        place = data.find(each.numpy().tobytes())
        assert place >= 0
        data[place + 5] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["rope", "alibi, two groups", "random"])
def test_a_block_that_cannot_be_read_is_left_out_if_that_is_wanted(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, text = make(kind), tokens(300)[0]
    question = text[280:]
    with DRTReader(model, tmp_path / "m") as reader:
        reader.read(text[:280])
        with torch.no_grad():
            output = model(question[None], past_key_values=reader.cache(), output_retrieval=True)
        lost = int(output.retrieval[0].blocks[0, -1, 0])
        assert lost in reader.document.complete_blocks
        document = reader.document
    damage(document, [lost])
    with DRTReader(model, tmp_path / "m") as reader, pytest.raises(DamagedError, match=f"block {lost} is damaged"):
        asked(model, reader, question)
    with DRTReader(model, tmp_path / "m", retrieval=memstore.Retrieval(on_error="miss")) as reader, torch.no_grad():
        output = model(question[None], past_key_values=reader.cache(), output_retrieval=True)
        for chosen in output.retrieval:
            assert lost not in chosen.blocks
            some = (chosen.blocks >= 0).any(-1)
            torch.testing.assert_close(chosen.weights.sum(-1), some.float())
        assert bool((output.retrieval[0].blocks[0, -1] == -1).any())
        assert bool(output.logits.isfinite().all())
        close(asked(model, reader, question), output.logits[0])
        assert reader.generate(question[None], max_new_tokens=20, do_sample=False, pad_token_id=0).shape == (1, 40)
        assert reader.memory.stats()["tiers"]["left_out"] >= 2
        with pytest.raises(DamagedError, match=f"block {lost} is damaged"):
            reader.append(question)  # small blocks are stored together: what is written anew is checked first
    (record,) = caplog.records
    assert f"document 'document', layer 0, block {lost} is damaged" in record.getMessage()


def test_when_all_blocks_are_lost_nothing_is_attended_to(tmp_path: Path) -> None:
    """Neither they, nor the blocks that were chosen before them."""
    model, text = make("rope"), tokens(300)[0]
    with DRTReader(model, tmp_path / "m", retrieval=memstore.Retrieval(on_error="miss")) as reader:
        reader.read(text[:280])
        document, stored = reader.document, list(reader.document.complete_blocks)
    damage(document, stored)
    with DRTReader(model, tmp_path / "m", retrieval=memstore.Retrieval(on_error="miss")) as reader:
        cache, size = reader.cache(), model.config.tokens_per_block
        with torch.no_grad():
            found = model(text[None, 280 : 280 + size], past_key_values=cache, output_retrieval=True).retrieval
        assert not set(stored) & set(found[0].blocks.flatten().tolist())
        last = cache.lists[0]
        assert last is None or not bool(last.weights[last.blocks < 0].any())
        assert bool(reader.generate(text[None, 280:], max_new_tokens=9, pad_token_id=0).shape == (1, 29))


def test_what_becomes_of_damage_has_two_names() -> None:
    with pytest.raises(InvalidArgument, match="on_error must be one of 'raise', 'miss', got 'ignore'"):
        DRTReader(make(), "ram:", retrieval=memstore.Retrieval(on_error="ignore")).open()  # type: ignore[arg-type]  # the mistake of somebody else
