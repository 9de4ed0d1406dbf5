"""A HiLS model that reads into a memory gives what it gives with all states in RAM, also after reopening."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from memstore import Retrieval
from memstore.errors import DamagedError, ForeignMemory, InvalidArgument
from memstore.memory import Document
from memstore.models import reading as module
from memstore.models.hils import HilsForCausalLM, HilsReader
from memstore.models.hils.reader import memory_spec
from tests.models.hils import in_pieces, make, tokens
from tests.pairs import each
from tests.readers.ranks import join
from tests.readers.test_sharded import run_ranks

TEXT = tokens(240)[0]
QUESTION = tokens(30, seed=5)
CLOSE = 1e-5
"""What the memory may change of a logit, of 10 or so, in float32."""


@pytest.fixture(autouse=True)
def small_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a short text takes several."""
    monkeypatch.setattr(module, "COMMIT_BLOCKS", 6)


@torch.no_grad()
def in_ram(model: HilsForCausalLM, text: Tensor = TEXT, question: Tensor = QUESTION) -> Tensor:
    """Logits of the question, by the model with all states in its cache."""
    both = torch.cat([text[None], question], 1)
    logits: Tensor = model(both, past_key_values=model.new_cache(1)).logits
    return logits[:, len(text) :]


def answer(reader: HilsReader) -> Tensor:
    return in_pieces(reader.model, QUESTION, reader.cache(), 9, 1)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE * float(expected.abs().max()))


def states(reader: HilsReader) -> Tensor:
    """All keys and values of the document, those of the incomplete block too."""
    document = reader.document
    layers = [document.layer(layer).gather(list(document.blocks)) for layer in range(reader.memory.spec.layers)]
    return torch.stack([x for layer in layers for x in (layer["k"], layer["v"])])


def child(folder: str) -> None:
    """What another process does: go on reading, and answer."""
    torch.set_num_threads(1)
    module.COMMIT_BLOCKS = 6
    with HilsReader(make("olmo"), folder) as reader:
        reader.read(TEXT)
        torch.save((answer(reader), states(reader)), Path(folder) / "answer")


@each(kind=["qwen", "olmo", "odd window, wide heads, tied"], url=["ram:", "lmdb", "zarr"])
def test_a_memory_changes_nothing(kind: str, url: str, tmp_path: Path) -> None:
    model = make(kind)
    place: Any = {"ram:": "ram:", "lmdb": tmp_path / "m", "zarr": f"zarr:{tmp_path}/z"}[url]
    with HilsReader(model, place) as reader:
        reader.read(TEXT)
        close(answer(reader), in_ram(model))
        assert reader.memory.verify() == []
        spec = reader.memory.spec
        assert (spec.key_heads, spec.key_dim) == (4, model.config.head_dim + 1)


@each(
    index=["exact", "faiss", "clusters", "auto"],
    kind=["qwen", "olmo"],
)
def test_any_index_serves(index: str, kind: str) -> None:
    model = make(kind)
    with HilsReader(model, "ram:", index=index) as reader:
        if index.startswith("faiss"):
            pytest.importorskip("faiss")
        reader.read(TEXT)
        assert len(reader.search(QUESTION[0])) == 8
        found, expected = answer(reader), in_ram(model)
        if reader.memory.index_capabilities.exact and (kind == "olmo" or reader.memory.index_capabilities.dense):
            close(found, expected)
        else:  # shares are of what was found, so another block may be chosen
            assert float((found - expected).abs().mean()) < 0.2 * float(expected.abs().mean())


