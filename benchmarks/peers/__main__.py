"""memstore beside what people would use instead, on the same work in one run.

    python -m benchmarks.peers --lengths 8192 32768
    python -m benchmarks.peers --peers memstore llama.cpp --environments ENVS --gguf model.gguf

A text with twelve hidden sentences is read once by each peer and kept on disk; a new process is asked for the twelve
in their own words, whose end is to be written, and then in plain questions; then one bit of what is on disk is flipped,
the highest of an exponent, and the first twelve are asked again. Seconds are the processor's. What memory, processor
and disk can do at most is measured before each length. The model is the same for all; llama.cpp's is the 4-bit file
that it was made from. Peers with other dependencies than memstore's run with the Python named by ``--python``, or in
environments that ``--environments`` makes, with the versions in ``PINNED``. Rows that the file has already, of the same
machine and options, stay in it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.needles import KINDS
from benchmarks.peers.limits import limits
from benchmarks.questions.wheel import load_json
from memstore.eval import needles
from memstore.resources import disk_bytes, hardware
from memstore.tools.models import load_tokenizer, resolve_model

ROOT = Path(__file__).parents[2]
PEERS = {
    "memstore": "own:Memstore",
    "full": "stock:Full",
    "safetensors": "stock:Safetensors",
    "static": "stock:Static",
    "offloaded": "stock:Offloaded",
    "fp8": "stock:Eight",
    "quanto": "stock:Four",
    "window": "stock:Window",
    "kvpress": "stock:Compressed",
    "infini-retri": "stock:Reread",
    "bm25": "stock:Searched",
    "minilm": "stock:Embedded",
    "llama.cpp": "llamacpp:Saved",
}
PINNED = {
    "llama.cpp": ["llama-cpp-python==0.3.36"],
    "kvpress": ["kvpress==0.5.5"],
    "quanto": ["optimum-quanto==0.2.7"],
    "infini-retri": [
        "infini-retri==0.0.3", "transformers==5.2.0", "matplotlib==3.11.2", "seaborn==0.13.2", "scipy==1.17.1",
        "tiktoken==0.14.0",
    ],
}  # fmt: skip
"""What peers need beside what memstore does."""
PROSE_TOKENS = 100_000
"""Python's language reference has not many more; behind it come the paragraphs of SQuAD (CC BY-SA 4.0)."""
READS_AGAIN = ("infini-retri",)
"""Peers that keep the text alone and need minutes for their questions; they are asked once."""


def main() -> None:
    """Run, print a line of JSON for each peer and length, and write them all."""
    options = _options()
    if options.table:
        print(table(json.loads(options.table.read_text("utf-8"))))
        return
    pythons = dict(each.split("=", 1) for each in options.python)
    if options.environments:
        missing = [peer for peer in options.peers if peer in PINNED and peer not in pythons]
        pythons |= {peer: environment(options.environments / peer, PINNED[peer]) for peer in missing}
    about = {
        **{name: getattr(options, name) for name in ("model", "dtype", "threads", "seed", "window", "kept", "top_k")},
        **hardware(),
    }
    results: dict[str, Any] = {"about": about, "limits": [], "rows": []}
    if options.out and options.out.exists():
        before = json.loads(options.out.read_text("utf-8"))
        if before["about"] == about:
            results = before
    for tokens in options.lengths:
        work = _work(tokens, options)
        _put(results["limits"], {"tokens": tokens, **limits(options.threads, options.dtype)})
        for peer in options.peers:
            day = datetime.now(UTC).date().isoformat()
            row = {
                "peer": peer,
                "tokens": tokens,
                "date": day,
                **_measured(peer, work, pythons.get(peer, sys.executable), options),
            }
            _put(results["rows"], row)
            print(json.dumps(row), flush=True)
            if options.out:
                options.out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


