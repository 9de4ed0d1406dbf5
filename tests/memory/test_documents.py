from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import memstore
from memstore.errors import InvalidArgument, NotFound, ReadOnlyMemory, StoreFull
from memstore.memory import Append, Memory
from tests.memory.conftest import MakeMemory
from tests.memory.helpers import (
    KEY_DIM,
    LAYERS,
    G,
    P,
    S,
    append,
    check_content,
    in_blocks,
    landmarks,
    make_spec,
    random_tokens,
    states,
)

in_ram = pytest.mark.parametrize("make_memory", ["ram"], indirect=True)
"""What is refused before a store is asked."""


@pytest.mark.parametrize("length", [1, S, S + 1, 10 * S, 10 * S + 3])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_appended_comes_back(make_memory: MakeMemory, length: int, dtype: str) -> None:
    memory = make_memory(dtype=dtype)
    document, tokens = memory.document("whale"), random_tokens(length)
    append(document, tokens)
    check_content(document, tokens)
    assert memory.verify() == []


@pytest.mark.parametrize("step", [1, 3, S, 7])
@pytest.mark.parametrize("key_dtype", ["float32", "bfloat16", "bit"])
def test_appending_in_pieces_equals_appending_at_once(make_memory: MakeMemory, step: int, key_dtype: str) -> None:
    memory = make_memory(key_dtype=key_dtype)
    tokens, queries = random_tokens(31), torch.randn(2 * G, 3, KEY_DIM)
    pieces, whole = memory.document("pieces"), memory.document("whole")
    for part in tokens.split(step):
        append(pieces, part)
        pieces.layer(0).search(queries, 2)
    append(whole, tokens)
    check_content(pieces, tokens)
    for layer in (0, 2):
        for found, expected in zip(
            pieces.layer(layer).search(queries, 9), whole.layer(layer).search(queries, 9), strict=True
        ):
            assert torch.equal(found, expected)
        assert torch.equal(pieces.layer(layer).landmarks(range(8)), whole.layer(layer).landmarks(range(8)))
    assert memory.verify() == []


def test_landmarks_are_those_that_were_put(memory: Memory) -> None:
    document, tokens = memory.document("a"), random_tokens(22)
    append(document, tokens)
    assert torch.equal(document.layer(2).landmarks(range(1, 6)), landmarks(in_blocks(tokens), 2)[1:])
    assert document.layer(2).landmarks(range(3, 3)).shape == (0, G, P, KEY_DIM)
    with pytest.raises(NotFound, match="block 6"):
        document.layer(2).landmarks(range(3, 7))


def test_landmarks_fill_many_runs(make_memory: MakeMemory) -> None:
    memory = make_memory(keys_per_block=512, key_dim=16)  # one run is one block
    document = memory.document("a")
    marks = torch.nn.functional.normalize(torch.randn(5, G, 512, 16), dim=-1)
    for part in (slice(0, 2), slice(2, 5)):
        with document.append(range(len(marks[part]) * S)) as batch:
            for layer in range(LAYERS):
                blocks = torch.zeros(len(batch.blocks), S).long()
                batch.put(layer, landmarks=None if layer == 1 else marks[part], **states(blocks, layer))
    assert torch.equal(document.layer(0).landmarks(document.blocks), marks)
    hits = document.layer(0).search(marks[3, :, 77:78], 1)
    assert (hits.blocks.tolist(), hits.offsets.tolist()) == ([[[3]], [[3]]], [[[77]], [[77]]])
    assert memory.verify() == []


def test_an_incomplete_block_is_not_found_but_can_be_gathered(memory: Memory) -> None:
    document = memory.document("a")
    append(document, random_tokens(S + 1))
    assert (document.blocks, document.complete_blocks) == (range(2), range(1))
    assert document.layer(0).search(torch.ones(G, 1, KEY_DIM), 2).blocks[0, 0].tolist() == [0, -1]
    assert document.layer(0).score(torch.ones(G, 1, KEY_DIM))[1].tolist() == [0]
    append(document, random_tokens(S - 1))
    assert sorted(document.layer(0).search(torch.ones(G, 1, KEY_DIM), 2).blocks[0, 0].tolist()) == [0, 1]