def test_landmarks_are_vectors_that_are_searched_by_inner_product() -> None:
    model = make("olmo")
    cache = model.new_cache(1)
    with HilsReader(model, "ram:") as reader, torch.no_grad():
        reader.read(TEXT)
        model(TEXT[None], past_key_values=cache)
        for number, layer in enumerate(model.config.hils_layers):
            view = reader.document.layer(number * 4)
            marks = view.landmarks(range(20))  # [n, H, 1, D + 1]
            own = cache.tables[layer].own.read()[2][0, :, :20]
            torch.testing.assert_close(marks[:, :, 0].transpose(0, 1), own, atol=1e-5, rtol=0)
            u = torch.randn(4, 1, model.config.head_dim)
            asked = torch.cat([u * model.config.head_dim**-0.5, torch.ones(4, 1, 1)], -1)
            hits = view.search(asked, 1)
            estimates = (u * own[..., :-1]).sum(-1) * model.config.head_dim**-0.5 + own[..., -1]
            assert torch.equal(
                hits.blocks.clamp(max=20)[:, 0, 0] == 20, hits.scores[:, 0, 0] > estimates.amax(1) + 1e-6
            )


@pytest.mark.parametrize("kind", ["qwen", "olmo"])
def test_pieces_of_any_length_make_the_same_document(kind: str) -> None:
    model = make(kind)
    with HilsReader(model, "ram:") as whole, HilsReader(model, "ram:") as cut:
        whole.read(TEXT)
        for start, stop in ((0, 1), (1, 9), (9, 100), (100, 107), (107, 240)):
            result = cut.append(TEXT[start:stop])
            assert (result.tokens, result.new_tokens) == (stop, stop - start)
        close(states(cut), states(whole))
        close(answer(cut), answer(whole))


@pytest.mark.slow
def test_another_process_goes_on_and_answers_the_same_bit_for_bit(tmp_path: Path) -> None:
    with HilsReader(make("olmo"), "ram:") as reader:
        reader.read(TEXT[:98])
        reader.read(TEXT)
        expected = answer(reader), states(reader)
    folder = tmp_path / "m"
    with HilsReader(make("olmo"), folder) as reader:
        reader.read(TEXT[:98])
    code = f"from tests.models.test_hils_reader import child; child({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    for theirs, ours in zip(torch.load(folder / "answer", weights_only=True), expected, strict=True):
        assert torch.equal(theirs, ours)


