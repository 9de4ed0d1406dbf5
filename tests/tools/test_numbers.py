"""The figures of README and pages are those of the rows that their commands have written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def rows(name: str) -> Any:
    file = ROOT / "benchmarks" / "results" / name
    return json.loads(file.with_suffix(file.suffix or ".json").read_text("utf-8"))


def squad(ranker: str, top_k: int = 8) -> float:
    """Of the newest run that has the ranker, held out and without a second ranking."""
    runs = [each for each in rows("questions-squad") if each["words"] and each["half"] == "held-out"]
    found = [row for each in runs if not each.get("rerank") for row in each["rows"]]
    return [float(row["all"]) for row in found if row["ranker"] == ranker and row["top_k"] == top_k][-1]


def with_answer(ranker: str) -> float:
    """Of all questions of SQuAD: what is found of the right paragraph, in blocks of 64 tokens, has the answer."""
    runs = [run["rows"] for run in rows("sizes") if "--questions 5000" in run["command"]]
    found = [row for run in runs for row in run if (row["ranker"], row["block_size"]) == (ranker, 64)]
    return float(found[-1]["answer"])


def with_e5(figure: str) -> float:
    """Of all questions of SQuAD: among 8 blocks of BM25 and E5 fused."""
    (run,) = (each for each in rows("searches") if (each["task"], each["unit"]) == ("squad", "blocks"))
    return next(float(row[figure]) for row in run["rows"] if (row["ranker"], row["top_k"]) == ("bm25+e5", 8))


def look_alikes(way: str) -> str:
    """Right answers of 32 with nothing quoted: states alone, the same blocks as text, or all of the text."""
    runs = [each for each in rows("questions-lookalikes") if not each.get("quote")]
    found = [row for run in runs for row in run.get("answers", []) if row["with"] == way]
    return f"{found[0]['has'] * found[0]['answered']:.0f}"


def faults() -> int:
    """Rounds on each store of what the README names."""
    named = ("kill-writers", "kill-readings", "full-disk", "bit-flips", "truncations")
    found = rows("faults")
    rounds = [
        sum(int(each["rounds"]) for each in found[store]["results"] if each["fault"] in named)
        for store in ("lmdb", "zarr")
    ]
    return min(rounds)


ATTACH = {each["about"]["dtype"].removeprefix("torch."): each for each in rows("attach") if "32768" in each["decode"]}
"""The newest run of each precision."""
LONG = rows("eval-passkey-100m")["rows"][0]
RIGHT = next(row for row in rows("questions-answers")[0]["answers"] if row["with"] == "the right paragraphs")
ANSWERS = {row["with"]: row for row in rows("answers")[0]["rows"]}

MILLION = [each for each in rows("index")["rows"] if each["what"] == "index" and each["keys"] == 1_048_576]
INDEX = {(each["set"], each["index"]): each for each in MILLION}
LAYER_4, LAYER_8, DRT = "smollm2 layer 4 head 2", "smollm2 layer 8 head 1", "drt landmarks"
LISTS, CLUSTERS = "faiss:IVF4096,Flat", "clusters:0.95"
CODES = next(each for each in rows("index")["rows"] if each["what"] == "late interaction, real codes")
MODELS = {
    "SmolLM2-135M": (30, 3, 64),
    "Qwen2.5-0.5B": (24, 2, 64),
    "Llama-3.2-1B": (16, 8, 64),
    "Llama-3.1-8B": (32, 8, 128),
    "Qwen3-8B": (36, 8, 128),
}
"""Layers, heads of keys and values, and their size: of the models' configurations."""


RUNS = {each["model"]: each for each in rows("indexed")["rows"] if "model" in each and "call_tokens_per_s" in each}
QWEN, QWEN_INDEX = RUNS["qwen4_exp"], RUNS["qwen4_exp, its index alone"]


