"""docs/everyday.md: its commands run in their order, with a tiny model in place of the one that it names.

And once more with a model in a real GGUF file, more notes and some long texts.
"""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

import memstore
from memstore import paths
from memstore.eval.needles import prose_text
from tests.instruct import MARKS, TEMPLATE
from tests.tools.conftest import Cli, Outcome

PAGE = (Path(__file__).parents[2] / "docs" / "everyday.md").read_text(encoding="utf-8")
STEPS = re.findall(r"    \$ (.*)\n((?:    .*\n)*?)(?=    \$ |\n)", PAGE)


def run(cli: Cli, command: str, shown: str, monkeypatch: pytest.MonkeyPatch, model: Path) -> Outcome | None:
    program, *arguments = shlex.split(command)
    if program == "sed":
        _, change, file = arguments
        _, old, new, _ = change.split("/")
        assert old in Path(file).read_text()
        Path(file).write_text(Path(file).read_text().replace(old, new))
        return None
    assert program == "memstore"
    typed = [line.removeprefix("    > ") for line in shown.splitlines() if line.startswith("    > ")]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*typed, ""])))
    arguments = [str(model) if each.endswith(".gguf") else each for each in arguments]
    if arguments[0] in ("ask", "chat"):
        arguments += ["--max-tokens", "3"]
    done = cli(*arguments)
    assert done.code == 0, done
    return done


def test_the_page_does_what_it_says(
    cli: Cli, tmp_path: Path, instruct_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes").mkdir()
    for name, text in re.findall(r"`notes/([\w.]+)`:\n\n((?:    .*\n|\n)+)", PAGE):
        Path("notes", name).write_text(re.sub("^    ", "", text, flags=re.MULTILINE).strip() + "\n")
    assert len(list(Path("notes").iterdir())) == 3
    outcomes = [(command, run(cli, command, shown, monkeypatch, instruct_folder)) for command, shown in STEPS]
    out = [(command, outcome.out) for command, outcome in outcomes if outcome is not None]
    reads = [told for command, told in out if " read " in f" {command} "]
    assert "3 files read, 0 unchanged" in reads[0]
    assert "1 file read, 2 unchanged" in reads[1]
    assert "0 files read, 3 unchanged" in reads[2]
    answers = [told for command, told in out if command.startswith("memstore ask")]
    assert all("[notes/" in told and ", line " in told for told in answers)
    shown = re.findall(r"\[(notes/.*), line (\d+), .*\]\n {4}([^#].*)\n", PAGE)  # with "#" begin whole notes
    assert len(shown) == 4
    for name, line, told in shown:
        assert told[:40] in Path(name).read_text().splitlines()[int(line) - 1], "what is shown begins in that line"
    chats = [told for command, told in out if command.startswith("memstore chat")]
    assert "chat: 0 turns so far" in chats[0]
    assert re.search(r"chat: [24] turns so far", chats[1])
    assert "boathouse" in Path("notes/cottage.md").read_text()
    with memstore.open("notes.mem", mode="r") as memory:
        assert {document.name for document in memory.documents()} >= {"notes/cottage.md", "chat/chat"}


def save_gguf(file: Path) -> None:
    """Write a random LLaMA with a chat template, whose tokens are bytes, as converters of llama.cpp do."""
    layers, width, heads = 3, 32, 4
    tokens = [*sorted(ByteLevel.alphabet()), "th", *MARKS]
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    plain = [gguf.TokenType.NORMAL] * (len(tokens) - len(MARKS))
    writer.add_token_types([*plain, *[gguf.TokenType.CONTROL] * len(MARKS)])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template(TEMPLATE)
    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", rng.standard_normal((len(tokens), width), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for layer in range(layers):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(width, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", rng.standard_normal((width, width), dtype=np.float32) / 8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
def test_a_gguf_file_reads_notes_and_long_texts_talks_and_finds_what_has_changed(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def done(*arguments: object, typed: str = "") -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        outcome = cli(*arguments)
        assert outcome.code == 0, outcome
        return outcome.out

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(paths.CACHE_VARIABLE, str(tmp_path / "cache"))
    save_gguf(Path("tiny.gguf"))
    Path("notes").mkdir()
    for number in range(30):
        text = f"# Box {number}\n\nIt is on shelf {number % 7}.\nIts key hangs behind beam {number}.\n"
        Path("notes", f"box{number:02}.md").write_text(text)
    prose, long = prose_text(), ["one.txt", "two.txt", "three.txt"]
    for place, name in enumerate(long):
        Path(name).write_text(prose[place * 10_000 : (place + 1) * 10_000])

    assert "33 files read" in done("read", "notes", *long, "m", "--model", "tiny.gguf")
    talk = ("chat", "m", "--session", "boxes", "--max-tokens", 3)
    assert "boxes: 0 turns so far, 33 other documents" in done(*talk, typed="Where is the key of box 17?\n")
    told = done(*talk, typed="And which shelf is it on?\n")
    assert "boxes: 2 turns so far" in told
    assert "> Where is the key of box 17?" in told

    note = Path("notes/box17.md")
    note.write_text(note.read_text().replace("beam 17", "the zither"))
    told = done("read", "notes", *long, "m")
    assert "1 file read, 32 unchanged" in told
    assert "notes/box17.md" in told

    told = done("ask", "m", "Does the key hang behind the zither?", "--max-tokens", 3, "--sources", "all")
    (line,) = re.findall(r"\[notes/box17\.md, line (\d+), block \d+: .*\]\n(?:(?!\[).*\n)*.*behind the zither", told)
    assert note.read_text().splitlines()[int(line) - 1] == "Its key hangs behind the zither."