def test_gather_takes_any_order_and_repeats(memory: Memory) -> None:
    document, tokens = memory.document("a"), random_tokens(6 * S)
    append(document, tokens)
    wanted = torch.tensor([5, 0, 5, 3])
    expected = states(in_blocks(tokens)[wanted], 1)
    for blocks in (wanted, wanted.int(), wanted.tolist()):
        gathered = document.layer(1).gather(blocks)
        assert list(gathered) == ["v", "k"]
        assert all(torch.equal(gathered[name], expected[name]) for name in gathered)
    assert document.layer(1).gather([])["k"].shape == (0, G, S, 3)


@in_ram
@pytest.mark.parametrize("blocks", [[-1], [6], [0, 99], torch.tensor([2**40])])
def test_a_block_out_of_range_is_not_found(memory: Memory, blocks: Any) -> None:
    append(memory.document("a"), random_tokens(6 * S))
    with pytest.raises(NotFound, match=r"document 'a' has no block .*; it has blocks 0 to 5"):
        memory.document("a").layer(1).gather(blocks)


@in_ram
@pytest.mark.parametrize("blocks", [torch.ones(2), torch.ones(2).bool(), torch.ones(2, 2).long(), ["a"], 3, [0.5]])
def test_blocks_must_be_integers(memory: Memory, blocks: Any) -> None:
    append(memory.document("a"), random_tokens(6 * S))
    with pytest.raises(InvalidArgument, match="blocks must be"):
        memory.document("a").layer(1).gather(blocks)


def test_an_empty_document_finds_nothing_and_is_not_listed(memory: Memory) -> None:
    document = memory.document("a")
    assert (len(document), document.n_blocks, document.blocks, document.id) == (0, 0, range(0), None)
    assert bool(document)
    assert document.tokens().tolist() == []
    assert document.layer(0).search(torch.ones(G, 1, KEY_DIM), 2).blocks.unique().tolist() == [-1]
    with document.append([]) as batch:
        assert batch.blocks == range(0)
    assert memory.documents() == []


def test_documents_do_not_see_each_other(memory: Memory) -> None:
    first, second = random_tokens(20, 1), random_tokens(13, 2)
    append(memory.document("first"), first[:9])
    append(memory.document("second"), second)
    append(memory.document("first"), first[9:])
    check_content(memory.document("first"), first)
    check_content(memory.document("second"), second)
    assert [document.name for document in memory.documents()] == ["first", "second"]
    assert memory.document("first") is memory.documents()[0]


@in_ram
@pytest.mark.parametrize(
    "tokens", [[1.5], [-1], [2**31], [[1, 2]], ["a"], torch.ones(3), torch.ones(3).bool(), [2**70], 5]
)
def test_tokens_must_be_ids(memory: Memory, tokens: Any) -> None:
    with pytest.raises(InvalidArgument, match="token"):
        memory.document("a").append(tokens)


@in_ram
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 3}, "layer must be a whole number from 0 to 2, not 3"),
        ({"k": torch.zeros(2, G, S, 4)}, r"layer 0, k: expected floating point \[2, 2, 4, 3\], not"),
        ({"k": torch.zeros(2, G, S, 3).long()}, "layer 0, k: expected floating point"),
        ({"k": [1, 2]}, "layer 0, k: .* not list"),
        ({"x": torch.zeros(2)}, r"layer 0: expected the fields \['v', 'k'\], not \['k', 'v', 'x'\]"),
        ({"landmarks": None}, "layer 0, landmarks: .* not none"),
        ({"landmarks": torch.zeros(1, G, P, KEY_DIM)}, "layer 0, landmarks"),
        ({"landmarks": torch.full((2, G, P, KEY_DIM), torch.nan)}, "layer 0, landmarks must be finite"),
        ({"landmarks": torch.full((2, G, P, KEY_DIM), 1e20)}, "layer 0, landmarks must lie within 1e"),
        ({"layer": 1}, "layer 1 has no landmarks"),
    ],
)
def test_what_is_put_must_fit(memory: Memory, change: dict[str, Any], message: str) -> None:
    blocks = in_blocks(random_tokens(6))
    arguments: dict[str, Any] = {"layer": 0, "landmarks": landmarks(blocks, 0), **states(blocks, 0)} | change
    with pytest.raises(InvalidArgument, match=message), memory.document("a").append(range(6)) as batch:
        batch.put(**arguments)
    assert memory.documents() == []