def runs(row: dict[str, Any], part: str = "", beside: str = "") -> str:
    """Tokens per second into a memory; or how much faster that is than the model in one call, or in segments."""
    found = row[f"memory_{part}tokens_per_s"]
    return f"{found / row[f'{beside}_{part}tokens_per_s']:.1f}" if beside else f"{found:,.0f}"


def index(keys: str, name: str, batch: int = 1) -> float:
    """Milliseconds of a query."""
    return float(INDEX[keys, name]["ms_per_query"][str(batch)])


def faster(keys: str, batch: int = 1) -> str:
    """How many times as fast as exact search clusters are."""
    return f"{index(keys, 'exact', batch) / index(keys, CLUSTERS, batch):.0f}"


def layer_peers(size: int, side: str, figure: str) -> list[float]:
    """Of the kNN layer with each key set."""
    found = [row for row in rows("layer-peers")["rows"] if row["memory"] == size and side in row["side"]]
    return [float(row[figure]) for row in sorted(found, key=lambda row: str(row["set"]))]


def graph_reads_faster() -> list[float]:
    """How many times as fast as exact search in tensors, ascending."""
    graph, tensors = (layer_peers(65_536, side, "read_tokens_per_s") for side in ("memorizing", "tensors"))
    return sorted(theirs / ours for theirs, ours in zip(graph, tensors, strict=True))


def knn_search() -> str:
    """Of the longest search: its seconds, times those of the bare product in bfloat16."""
    row = max((each for each in rows("knn")["rows"] if each["what"] == "search"), key=lambda each: each["memory"])
    return f"{row['seconds'] / row['bf16_product_seconds']:.1f}"


def of_answers(figure: str, way: str, *, short: bool = False) -> str:
    """What the memory has of ``figure`` about SQuAD, as a share of what another way has; asked for short answers?"""
    runs = [each for each in rows("answers") if each["task"] == "squad" and ("system" in each) == short]
    asked = [each for each in runs if short or each["quote"]]
    found = {row["with"]: row[figure] for each in asked for row in each["rows"]}
    return f"{found['memory'] / found[way]:.2f}"


def given(name: str, carrier: str, *, file: str = "carriers", whose: str = "the memory") -> dict[str, Any]:
    """What a model answers of a set with somebody's blocks given in this way; ``file`` has its rows."""
    found = rows(file)["rows"]
    return next(row for row in found if (row["set"], row["list"], row["as"]) == (name, whose, carrier))


def larger(carrier: str, whose: str = "the memory") -> str:
    """The shares of right answers of the model of 1.5B, as the README has them."""
    sets = "squad", "hotpotqa", "lookalikes"
    return "; ".join(f"{given(name, carrier, file='carriers-larger', whose=whose)['has']:.2f}" for name in sets)


def right(name: str, carrier: str) -> str:
    """How many questions that is."""
    row = given(name, carrier)
    return f"{row['has'] * row['answered']:.0f}"


def rolled_back(store: str, what: str) -> int:
    """Of both runs: pages and values that were damaged, or times that an earlier commit was served as a whole."""
    runs = [each["counts"] for each in rows("faults")[store]["results"] if each["fault"] == "rolled-back"]
    return sum(counts[name] for counts in runs for name in counts if what in name)


def stock_memory(size: int) -> float:
    """Gigabytes of 32,768 tokens of SmolLM2, whose numbers have so many bytes."""
    return 32_768 * 2 * prod(MODELS["SmolLM2-135M"]) * size / 1e9


def kilobytes(model: str, codec: str) -> str:
    """Of the keys and values of a token."""
    bits = next(each["bits_per_number"] for each in rows("codecs")["rows"] if each["codec"] == codec)
    layers, heads, size = MODELS[model]
    return f"{2 * layers * heads * size * bits / 8 / 1000:.0f}"