def environment(folder: Path, packages: list[str]) -> str:
    """The Python of an environment that sees this one's packages behind its own, which are ``packages``."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        (own,) = folder.glob("lib/*/site-packages")
        (own / "behind.pth").write_text(
            "".join(f"{each}\n" for each in sys.path if each.endswith("-packages")), "utf-8"
        )
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return str(python)


def _put(rows: list[dict[str, Any]], new: dict[str, Any]) -> None:
    """Among the others, by length and in the order of ``PEERS``; in the place of the one that it measures anew."""
    rows[:] = [row for row in rows if _place(row) != _place(new)] + [new]
    rows.sort(key=_place)


def _place(row: dict[str, Any]) -> tuple[int, int]:
    return row["tokens"], list(PEERS).index(row["peer"]) if "peer" in row else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192], help="tokens of the text")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PYTHON", help="the Python of a peer")
    parser.add_argument("--environments", type=Path, metavar="DIR", help="a folder for environments of peers")
    parser.add_argument("--model", default="smollm2", help="a model that transformers can load")
    parser.add_argument("--gguf", help="the same model for llama.cpp")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1, help="seconds are those of all of them")
    parser.add_argument("--window", type=int, default=2048, help="tokens that the window keeps")
    parser.add_argument("--kept", type=float, default=0.5, help="the share of states that kvpress keeps")
    parser.add_argument("--top-k", type=int, default=8, help="blocks of 64 tokens that a search puts into the prompt")
    parser.add_argument("--flips", type=int, default=3, help="times that one bit is flipped")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one stage")
    parser.add_argument("--out", type=Path, help="where all rows are written, as JSON")
    parser.add_argument("--table", type=Path, metavar="ROWS", help="print such a file as a table in Markdown instead")
    return parser.parse_args()


COLUMNS = (
    "tokens", "", "right: own words", "plain questions", "each answer, s", "first answer, s", "read, tokens/s",
    "on disk, MB", "RAM to read, MB", "RAM to ask, MB", "flipped bits: refused, other answers", "date", "version",
)  # fmt: skip


FIELDS = (
    "right", "right_plain", "answer_s", "first_answer_s", "read_tokens_per_s",
    "disk_bytes", "read_peak_bytes", "ask_peak_bytes",
)  # fmt: skip
"""What ``leaders`` compares: ``COLUMNS`` from the third on."""
LARGEST = ("right", "right_plain", "read_tokens_per_s")
"""Of these more is better."""


def leaders(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of a table: who has the best figure of each column, and the place of memstore where that is another."""
    lines = [f"| best | {' | '.join(COLUMNS[2 : 2 + len(FIELDS)])} |", "|---" * (1 + len(FIELDS)) + "|"]
    for tokens in dict.fromkeys(row["tokens"] for row in rows if "failed" not in row):
        line = f"| {tokens:,} |"
        for field in FIELDS:
            figures = {row["peer"]: row[field] for row in rows if row["tokens"] == tokens and field in row}
            best = (max if field in LARGEST else min)(figures.values())
            names = [peer for peer, figure in figures.items() if figure == best]
            ours, sign = figures.get("memstore", best), -1 if field in LARGEST else 1
            place = 1 + sum(sign * figure < sign * ours for figure in figures.values())
            line += f" {', '.join(names)}{f' (memstore {place} of {len(figures)})' if place > 1 else ''} |"
        lines.append(line)
    return lines


def table(results: dict[str, Any]) -> str:
    """Limits, rows and who leads as three tables in Markdown."""
    lines = [
        "| tokens | copy, GB/s | product, TFLOP/s | disk written and synced, MB/s | read, MB/s |",
        "|---" * 5 + "|",
    ]
    for each in results["limits"]:
        figures = f"{each['copy_gb_per_s']:.1f} | {each['product_tflop_per_s']:.3f}"
        disk = f"{each['disk_written_mb_per_s']:,} | {each['disk_read_mb_per_s']:,}"
        lines.append(f"| {each['tokens']:,} | {figures} | {disk} |")
    lines += ["", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in results["rows"]:
        start = f"| {row['tokens']:,} | {row['peer']} | "
        if "failed" in row:
            lines.append(f"{start}not run: {row['failed']} {'| ' * (len(COLUMNS) - 4)}{row['date']} | |")
            continue
        flips, questions = row["flips"], row["questions"]
        cells = [
            f"{row['right']} of {questions}",
            f"{row['right_plain']} of {questions}" if "right_plain" in row else "",
            f"{row['answer_s']:.2f}",
            f"{row['first_answer_s']:.2f}",
            f"{row['read_tokens_per_s']:,.0f}",
            f"{row['disk_bytes'] / 1e6:,.1f}",
            f"{row['read_peak_bytes'] / 1e6:,.0f}",
            f"{row['ask_peak_bytes'] / 1e6:,.0f}",
            f"{row['flips_refused']}, {row['flips_other_answers']} of {flips}" if flips else "",
            row["date"],
            row["version"],
        ]
        lines.append(start + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *leaders(results["rows"])])