def test_every_layer_must_be_put_once(memory: Memory) -> None:
    blocks = in_blocks(random_tokens(6))
    with (
        pytest.raises(InvalidArgument, match=r"layers \[0, 2\] were not put, so nothing was written"),
        memory.document("a").append(range(6)) as batch,
    ):
        batch.put(1, **states(blocks, 1))
    batch = memory.document("a").append(range(6))
    batch.put(1, **states(blocks, 1))
    with pytest.raises(InvalidArgument, match="put already"):
        batch.put(1, **states(blocks, 1))
    assert memory.documents() == []


def put_all(batch: Append, tokens: Tensor) -> None:
    blocks = in_blocks(tokens)
    for layer in range(LAYERS):
        batch.put(layer, landmarks=None if layer == 1 else landmarks(blocks, layer), **states(blocks, layer))


def put_all_and_fail(batch: Append, tokens: Tensor) -> None:
    put_all(batch, tokens)
    raise ZeroDivisionError


def test_an_exception_in_the_body_writes_nothing(memory: Memory) -> None:
    document, tokens = memory.document("a"), random_tokens(10)
    append(document, tokens)
    with pytest.raises(ZeroDivisionError), document.append(range(5)) as batch:
        put_all_and_fail(batch, random_tokens(7))
    check_content(document, tokens)


def test_a_write_that_fails_changes_nothing(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    document, tokens = memory.document("a"), random_tokens(10)
    append(document, tokens)

    def full(batch: object) -> None:
        raise StoreFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(memory._shared.store, "write", full)
        with pytest.raises(StoreFull):
            append(document, random_tokens(5))
        with pytest.raises(StoreFull):
            append(memory.document("new"), random_tokens(5))
        with pytest.raises(StoreFull):
            document.truncate(1)
    check_content(document, tokens)
    assert memory.documents() == [document]
    append(document, random_tokens(5, 3))
    check_content(document, torch.cat([tokens, random_tokens(5, 3)]))


def test_an_append_that_was_overtaken_is_refused(memory: Memory) -> None:
    document = memory.document("a")
    batch = document.append(random_tokens(4))
    put_all(batch, random_tokens(4))
    append(document, random_tokens(10))
    with pytest.raises(InvalidArgument, match=r"changed during this append \(from 0 to 10 tokens\)"), batch:
        pass
    check_content(document, random_tokens(10))


@pytest.mark.parametrize("keep", [0, 1, 3, 5])
def test_truncation_forgets_the_end_and_lets_it_be_written_anew(memory: Memory, keep: int) -> None:
    document, tokens = memory.document("a"), random_tokens(5 * S + 2)
    append(document, tokens)
    document.layer(0).search(torch.ones(G, 1, KEY_DIM), 2)
    document.truncate(6)
    assert len(document) == len(tokens)
    document.truncate(keep)
    check_content(document, tokens[: keep * S])
    assert memory.verify() == []
    other = torch.cat([tokens[: keep * S], random_tokens(17, 5)])
    append(document, other[keep * S :])
    check_content(document, other)
    assert memory.verify() == []
    with pytest.raises(InvalidArgument, match="n_blocks"):
        document.truncate(99)


def test_a_forgotten_document_is_gone_and_its_number_is_not_used_again(memory: Memory) -> None:
    append(memory.document("a"), random_tokens(9))
    append(memory.document("b"), random_tokens(9))
    old = memory.document("b")
    memory.forget("b")
    with pytest.raises(NotFound, match=r"document 'b' .* was forgotten"):
        len(old)
    with pytest.raises(NotFound, match="forgotten"):
        old.append([1])
    with pytest.raises(NotFound, match=r"has no document 'b'; it has 'a'"):
        memory.forget("b")
    assert memory.verify() == []
    append(memory.document("b"), random_tokens(5, 1))
    check_content(memory.document("b"), random_tokens(5, 1))
    assert memory.document("b").id == 3


@in_ram
@pytest.mark.parametrize("name", ["", "x" * 512, "é" * 256, 5, None, "\ud800"])
def test_bad_names_are_refused(memory: Memory, name: Any) -> None:
    with pytest.raises(InvalidArgument, match="name of a document"):
        memory.document(name)


def test_long_and_strange_names_are_fine(memory: Memory) -> None:
    for name in ("x" * 511, "é" * 255, "a/b\n\0", "../etc"):
        append(memory.document(name), [1, 2, 3])
    assert len(memory.documents()) == 4


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    capacity=st.integers(1, 6),
    steps=st.lists(st.integers(1, 30) | st.tuples(st.just("cut"), st.floats(0, 1)), min_size=1, max_size=8),
    seed=st.integers(0, 99),
)
def test_wrapping_around_a_capacity_never_returns_wrong_states(capacity: int, steps: list[Any], seed: int) -> None:
    with memstore.open("ram:", spec=make_spec(capacity=capacity)) as memory:
        document = memory.document("a")
        tokens = torch.empty(0).long()
        for number, step in enumerate(steps):
            if isinstance(step, tuple):
                keep = int(step[1] * document.n_blocks)
                document.truncate(keep)
                tokens = tokens[: keep * S]
            else:
                new = random_tokens(step, seed * 100 + number)
                append(document, new)
                tokens = torch.cat([tokens, new])
            assert len(document.blocks) <= capacity
            check_content(document, tokens)
            assert memory.verify() == []