FIGURES: list[tuple[str, Callable[[], object]]] = [
    (r"\| ([\d.,]+) of \d+ found, [\d.]+ GB of memory", lambda: f"{LONG['accuracy'] * LONG['samples']:.0f}"),
    (r"of \d+ found, ([\d.]+) GB of memory", lambda: f"{LONG['peak_bytes'] / 1e9:.1f}"),
    (r"\| ([\d.]+) \(BM25", lambda: f"{squad('memory'):.3f}"),
    (r"\(BM25 ([\d.]+),", lambda: f"{squad('bm25'):.3f}"),
    (r"MiniLM ([\d.]+),", lambda: f"{squad('minilm'):.3f}"),
    (r"both fused ([\d.]+);", lambda: f"{squad('bm25+minilm'):.3f}"),
    (r"E5 fused ([\d.]+), within", lambda: f"{with_e5('all'):.3f}"),
    (r"\); ([\d.]+) \(both fused", lambda: f"{with_answer('memory'):.3f}"),
    (r"\); [\d.]+ \(both fused ([\d.]+)", lambda: f"{with_answer('bm25+minilm'):.3f}"),
    (r"BM25 and E5 ([\d.]+)\)", lambda: f"{with_e5('answer'):.3f}"),
    (r"\| ([\d.]+) \(bfloat16\)", lambda: f"{ATTACH['bfloat16']['decode']['32768']['decode_ratio']:.2f}"),
    (r"([\d.]+) \(float32\)", lambda: f"{ATTACH['float32']['decode']['32768']['decode_ratio']:.2f}"),
    (r"\| ([\d.]+) with 8 blocks as states", lambda: f"{ANSWERS['memory']['has']:.2f}"),
    (r"text; ([\d.]+) with 8 blocks of both", lambda: f"{ANSWERS['bm25+minilm as text']['has']:.2f}"),
    (r"text; ([\d.]+) with the right paragraphs", lambda: f"{ANSWERS['the right paragraphs']['has']:.2f}"),
    (r"\| (\d+) right as states alone", lambda: look_alikes("memory")),
    (r"as states alone; (\d+) as text", lambda: look_alikes("memory, as text")),
    (r"as text; (\d+) with all of the text", lambda: look_alikes("full attention")),
    (r"run of all carriers: ([\d.]+)", lambda: f"{given('squad, six texts', 'states and a quote')['has']:.2f}"),
    (r"with that paragraph alone ([\d.]+)", lambda: f"{given('squad, six texts', 'the quote alone')['has']:.2f}"),
    (r"blocks as states alone ([\d.]+)", lambda: f"{given('squad, six texts', 'states')['has']:.2f}"),
    (r"states alone [\d.]+, as text ([\d.]+)\. Of", lambda: f"{given('squad, six texts', 'text')['has']:.2f}"),
    (r"need two paragraphs\]\(\S+\): ([\d.]+)", lambda: f"{given('hotpotqa', 'states and a quote')['has']:.2f}"),
    (r"with it alone ([\d.]+)", lambda: f"{given('hotpotqa', 'the quote alone')['has']:.2f}"),
    (r"with the same 8 blocks as text ([\d.]+)", lambda: f"{given('hotpotqa', 'text')['has']:.2f}"),
    (r"paragraph quoted as text: ([\d.]+; [\d.]+; [\d.]+)\.", lambda: larger("states and a quote")),
    (r"With the same 8 blocks as text: ([\d.]+; [\d.]+; [\d.]+)\.", lambda: larger("text")),
    (r"both searches as text: ([\d.]+; [\d.]+; [\d.]+)\.", lambda: larger("text", "BM25 and MiniLM")),
    (r"With states alone: ([\d.]+; [\d.]+; [\d.]+) ", lambda: larger("states")),
    (r"Of 256 others: (\d+)", lambda: right("lookalikes", "states")),
    (r"Of 256 others: \d+, (\d+)", lambda: right("lookalikes", "text")),
    (r"and (\d+) with the best paragraph alone", lambda: right("lookalikes", "the quote alone")),
    (r"truncations: ([\d,]+) on each store", lambda: f"{faults() // 1000 * 1000:,}"),
    (r"without a memory, it answers (\d+) of", lambda: f"{RIGHT['has'] * RIGHT['answered']:.0f}"),
    (r"without a memory, it answers \d+ of (\d+)", lambda: str(RIGHT["answered"])),
]