def _work(tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(f"{options.seed} {tokens}")
    tokenizer = load_tokenizer(options.model)
    text = needles.prose_text(rng)
    if tokens > PROSE_TOKENS:
        articles = load_json("squad.json")["data"]
        text += "".join(f"\n\n{each['context']}" for article in articles for each in article["paragraphs"])
    hay = needles.hide(text, needles.prose_needles(KINDS, rng), tokenizer, tokens, rng)
    return {
        "model": resolve_model(options.model),
        "text": tokenizer.decode(hay.tokens),
        "tokens": tokens,
        "own": [each.prompt for each in hay.needles],
        "plain": [f"\n\nQuestion: {each.question}\nAnswer:" for each in hay.needles],
        "needles": hay.needles,
        "answer_tokens": 24,
        "block": 64,
        **{name: getattr(options, name) for name in ("gguf", "dtype", "threads", "window", "kept", "top_k")},
    }


def _measured(peer: str, work: dict[str, Any], python: str, options: argparse.Namespace) -> dict[str, Any]:
    hidden: list[needles.Needle] = work["needles"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "kept"
        folder.mkdir()
        file = Path(place) / "work.json"
        file.write_text(json.dumps({name: each for name, each in work.items() if name != "needles"}), "utf-8")

        def stage(name: str, where: Path) -> dict[str, Any]:
            return _child(python, [PEERS[peer], str(file), str(where), name], options.limit)

        read = stage("read", folder)
        if "failed" in read:
            return read
        size = disk_bytes(folder)
        asked = stage("ask", folder)
        if "failed" in asked:
            return asked
        flips = 0 if peer in READS_AGAIN else options.flips
        flipped = [_flipped(folder, Path(place) / "flipped", number, stage) for number in range(flips)]
    own, plain = asked["answers"][: len(hidden)], asked["answers"][len(hidden) :]
    changed = [each["answers"] != own for each in flipped if "answers" in each]
    return {
        "version": read["version"],
        "read_tokens_per_s": round(work["tokens"] / read["read_s"], 1),
        "read_peak_bytes": read["peak_bytes_above_model"],
        "disk_bytes": size,
        "first_answer_s": round(asked["first_answer_s"], 3),
        "answer_s": round(asked["answer_s"], 3),
        "ask_peak_bytes": asked["peak_bytes_above_model"],
        "right": _right(hidden, own),
        "right_plain": _right(hidden, plain),
        "questions": len(hidden),
        "flips": flips,
        "flips_refused": sum("failed" in each for each in flipped),
        "flips_other_answers": sum(changed),
        "flips_reasons": sorted({each["failed"] for each in flipped if "failed" in each}),
    }


def _right(hidden: list[needles.Needle], answers: list[str]) -> int:
    return sum(bool(re.search(rf"\b{each.answer}\b", answer)) for each, answer in zip(hidden, answers, strict=True))


def _flipped(folder: Path, copy: Path, number: int, stage: Any) -> dict[str, Any]:
    """What is answered where the highest bit of an exponent inside the largest file is the other way round."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    largest = max((each for each in copy.rglob("*") if each.is_file()), key=lambda each: each.stat().st_blocks)
    rng = random.Random(number)
    with largest.open("r+b") as file:
        at = int(largest.stat().st_size * rng.uniform(0.2, 0.8)) // 4 * 4 + 3
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))
    result: dict[str, Any] = stage("ask-own", copy)
    return result


def _child(python: str, arguments: list[str], limit: float) -> dict[str, Any]:
    command = [python, "-m", "benchmarks.peers.child", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {limit:g} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        return {"failed": lines[-1][:200]}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


if __name__ == "__main__":
    main()