def test_the_oldest_blocks_leave_and_stay_away(make_memory: MakeMemory) -> None:
    memory = make_memory(capacity=3)
    document, tokens = memory.document("a"), random_tokens(10 * S + 1)
    for part in tokens.split(6):
        append(document, part)
    check_content(document, tokens)
    assert document.blocks == range(8, 11)
    with pytest.raises(NotFound, match="no block 7; it has blocks 8 to 10"):
        document.layer(0).gather([7])
    with pytest.raises(NotFound, match="no block 7"):
        document.tokens(7)
    assert document.layer(0).search(torch.ones(G, 1, KEY_DIM), 5).blocks[0, 0, 2:].tolist() == [-1, -1, -1]
    assert memory.verify() == []
    assert memory.stats()["blocks"] == 3
    assert memory.stats()["tokens"] == 2 * S + 1


def test_searching_a_layer_without_landmarks_says_which_have_them(memory: Memory) -> None:
    view = memory.document("a").layer(1)
    for act in (lambda: view.search(torch.ones(G, 1, KEY_DIM), 1), lambda: view.landmarks(range(0))):
        with pytest.raises(InvalidArgument, match="layer 1 has no landmarks to search; layers with landmarks: 0, 2"):
            act()
    with pytest.raises(InvalidArgument, match="from 0 to 2"):
        memory.document("a").layer(3)


def test_arrays_and_facts_are_kept_under_names(memory: Memory) -> None:
    arrays: dict[str, Tensor] = {"mean": torch.randn(3).bfloat16(), "ids": torch.arange(4), "none": torch.empty(0, 2)}
    memory.put_arrays("router", {"mean": torch.ones(1)})
    memory.put_arrays("other", {})
    memory.put_arrays("router", arrays)
    memory.put_info("router", {"layer": 5})
    memory.put_info("model", "somewhere")
    memory.put_info("model", ["there", 1])
    found = memory.get_arrays("router")
    assert found is not None
    assert list(found) == list(arrays)
    assert all(torch.equal(found[name], arrays[name]) and found[name].dtype == arrays[name].dtype for name in arrays)
    assert (memory.get_info("router"), memory.get_info("model")) == ({"layer": 5}, ["there", 1])
    assert memory.get_arrays("model") is None
    assert memory.get_info("nothing") is None
    assert memory.verify() == []
    with pytest.raises(InvalidArgument, match="float64"):
        memory.put_arrays("router", {"x": torch.ones(1).double()})
    with pytest.raises(InvalidArgument, match="JSON"):
        memory.put_info("x", {1, 2})


def test_stats_count_what_is_there(memory: Memory) -> None:
    append(memory.document("a"), random_tokens(9))
    append(memory.document("b"), random_tokens(4))
    stats = memory.stats()
    assert (stats["documents"], stats["tokens"], stats["blocks"], stats["index_bytes"]) == (2, 13, 4, 0)
    assert stats["bytes"] == {
        "tokens": 52,
        "blocks": 4 * LAYERS * 2 * G * S * 3 * 4,
        "landmarks": 4 * 2 * G * P * KEY_DIM * 4,
    }
    memory.document("a").layer(0).search(torch.ones(G, 1, KEY_DIM), 1)
    assert memory.stats()["index_bytes"] == memory.document("a").layer(0).nbytes > 0