@pytest.mark.parametrize(("words", "figure"), FIGURES, ids=[words for words, _ in FIGURES])
def test_a_figure_of_the_readme_is_in_the_results(words: str, figure: Callable[[], object]) -> None:
    found = re.search(words, README)
    assert found, "say in test_numbers.py which row the new words of the README are of"
    assert found[1] == figure()


PROSE_FIGURES: list[tuple[str, str, Callable[[], object]]] = [
    *(
        ("indexes.md", rf"\| {name} \| {before}([\d.]+) \|", figure)
        for name, keys in (("SmolLM2, layer 4", LAYER_4), ("SmolLM2, layer 8", LAYER_8), ("landmarks of a DRT", DRT))
        for before, figure in (
            ("", lambda keys=keys: faster(keys)),
            (r"\d+ \| ", lambda keys=keys: faster(keys, 64)),
            (r"\d+ \| \d+ \| ", lambda keys=keys: f"{INDEX[keys, CLUSTERS]['recall']:.2f}"),
        )
    ),
    *(
        ("indexes.md", rf"{name} \| {before}(0\.\d+|1\.\d+) \|", lambda keys=keys, by=by: f"{index(keys, by, 64):.2f}")
        for name, keys in (
            ("SmolLM2, layer 4", LAYER_4),
            ("SmolLM2, layer 8", LAYER_8),
            ("landmarks of a DRT", DRT),
            ("clustered", "clustered"),
        )
        for before, by in (("", CLUSTERS), (r"0\.\d+ \| ", LISTS))
    ),
    (
        "peers.md",
        r"published memory finds ([\d.]+) to",
        lambda: f"{min(layer_peers(65_536, 'memorizing', 'recall')):.2f}",
    ),
    ("peers.md", r"finds [\d.]+ to ([\d.]+) of", lambda: f"{max(layer_peers(8192, 'memorizing', 'recall')):.2f}"),
    ("peers.md", r"graph reads ([\d.]+) to", lambda: f"{graph_reads_faster()[0]:.1f}"),
    ("peers.md", r"graph reads [\d.]+ to ([\d.]+) times", lambda: f"{graph_reads_faster()[1]:.1f}"),
    ("measured.md", r"and a question takes ([\d.]+) of the time", lambda: of_answers("cpu_ms", "bm25+minilm as text")),
    (
        "measured.md",
        r"passages, in ([\d.]+) of their time",
        lambda: of_answers("cpu_ms", "bm25+minilm as text", short=True),
    ),
    ("measured.md", r"that is ([\d.]+) by what the answers", lambda: of_answers("has", "the right paragraphs")),
    ("measured.md", r"contain, and ([\d.]+) by F1", lambda: of_answers("f1", "the right paragraphs")),
    ("measured.md", r"of 8 heads takes ([\d.]+) times", knn_search),
    ("measured.md", r"swapped \([^)]*\): ([\d,]+) on LMDB", lambda: f"{rolled_back('lmdb', 'damaged'):,}"),
    ("measured.md", r"on LMDB, ([\d,]+) on Zarr, none", lambda: f"{rolled_back('zarr', 'damaged'):,}"),
    ("measured.md", r"as a whole \((\d+) times on LMDB", lambda: str(rolled_back("lmdb", "earlier"))),
    ("models.md", r"into a memory \| ([\d,]+) \(", lambda: runs(QWEN)),
    ("models.md", r"into a memory \| [\d,]+ \(([\d.]+) and", lambda: runs(QWEN, beside="call")),
    ("models.md", r"into a memory \| [\d,]+ \([\d.]+ and ([\d.]+) times", lambda: runs(QWEN, beside="segments")),
    ("models.md", r"times as fast\) \| ([\d,]+) \([\d.]+ and", lambda: runs(QWEN, "layer_")),
    ("models.md", r"times as fast\) \| [\d,]+ \(([\d.]+) and", lambda: runs(QWEN, "layer_", "call")),
    ("models.md", r"times as fast\) \| [\d,]+ \([\d.]+ and ([\d.]+)\)", lambda: runs(QWEN, "layer_", "segments")),
    ("models.md", r"\| ([\d,]+) \([\d.]+ times\) \|", lambda: runs(QWEN_INDEX)),
    ("models.md", r"\| [\d,]+ \(([\d.]+) times\) \|", lambda: runs(QWEN_INDEX, beside="call")),
    ("choose.md", r"(\d+) ms for one query among a million", lambda: f"{index(LAYER_4, 'exact'):.0f}"),
    ("choose.md", r"(\d+) to \d+ times as fast", lambda: faster(LAYER_4)),
    ("choose.md", r"\d+ to (\d+) times as fast", lambda: faster(DRT)),
    ("choose.md", r"find the evidence of ([\d.]+) instead", lambda: f"{squad('memory', 16):.3f}"),
    ("choose.md", r"instead of ([\d.]+) of SQuAD", lambda: f"{squad('memory'):.3f}"),
    *(
        (page, rf"{before}(\d+){after}", lambda model=model, codec=codec: kilobytes(model, codec))
        for page in ("choose.md", "troubleshooting.md", "../README.md")
        for before, after, model, codec in (
            ("", r" to \d+ KB", "Qwen2.5-0.5B", "int4"),
            (r"\d+ to ", " KB", "Qwen3-8B", "none"),
        )
    ),
    ("../README.md", r"and ([\d.]+) GB of disk", lambda: f"{stock_memory(2):.1f}"),
    (
        "../README.md",
        r"([\d.]+) GB without bfloat16",
        lambda: f"{stock_memory(4):.1f}",
    ),
    *(
        ("../README.md", rf"\| {model} \| {before}(\d+) KB", lambda model=model, codec=codec: kilobytes(model, codec))
        for model in MODELS
        for before, codec in (("", "none"), (r"\d+ KB \| ", "int8"), (r"\d+ KB \| \d+ KB \| ", "int4"))
    ),
]


