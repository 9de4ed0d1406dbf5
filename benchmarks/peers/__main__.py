"""memstore beside what people would use instead, on the same work in one run.

    python -m benchmarks.peers --lengths 8192 32768
    python -m benchmarks.peers --peers memstore llama.cpp --python llama.cpp=/envs/llama/bin/python --gguf model.gguf

A text with twelve hidden sentences is read once by each peer and kept on disk; a new process answers twelve questions
from it, in the sentences' own words; then one bit of what is on disk is flipped, the highest of an exponent, and they
are asked again. The model is the same for all; llama.cpp's is the 4-bit file that it was made from. Peers with other
dependencies than memstore's run with the Python named by ``--python``: ``pip install llama-cpp-python``, ``pip install
kvpress``, ``pip install infini-retri matplotlib seaborn scipy tiktoken``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from memstore.eval import needles
from memstore.eval.resources import disk_bytes, hardware
from memstore.tools.models import load_tokenizer, resolve_model

ROOT = Path(__file__).parents[2]
PEERS = {
    "memstore": "own:Memstore",
    "full": "stock:Full",
    "window": "stock:Window",
    "kvpress": "stock:Compressed",
    "infini-retri": "stock:Reread",
    "bm25": "stock:Searched",
    "minilm": "stock:Embedded",
    "llama.cpp": "llamacpp:Saved",
}
READS_AGAIN = ("infini-retri",)
"""Peers that keep the text alone and need minutes for their questions; they are asked once."""


def main() -> None:
    """Run, print a line of JSON for each peer and length, and write them all."""
    options = _options()
    if options.table:
        print(table(json.loads(options.table.read_text("utf-8"))))
        return
    pythons = dict(each.split("=", 1) for each in options.python)
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        **{name: getattr(options, name) for name in ("model", "dtype", "threads", "seed", "window", "kept", "top_k")},
        **hardware(),
    }
    rows = []
    for tokens in options.lengths:
        work = _work(tokens, options)
        for peer in options.peers:
            row = {"peer": peer, "tokens": tokens, **_measured(peer, work, pythons.get(peer, sys.executable), options)}
            rows.append(row)
            print(json.dumps(row), flush=True)
            if options.out:
                options.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", "utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192], help="tokens of the text")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PYTHON", help="the Python of a peer")
    parser.add_argument("--model", default="smollm2", help="a model that transformers can load")
    parser.add_argument("--gguf", help="the same model for llama.cpp")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--window", type=int, default=2048, help="tokens that the window keeps")
    parser.add_argument("--kept", type=float, default=0.1, help="the share of states that kvpress keeps")
    parser.add_argument("--top-k", type=int, default=8, help="blocks of 64 tokens that a search puts into the prompt")
    parser.add_argument("--flips", type=int, default=3, help="times that one bit is flipped")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one stage")
    parser.add_argument("--out", type=Path, help="where all rows are written, as JSON")
    parser.add_argument("--table", type=Path, metavar="ROWS", help="print such a file as a table in Markdown instead")
    return parser.parse_args()


def table(results: dict[str, Any]) -> str:
    """Rows as a table in Markdown."""
    names = [
        "tokens",
        "",
        "version",
        "read, tokens/s",
        "on disk, MB",
        "read and kept in, MB",
        "new process: first answer, s",
    ]
    names += ["each answer, s", "right", "one bit flipped"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in results["rows"]:
        start = f"| {row['tokens']:,} | {row['peer']} | {row.get('version', '')} | "
        if "failed" in row:
            lines.append(f"{start}{row['failed']} | | | | | | |")
            continue
        refused, other = row["flips_refused"], row["flips_other_answers"]
        cells = [
            f"{row['read_tokens_per_s']:,.0f}",
            f"{row['disk_bytes'] / 1e6:,.1f}",
            f"{row['read_peak_bytes'] / 1e6:,.0f}",
            f"{row['first_answer_s']:.2f}",
            f"{row['answer_s']:.2f}",
            f"{row['right']} of {row['questions']}",
            f"{refused} of {row['flips']} refused, {other} answered otherwise" if row["flips"] else "",
        ]
        lines.append(start + " | ".join(cells) + " |")
    return "\n".join(lines)


def _work(tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(f"{options.seed} {tokens}")
    tokenizer = load_tokenizer(options.model)
    kinds = [kind for kind, *_ in needles.KINDS]
    hay = needles.hide(needles.prose_text(rng), needles.prose_needles(kinds, rng), tokenizer, tokens, rng)
    return {
        "model": resolve_model(options.model),
        "text": tokenizer.decode(hay.tokens),
        "tokens": tokens,
        "questions": [{"prompt": each.prompt, "answer": each.answer} for each in hay.needles],
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
        right = sum(
            bool(re.search(rf"\b{each.answer}\b", answer))
            for each, answer in zip(hidden, asked["answers"], strict=True)
        )
        flips = 0 if peer in READS_AGAIN else options.flips
        flipped = [_flipped(folder, Path(place) / "flipped", number, stage) for number in range(flips)]
    changed = [each["answers"] != asked["answers"] for each in flipped if "answers" in each]
    return {
        "version": read["version"],
        "read_tokens_per_s": round(work["tokens"] / read["read_s"], 1),
        "read_cpu_s": round(read["read_cpu_s"], 1),
        "read_peak_bytes": read["peak_bytes_above_model"],
        "disk_bytes": size,
        "first_answer_s": round(asked["first_answer_s"], 3),
        "answer_s": round(asked["answer_s"], 3),
        "ask_peak_bytes": asked["peak_bytes_above_model"],
        "right": right,
        "questions": len(hidden),
        "flips": flips,
        "flips_refused": sum("failed" in each for each in flipped),
        "flips_other_answers": sum(changed),
        "flips_reasons": sorted({each["failed"] for each in flipped if "failed" in each}),
    }


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
    result: dict[str, Any] = stage("ask", copy)
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