def test_what_is_printed_says_what_it_is(memory: Memory) -> None:
    append(memory.document("a"), random_tokens(9))
    assert repr(memory.document("a")) == "Document('a', 9 tokens in 3 blocks)"
    assert repr(memory.document("a").layer(2)) == "LayerView('a', layer 2)"
    assert memory.url in repr(memory)


def test_reading_only_forbids_every_change(tmp_path: Any) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        append(memory.document("a"), random_tokens(9))
    with memstore.open(tmp_path / "m", mode="r") as memory:
        check_content(memory.document("a"), random_tokens(9))
        document = memory.document("a")
        for act in (
            lambda: document.append([1]),
            lambda: document.truncate(0),
            lambda: memory.forget("a"),
            lambda: memory.put_info("a", 1),
            lambda: memory.put_arrays("a", {}),
        ):
            with pytest.raises(ReadOnlyMemory, match="mode='a'"):
                act()
        with pytest.raises(NotFound, match=r"has no document 'b'; it has 'a'"):
            memory.document("b")


def test_tokens_of_a_range_of_blocks(make_memory: MakeMemory) -> None:
    memory, tokens = make_memory(capacity=5), random_tokens(7 * S + 2)
    append(memory.document("a"), tokens)
    document = memory.document("a")  # which has blocks 3 to 7
    assert torch.equal(document.tokens(range(3, 8)), document.tokens())
    assert torch.equal(document.tokens(range(4, 6)), tokens[4 * S : 6 * S])
    assert document.tokens(range(5, 5)).tolist() == []
    for wanted, absent in ((range(2, 5), 2), (range(6, 9), 8), (range(20, 22), 20), (range(-1, 1), -1)):
        with pytest.raises(NotFound, match=f"no block {absent}; it has blocks 3 to 7"):
            document.tokens(wanted)


@in_ram
@pytest.mark.parametrize("block", [range(0, 4, 2), range(4, 0, -1), 1.0, "1", True])
def test_tokens_takes_a_number_or_a_range_of_step_1(memory: Memory, block: Any) -> None:
    document = memory.document("a")
    append(document, random_tokens(5 * S))
    with pytest.raises(InvalidArgument, match="step 1"):
        document.tokens(block)


def known_of(document: str) -> list[str]:
    return [f"file/{document}", f"reading/{document}", *(f"said/{document.removeprefix('chat/')}/{n}" for n in (0, 1))]


def test_what_is_known_of_a_document_is_forgotten_with_it(make_memory: MakeMemory) -> None:
    memory = make_memory()
    for name in ("chat/ada", "chat/ada/x", "note"):
        append(memory.document(name), random_tokens(S))
        for fact in known_of(name):
            memory.put_info(fact, {"of": name})
    memory.put_info("plan", 1)
    memory.forget("chat/ada")
    left = {"plan", *known_of("note"), *known_of("chat/ada/x")}
    assert set(memory.facts()[0]) == left == set(memory.infos())
    memory.document("note").expire(1e-6)
    memory.document("chat/ada/x").expire(1e-6)
    memory.expire()
    assert set(memory.facts()[0]) == {"plan", "said/note/0", "said/note/1"}
    assert memory.verify() == []


def test_what_is_evicted_takes_what_is_known_of_it_along(make_memory: MakeMemory) -> None:
    memory = make_memory()
    append(memory.document("chat/old"), random_tokens(30 * S))
    memory.put_info("said/old/0", "some words")
    memory.limit(memory.stats()["used_bytes"] * 3 // 2, "evict-oldest-document")
    append(memory.document("new"), random_tokens(30 * S))
    assert [each.name for each in memory.documents()] == ["new"]
    assert memory.facts()[0] == {}


def test_a_fact_that_was_taken_away_is_taken_for_no_other(make_memory: MakeMemory) -> None:
    memory = make_memory()
    if memory.url.startswith("ram:"):
        pytest.skip("one opening alone")
    with memstore.open(memory.url, mode="r") as reader:
        for name in ("one", "two"):
            memory.put_info(name, name)
        assert reader.get_info("two") == "two"
        memory.put_info("two", None)
        memory.put_info("three", 3)
        assert (reader.get_info("two"), reader.get_info("three")) == (None, 3)
        memory.put_info("two", "again")
        memory.put_info("three", None)
        assert reader.facts()[0] == {"one": "one", "two": "again"} == {n: reader.get_info(n) for n in ("one", "two")}
