"""However a text arrives, the logits are those of one pass: in pieces, padded, in rows of different lengths."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor

from memstore.models.drt import DRTCache, DRTForCausalLM
from tests.models.drt import KINDS, close, logits, make, tokens
from tests.pairs import each


@torch.no_grad()
def streamed(model: DRTForCausalLM, ids: Tensor, sizes: list[int], cache: DRTCache | None = None) -> Tensor:
    """Logits of ``ids`` handed over in pieces of these ``sizes``."""
    outputs = []
    for piece in ids.split(sizes, 1):
        out = model(piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        outputs.append(out.logits)
    return torch.cat(outputs, 1)


def pieces(total: int, seed: int) -> list[int]:
    rng, sizes = random.Random(seed), list[int]()
    while sum(sizes) < total:
        sizes.append(min(rng.choice([1, 2, 3, 6, 7, 8, 14, 29, 50]), total - sum(sizes)))
    return sizes


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_give_what_one_pass_gives(kind: str) -> None:
    model, ids = make(kind), tokens(130, rows=2)
    if model.config.state_dtype == "float16":
        # In float32, states near the middle of two float16 numbers would be rounded to one or to the other.
        model.double()
    whole = logits(model, ids)
    close(streamed(model, ids, [130]), whole)
    close(streamed(model, ids, [1] * 130), whole)
    for seed in range(4):
        close(streamed(model, ids, pieces(130, seed)), whole)


@pytest.mark.parametrize(
    "changes", [{"window": 1}, {"window": 100}, {"block_size": 2}, {"retrieval_top_k": 50}], ids=str
)
def test_extreme_sizes_stream_too(changes: dict[str, int]) -> None:
    model, ids = make("rope", **changes), tokens(90)
    for sizes in ([1] * 90, pieces(90, 5)):
        close(streamed(model, ids, sizes), logits(model, ids))


@pytest.mark.parametrize("kind", ["rope", "alibi, two groups", "landmark uses own"])
def test_tokens_with_gradients_use_the_form_that_has_them(kind: str) -> None:
    model, ids = make(kind), tokens(60, rows=2)
    cache = DRTCache(model.config, 2)
    with torch.no_grad():
        before = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(30)]
    assert any(prepared is not None for prepared in cache.prepared)
    after = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(30, 60)]
    assert after[0].requires_grad
    close(torch.cat([*before, *(piece.detach() for piece in after)], 1), logits(model, ids))


def test_a_copy_of_a_cache_goes_on_by_itself() -> None:
    model, ids = make("alibi, two groups"), tokens(60, rows=2)
    other = ids.flip(1)
    out = streamed(model, ids[:, :30], [1] * 30, cache := DRTCache(model.config, 2))
    assert any(prepared is not None for prepared in cache.prepared)
    branch = copy.deepcopy(cache)
    for rest, taken in ((ids, cache), (other, branch)):
        whole = torch.cat([ids[:, :30], rest[:, 30:]], 1)
        close(torch.cat([out, streamed(model, rest[:, 30:], [1] * 30, taken)], 1), logits(model, whole))


def test_a_prompt_of_any_length_can_be_continued() -> None:
    model, ids = make("landmark uses own"), tokens(75)
    whole = logits(model, ids)
    for length in range(1, 71):
        close(streamed(model, ids[:, : length + 3], [length, 1, 2]), whole[:, : length + 3])


def padded(rows: list[Tensor], places: list[list[int]], width: int) -> tuple[Tensor, Tensor]:
    """``rows`` at their ``places`` among padding of any tokens."""
    ids = torch.full((len(rows), width), 5)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for number, (row, at) in enumerate(zip(rows, places, strict=True)):
        ids[number, at] = row
        mask[number, at] = 1
    return ids, mask


@each(
    kind=["rope", "alibi, two groups", "landmark uses own", "chunked", "random", "external", "none"],
    side=["left", "right", "scattered"],
)
def test_padding_is_left_out_and_a_ragged_batch_goes_on(kind: str, side: str) -> None:
    model, rng = make(kind), random.Random(0)
    lengths, width, more = [60, 23, 1, 7, 41], 64, 40
    texts = [tokens(length + more, seed=length)[0] for length in lengths]
    places = {
        "left": [list(range(width - length, width)) for length in lengths],
        "right": [list(range(length)) for length in lengths],
        "scattered": [sorted(rng.sample(range(width), length)) for length in lengths],
    }[side]
    ids, mask = padded([text[:length] for text, length in zip(texts, lengths, strict=True)], places, width)
    expected = [logits(model, text[None])[0] for text in texts]
    without_cache = logits(model, ids, attention_mask=mask)
    with torch.no_grad():
        out = model(ids, attention_mask=mask, use_cache=True)
    for row, length in enumerate(lengths):
        close(without_cache[row, places[row]], expected[row][:length])
        close(out.logits[row, places[row]], expected[row][:length])
    rest = torch.stack([text[length:] for text, length in zip(texts, lengths, strict=True)])
    continued = streamed(model, rest, [1, 1, 2, 9, 1, 17, 9], out.past_key_values)
    for row, length in enumerate(lengths):
        close(continued[row], expected[row][length:])


def test_padding_may_come_between_pieces() -> None:
    """As in a chat with several users: each piece brings some rows more, some less, some nothing."""
    model, rng = make("alibi, two groups"), random.Random(1)
    texts = [tokens(120, seed=row)[0] for row in range(3)]
    expected = [logits(model, text[None])[0] for text in texts]
    held, cache = [0, 0, 0], DRTCache(model.config, 3)
    for _ in range(12):
        width = rng.choice([1, 3, 16])
        counts = [rng.randint(0, min(width, 120 - count)) for count in held]
        places = [sorted(rng.sample(range(width), count)) for count in counts]
        ids, mask = padded([t[h : h + c] for t, h, c in zip(texts, held, counts, strict=True)], places, width)
        with torch.no_grad():
            out = model(ids, attention_mask=mask, past_key_values=cache).logits
        for row in range(3):
            close(out[row, places[row]], expected[row][held[row] : held[row] + counts[row]])
        held = [h + c for h, c in zip(held, counts, strict=True)]
    assert cache.counts == held


@pytest.mark.parametrize("kind", ["rope", "alibi, two groups", "external", "none"])
def test_a_piece_may_be_nothing_but_padding(kind: str) -> None:
    model, ids = make(kind), tokens(60, rows=2)
    nothing, cache = torch.zeros(2, 9, dtype=torch.long), DRTCache(model.config, 2)
    with torch.no_grad():
        first = model(ids[:, :9], attention_mask=nothing, past_key_values=cache).logits
        assert bool((first == 0).all())
        before = model(ids[:, :31], past_key_values=cache).logits
        model(ids[:, :9], attention_mask=nothing, past_key_values=cache)
        after = model(ids[:, 31:], past_key_values=cache).logits
    close(torch.cat([before, after], 1), logits(model, ids))
    close(logits(model, ids, attention_mask=torch.zeros_like(ids)), torch.zeros(2, 60, 97))


def test_the_cache_does_not_grow_but_for_one_entry_a_block() -> None:
    model = make()
    cache = DRTCache(model.config, 1)
    for _ in range(3):
        streamed(model, tokens(200), [100, 1, 99], cache)
        window = cache.windows[0]
        assert window is not None
        assert window[0].shape[2] == model.config.window - 1
        assert window[0].untyped_storage().nbytes() <= 4 * window[0].numel() * window[0].element_size()
    assert cache.get_seq_length() == 600
    assert cache.blocks == [600 // 7]


@pytest.mark.parametrize("kind", ["rope", "alibi, two groups"])
def test_rows_can_be_picked_and_repeated(kind: str) -> None:
    model, lengths = make(kind), [60, 23, 44]
    texts = [tokens(100, seed=length)[0] for length in lengths]
    places = [list(range(length)) for length in lengths]
    ids, mask = padded([t[:n] for t, n in zip(texts, lengths, strict=True)], places, 60)
    with torch.no_grad():
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    picked = [1, 1, 2, 1]
    cache.reorder_cache(torch.tensor(picked))
    more = tokens(40, rows=4, seed=9)
    out = streamed(model, more, [3, 37], cache)
    for row, source in enumerate(picked):
        text = torch.cat([texts[source][: lengths[source]], more[row]])
        close(out[row], logits(model, text[None])[0, lengths[source] :])


def test_a_cache_cannot_be_cut() -> None:
    cache = DRTCache(make().config, 1)
    with pytest.raises(NotImplementedError, match="Assisted generation"):
        cache.crop(3)