def anywhere(words: str, text: str) -> re.Match[str] | None:
    """Where the words are, also across the ends of lines and in a list."""
    return re.search(words.replace(" ", r"\s+"), text)


@pytest.mark.parametrize(("page", "words", "figure"), PROSE_FIGURES)
def test_a_figure_in_the_text_of_a_page_is_in_the_results(page: str, words: str, figure: Callable[[], object]) -> None:
    found = anywhere(words, (ROOT / "docs" / page).read_text("utf-8"))
    assert found, "say in test_numbers.py which row the new words are of"
    assert found[1] == figure()


TABLE = re.compile(r"<!-- rows: ([^>]*) -->\n\n((?:\|.*\n)+)|((?:^\|.*\n)+)", re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
OTHER_RUNS = re.compile(r"\([^()]*other runs[^()]*\)")
OF = re.compile(r"(\d+) of (\d+)")
UNITS = (1, 100, 1e-6, 1e-9, 1 / 2**20)  # of a share, and of bytes
MILLISECONDS = (1e3, 1e-3)


def tables(page: str) -> list[tuple[str, list[str]]]:
    """The files and the rows of each table of a page."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    return [(found[1] or "", (found[2] or found[3]).splitlines()[2:]) for found in TABLE.finditer(text)]


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        yield from (float(name) for name in value if re.fullmatch(r"\d+(\.\d+)?", str(name)))
        value = [*value.values()]
    if isinstance(value, list):
        yield float(len(value))
        for each in value:
            yield from numbers(each)
    elif isinstance(value, (int, float)):
        yield abs(float(value))


@pytest.mark.parametrize("page", ["measured.md", "scale.md", "indexes.md"])
def test_each_number_of_a_table_is_in_the_rows_that_it_names(page: str) -> None:
    unknown = []
    for files, lines in tables(page):
        if page != "measured.md" and not files:
            continue  # worked out, or names
        assert files, f"say above the table what rows it has, as <!-- rows: FILE --> does: {lines[0]}"
        plain = [number for file in files.split() for number in numbers(rows(file))]
        for cell in (cell for line in lines for cell in line.strip("|").split("|")[1:]):
            units = (*UNITS, *MILLISECONDS) if " ms" in cell else UNITS
            known = [number * unit for number in plain for unit in units]
            counts = {part[0]: int(part[1]) / int(part[2]) for part in OF.finditer(cell)}
            shares = [part for part, share in counts.items() if any(abs(each - share) < 0.002 for each in known)]
            rest = OTHER_RUNS.sub("", cell)
            for part in shares:
                rest = rest.replace(part, "")
            for number in NUMBER.findall(rest):
                value, place = float(number.replace(",", "")), 10.0 ** -len(number.partition(".")[2])
                if (value > 9 or place < 1) and not any(abs(each - value) <= 0.501 * place for each in known):
                    unknown.append(f"{number} of {cell.strip()!r} is not in {files}")
    assert not unknown, "\n".join(unknown)


PASSED_OVER = re.compile(
    r"```.*?```|<!--.*?-->|^\|[^\n]*$|^    [^\n]*$|`[^`\n]*`|\]\([^)\n]*\)"
    r"|(?:PyTorch|Python) [\d.]+(?: to [\d.]+)?|SQuAD 2\.0|\d+ MB are fetched|[A-Z][\w.]*-[\d.]+B",
    re.DOTALL | re.MULTILINE,
)
"""Code, tables, which the test above reads, targets of links, and names with a number in them."""
UNIT = r"%|(?:ms|us|s|seconds|minutes|[KMG]i?B(?:/s)?|bytes|tokens/s|times|points|of \d+)\b"
MORE = r"(?:,? (?:to|and|for|against) \d[\d.,]*)*"
FIGURE = re.compile(rf"(?<![\w.,-])(?:\d[\d,]*\.\d+(?![.\w])|\d[\d,]*(?={MORE} ?(?:{UNIT})))")
"""What was measured: it has a point or a unit. Sizes that were chosen (tokens, blocks, heads) have neither."""
CONSTANTS = {"api", "cli", "design", "export", "format", "inspector", "keeping", "mechanisms", "security", "stores"}
"""Pages whose numbers are those of the code."""
PAGES = ["../README.md", *sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.stem not in CONSTANTS)]


@pytest.mark.parametrize("page", PAGES)
def test_each_figure_of_a_text_is_in_rows_that_its_section_names(page: str) -> None:
    text = plain = (ROOT / "docs" / page).read_text("utf-8")
    for name, words, _ in (*PROSE_FIGURES, *(("../README.md", *each) for each in FIGURES)):
        if name == page and (found := anywhere(words, text)):
            plain = plain[: found.start(1)] + "_" * len(found[1]) + plain[found.end(1) :]
    unknown = []
    for section in re.split(r"^(?=## )", plain, flags=re.MULTILINE):
        if section.startswith("## Worked out"):
            continue
        files = {*re.findall(r"benchmarks/results/([\w-]+)\.json", section)}
        files.update(*(named.split() for named in re.findall(r"<!-- rows: ([^>]*) -->", section)))
        known = [each * unit for file in files for each in numbers(rows(file)) for unit in (*UNITS, *MILLISECONDS)]
        said = PASSED_OVER.sub("_", section)
        for figure in FIGURE.finditer(said):
            value, place = float(figure[0].replace(",", "")), 10.0 ** -len(figure[0].partition(".")[2])
            if (value > 9 or place < 1) and not any(abs(each - value) <= 0.501 * place for each in known):
                around = said[max(0, figure.start() - 50) : figure.end() + 20].replace("\n", " ")
                unknown.append(f"{figure[0]} of {around!r}: no rows of {sorted(files)} have it")
    assert not unknown, "\n".join(unknown)
