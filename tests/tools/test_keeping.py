"""`forget`, `pin`, `unpin`, `limit`, `compact`, `repair`: what they do and what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

import memstore
from memstore.errors import StoreFull
from memstore.memory import rules
from memstore.tools.retention import parse_duration, parse_size
from tests.tools.conftest import Cli, append
from tests.tools.test_failures import flip


def names(path: Path) -> list[str]:
    with memstore.open(path, mode="r") as memory:
        return [document.name for document in memory.documents()]


def test_forget_says_what_is_gone_and_how_to_erase_it(cli: Cli, memory: Path) -> None:
    done = cli("forget", memory, "whale")
    assert (done.code, done.out) == (
        0,
        f"forgot 'whale', 10 tokens. To erase it from the disk: memstore compact {memory}\n",
    )
    assert names(memory) == ["ship"]
    again = cli("forget", memory, "whale")
    assert again.code == 3
    assert "has no document 'whale'; it has 'ship'" in again.err


def test_compact_erases_what_was_forgotten(cli: Cli, memory: Path) -> None:
    with memstore.open(memory, mode="r") as opened:
        state = opened.document("whale").layer(0).gather([1])["k"][0].numpy().tobytes()
    cli("forget", memory, "whale")
    done = cli("compact", memory)
    assert done.code == 0
    assert done.out.startswith("forgotten data is erased; ")
    assert state not in (memory / "data.mdb").read_bytes()
    assert cli("verify", memory).code == 0
    assert cli("compact", memory, "--json").json["disk_bytes"] > 0


def test_a_fork_begins_like_its_document(cli: Cli, memory: Path) -> None:
    assert cli("fork", memory, "whale", "draft").out == "'draft' begins with 10 tokens of 'whale'\n"
    assert cli("fork", memory, "whale", "half", "--blocks", 1, "--json").json["tokens"] == 4
    assert [each["document"] for each in cli("ls", memory, "--json").json["documents"]] == [
        "whale",
        "ship",
        "draft",
        "half",
    ]
    assert cli("verify", memory).code == 0
    assert cli("fork", memory, "whale", "chat/whale").code == 2
    with memstore.open(memory) as opened:
        append(opened.document("chat/today"), 4)
    assert cli("fork", memory, "chat/today", "chat/other").code == 0
    for arguments, code in ((("whale", "ship"), 2), (("whale", "more", "--blocks", 9), 2), (("harpoon", "new"), 3)):
        done = cli("fork", memory, *arguments)
        assert (done.code, len(done.err.splitlines())) == (code, 1)


def test_pins_and_limits(cli: Cli, memory: Path) -> None:
    assert cli("pin", memory, "whale").out == "'whale' is pinned: only memstore forget deletes it\n"
    done = cli("limit", memory, "--max-bytes", "64KiB", "--when-full", "evict-oldest-document")
    assert done.code == 0
    assert "limit 65,536 bytes; when full: evict-oldest-document" in done.out
    stats = cli("stats", memory).out
    assert "whale" in stats
    assert "65,536" in stats
    with memstore.open(memory) as opened:
        append(opened.document("sea"), 60)
        assert "whale" in [document.name for document in opened.documents()]
        with pytest.raises(StoreFull):
            append(opened.document("harpoon"), 2_000)
    assert cli("unpin", memory, "whale").out == "'whale' is no longer pinned\n"
    assert cli("limit", memory, "--max-bytes", "none", "--json").json["max_bytes"] is None
    assert "no limit; when full: evict-oldest-document" in cli("limit", memory).out


def test_a_limit_below_what_is_there_says_what_comes_of_it(cli: Cli, memory: Path) -> None:
    said = "that is more than the limit, so the next append"
    assert f"{said} is refused" in cli("limit", memory, "--max-bytes", "1KB").out
    assert f"{said} forgets other documents" in cli("limit", memory, "--when-full", "evict-least-read").out
    assert said not in cli("limit", memory, "--max-bytes", "1GB").out


def test_a_document_expires(cli: Cli, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "utc", lambda: 86_400.0)
    done = cli("expire", memory, "whale", "--after", "36h")
    assert (done.code, done.out) == (0, "'whale' expires at 1970-01-03 12:00 UTC\n")
    assert cli("expire", memory, "ship", "--after", "1w", "--json").json["expires"] == "1970-01-09T00:00:00+00:00"
    assert cli("expire", memory, "ship", "--after", "never").out == "'ship' never expires\n"
    monkeypatch.setattr(rules, "utc", lambda: 4 * 86_400.0)
    assert names(memory) == ["whale", "ship"]
    with memstore.open(memory) as opened:
        append(opened.document("sea"), 4)
    assert names(memory) == ["ship", "sea"]


def test_a_pinned_document_does_not_expire_yet(cli: Cli, memory: Path) -> None:
    cli("pin", memory, "whale")
    assert "it is pinned, so it stays until memstore unpin" in cli("expire", memory, "whale", "--after", "1s").out


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("45m", 2700), ("1.5h", 5400), ("30 D", 2_592_000)])
def test_times(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("500MB", 500_000_000), ("10gb", 10**10), ("8 GiB", 2**33), ("1.5k", 1500), ("none", None)],
)
def test_sizes(text: str, size: int | None) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["limit", "{memory}", "--max-bytes", "much"], 2, "must be a size such as 500MB"),
        (["limit", "{memory}", "--max-bytes", "0"], 2, "must be a size"),
        (["limit", "{memory}", "--when-full", "explode"], 2, "'explode' is not one of 'refuse', 'evict-"),
        (["expire", "{memory}", "whale"], 2, "--after"),
        (["expire", "{memory}", "whale", "--after", "soon"], 2, "--after must be a time such as 45m"),
        (["expire", "{memory}", "whale", "--after", "0d"], 2, "--after must be a time"),
        (["expire", "{memory}", "whale", "--after", "9999999w"], 2, "--after must be a time"),
        (["expire", "{memory}", "boat", "--after", "1d"], 3, "has no document 'boat'"),
        (["pin", "{memory}", "boat"], 3, "has no document 'boat'; it has 'whale', 'ship'"),
        (["pin", "{memory}", "Hip"], 3, "has no document 'Hip'; it has 'ship', 'whale'"),
        (["unpin", "{memory}/none", "whale"], 3, "none"),
        (["repair", "{memory}/none"], 3, "none"),
        (["compact", "ram:"], 2, "would be lost"),
    ],
)
def test_bad_input_is_told_in_short(cli: Cli, memory: Path, arguments: list[str], code: int, says: str) -> None:
    done = cli(*[argument.format(memory=memory) for argument in arguments])
    assert (done.code, done.out) == (code, "")
    assert says in done.err
    assert len(done.err.splitlines()) <= 2
    assert names(memory) == ["whale", "ship"]


@pytest.mark.parametrize("verb", ["forget whale", "pin whale", "compact", "repair", "limit --max-bytes 1GB"])
def test_a_memory_that_is_being_written_is_not_touched(cli: Cli, memory: Path, verb: str) -> None:
    name, *rest = verb.split()
    with memstore.open(memory):
        done = cli(name, memory, *rest)
    assert done.code == 5
    assert "is being written by" in done.err


def test_repair_shows_what_it_would_do_and_then_does_it(cli: Cli, memory: Path) -> None:
    with memstore.open(memory, mode="r") as opened:
        state = opened.document("whale").layer(0).gather([1])["k"][0]
    flip(memory / "data.mdb", state.numpy().tobytes())
    assert cli("verify", memory).code == 4
    plan = cli("repair", memory)
    assert plan.code == 4
    assert plan.out.splitlines() == [
        "would do: document 'whale' now ends before block 1: 4 tokens stay, 6 are lost",
        f"nothing was changed yet; to do it: memstore repair {memory} --yes",
        "to keep the blocks after the damaged ones, add --drop-blocks",
    ]
    done = cli("repair", memory, "--yes")
    assert (done.code, done.out.splitlines()[-1]) == (0, "the memory is intact")
    assert cli("verify", memory).code == 0
    assert cli("repair", memory).out == "the memory is intact\n"
    assert cli("ls", memory, "--json").json["documents"][0]["tokens"] == 4