@pytest.mark.parametrize("kind", ["qwen", "olmo"])
def test_forks_share_whole_blocks_and_go_on_by_themselves(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    other = torch.cat([TEXT[:120], tokens(70, seed=3)[0]])
    with HilsReader(model, tmp_path / "m", document="first") as reader:
        reader.read(TEXT)
        result = reader.read(other, "second")
        assert result.reused_tokens == 120 // 7 * 7
    for name, text in (("first", TEXT), ("second", other)):
        with HilsReader(model, tmp_path / "m", document=name) as reader:
            close(answer(reader), in_ram(model, text))


def test_windows_are_kept_every_now_and_then_and_computed_again_where_they_are_not() -> None:
    model = make("olmo")
    with HilsReader(model, "ram:") as reader:
        reader.read(TEXT)
        places, step = reader.document.recurrent_places(), reader.memory.spec.recurrent_step
        assert places[-1] == len(TEXT)
        assert len(places) > 1, f"{places}, {step}"
        gaps = np.diff([0, *places[:-1]])
        assert gaps.min() >= step
        assert gaps.max() <= step + 6 * 7 + model.config.segment_tokens
        for blocks in (33, 17, 1):
            reader.document.truncate(blocks)
            kept = reader.document.recurrent_places()
            assert not kept or kept[-1] <= blocks * 7
            close(answer(reader), in_ram(model, TEXT[: blocks * 7]))
        reader.read(TEXT)
        close(answer(reader), in_ram(model))


def test_steps_read_what_the_step_before_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = make("olmo"), list[int]()
    gather = Document.gather_each

    def counted(self: Document, layers: Any, lists: Any, **options: Any) -> Any:
        asked.append(sum(map(len, lists)))
        return gather(self, layers, lists, **options)

    monkeypatch.setattr(Document, "gather_each", counted)
    again = QUESTION[:, :1].expand(1, 20)  # alike tokens choose alike
    with HilsReader(model, "ram:") as reader:
        reader.read(TEXT)
        asked.clear()
        found = in_pieces(model, again, reader.cache(), 1)
        few = sum(asked)
        assert 0 < few < 0.9 * 20 * 2 * 4 * 3, "twenty tokens, two layers, four heads, lists of three"
        asked.clear()
        close(in_pieces(model, again, reader.cache(), 20), found)
        close(found, in_ram(model, question=again))


def test_rows_go_on_after_one_document() -> None:
    model, questions = make(), tokens(30, rows=3, seed=5)
    with HilsReader(model, "ram:") as reader:
        reader.read(TEXT)
        found = in_pieces(model, questions, reader.cache(3), 9, 1)
        for row in range(3):
            close(found[row : row + 1], in_ram(model, question=questions[row : row + 1]))


def test_all_blocks_can_be_chosen() -> None:
    model = make()
    everything = make(hils_topk=99)
    with HilsReader(model, "ram:", retrieval=Retrieval(top_k="all")) as reader:
        reader.read(TEXT)
        close(answer(reader), in_ram(everything))
    with HilsReader(model, "ram:", retrieval=Retrieval(top_k=2)) as reader:
        reader.read(TEXT)
        close(answer(reader), in_ram(make(hils_topk=2)))


def test_a_document_goes_on_with_the_number_of_blocks_that_it_was_begun_with(tmp_path: Path) -> None:
    with HilsReader(make(), tmp_path / "m") as reader:
        reader.read(TEXT[:100])
    with HilsReader(make(), tmp_path / "m", retrieval=Retrieval(top_k=2)) as reader:
        with pytest.raises(InvalidArgument, match="top_k=3, now 2"):
            reader.read(TEXT)
        answer(reader)


@pytest.mark.parametrize(
    "changes",
    [{"hils_sliding_window": 24}, {"full_attn_interleave": 1}, {"enable_softmax1": True}, {"use_hope": False}],
)
def test_what_the_weights_do_not_show_is_in_the_fingerprint(changes: dict[str, Any], tmp_path: Path) -> None:
    model = make("olmo")
    assert memory_spec(model) != memory_spec(make("olmo", **changes))
    assert memory_spec(model) == memory_spec(make("olmo"))
    if "full_attn_interleave" not in changes:  # whose weights differ, too
        with HilsReader(model, tmp_path / "m") as reader:
            reader.read(TEXT[:20])
        with pytest.raises(ForeignMemory):
            HilsReader(make("olmo", **changes), tmp_path / "m").open()


@pytest.mark.parametrize("kind", ["qwen", "olmo"])
def test_a_memory_in_bfloat16_changes_nothing_either(kind: str, tmp_path: Path) -> None:
    made: Any = make(kind)
    model: HilsForCausalLM = made.to(torch.bfloat16)
    with HilsReader(model, tmp_path / "m") as reader:
        reader.read(TEXT)
        found, expected = answer(reader).float(), in_pieces(model, QUESTION, read_in_ram(model), 9, 1).float()
        # Sums of many roundings: now and then another block is chosen, for one token.
        assert float((found - expected).abs().median()) < 0.02 * float(expected.abs().max())


def read_in_ram(model: HilsForCausalLM) -> Any:
    """A cache behind the text, which came as a reader reads it."""
    cache = model.new_cache(1)
    in_pieces(model, TEXT[None], cache, model.config.segment_tokens)
    return cache


def rank(number: int, size: int, folder: str) -> None:
    """Be a process that answers together with others."""
    join(number, size, folder)
    with HilsReader(make("qwen"), f"{folder}/m", mode="r", process_group=dist.group.WORLD) as reader:
        torch.save(answer(reader), f"{folder}/{number}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_answer_as_one_process(tmp_path: Path) -> None:
    with HilsReader(make("qwen"), tmp_path / "m") as reader:
        reader.read(TEXT)
        expected = answer(reader)
    assert run_ranks(rank, 2, str(tmp_path)) == [0, 0]
    for number in range(2):
        close(torch.load(tmp_path / f"{number}.pt", weights_only=True), expected)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_codec_gives_nearly_the_same(codec: str, tmp_path: Path) -> None:
    model = make("olmo")
    with HilsReader(model, tmp_path / "m", codec=codec) as reader:
        reader.read(TEXT)
        found, expected = answer(reader), in_ram(model)
        assert float((found - expected).abs().mean()) < 0.3 * float(expected.abs().mean())
    with HilsReader(model, tmp_path / "m") as reader:
        assert reader.memory.spec.codec == codec


# What it tells


def test_a_trace_has_the_chosen_blocks_and_their_weights() -> None:
    model = make("olmo")
    with HilsReader(model, "ram:") as reader:
        reader.read(TEXT)
        with reader.record() as recorder:
            out = model.generate(QUESTION, max_new_tokens=3, do_sample=False)
            recorder.close(out[0, 30:].tolist())
        steps = list(reader.memory.traces.get(recorder.number).steps())
        assert [step.token for step in steps] == out[0, 30:].tolist()
        for step in steps:
            assert [look.layer for look in step.looks] == [1, 3]
            for look in step.looks:
                assert look.blocks.shape == look.scores.shape == (4, 3)
                assert (np.diff(look.scores, axis=1) <= 0).all()
                assert look.weights.shape == (4, 3)
                assert ((look.weights > 0) & (look.weights.sum(1, keepdims=True) < 1)).all()
                assert set(look.tiers.ravel().tolist()) <= {1, 3}
                assert look.blocks.max() < (240 + 30) // 7


def test_an_audit_with_everything_chosen_finds_nothing_missing() -> None:
    model = make("olmo")
    with HilsReader(model, "ram:") as reader:
        reader.read(TEXT)
        everything = reader.audit(QUESTION[0], tokens=2, top_k=99)
        assert everything.captured == pytest.approx(1)
        assert everything.recall == 1
        few = reader.audit(QUESTION[0], tokens=2)
        assert few.recall == 1, "without shared lists the best estimates are what is chosen"
        assert 0 < few.captured < 1  # type: ignore[operator]
        assert few.index_recall == 1
        assert few.missed


def test_a_search_names_the_blocks_that_weigh_most() -> None:
    model = make("olmo")
    with HilsReader(model, "ram:") as reader:
        reader.read(TEXT)
        found = reader.search(QUESTION[0], 40)
        assert len(found) > 20
        with reader.record() as recorder, torch.no_grad():
            model(QUESTION)
        (step,) = reader.memory.traces.get(recorder.number).steps()
        chosen = {int(look.blocks[0, 0]) for look in step.looks} - {34}
        assert chosen <= {match.block for match in found} | set(range(34, 40))
        one = reader.search(QUESTION[0], 40, layer=4)
        assert len(one) > 20
        assert one != found
        with pytest.raises(InvalidArgument, match="no landmarks"):
            reader.search(QUESTION[0], layer=1)


def damage(document: Document, blocks: list[int]) -> None:
    """Flip a bit in the stored states of ``blocks``, in the memory's first layer."""
    states = document.layer(0).gather(blocks)["k"]
    path = Path(document.memory.url) / "data.mdb"
    data = bytearray(path.read_bytes())
    for block in states:
        wanted, place = block.numpy().tobytes(), -1
        while (place := data.find(wanted, place + 1)) >= 0:  # small values move from page to page
            data[place + 5] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["qwen", "olmo"])
def test_a_damaged_block_is_named_or_left_out(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    with HilsReader(model, tmp_path / "m") as reader:
        reader.read(TEXT)
        before = answer(reader)
        damage(reader.document, list(range(0, 30, 2)))
    with HilsReader(model, tmp_path / "m") as reader, pytest.raises(DamagedError, match="block"):
        answer(reader)
    with HilsReader(model, tmp_path / "m", retrieval=Retrieval(top_k=3, on_error="miss")) as reader:
        found = answer(reader)
        assert found.isfinite().all()
        assert not torch.allclose(found, before)
        assert {problem.block for problem in reader.memory.verify()} == set(range(0, 30, 2))
