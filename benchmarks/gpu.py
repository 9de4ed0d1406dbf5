"""The first minutes on a GPU: is everything right there, how fast is it, and what should be mended first.

    python3 benchmarks/gpu.py --out gpu.jsonl --budget 530
    python3 benchmarks/gpu.py --parts kernels tune                 # again, after a mend
    python3 benchmarks/gpu.py --tiny                               # without a GPU: some of it, on a pretended one

Every part runs in processes of its own and prints one JSON object a line, which is in --out at once: a part that dies,
hangs or prints rubbish costs its own time and nothing else. Rows of ``--tiny`` say so, and are no measurements.

Nothing is fetched. What a bare machine needs beside PyTorch, Triton and transformers is LMDB: where there is a network,
``pip download --no-deps -d .whl lmdb==3.0.0``; on the machine ``pip install --no-index --no-deps --target DIR
.whl/*.whl``, and DIR in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
LONGEST_LINE = 1 << 16
MOST_ROWS = 2000
"""Of one part."""
TABLE_LINES = 60
TAIL_LINES = 15
"""Of what a dead process said last."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some rows, and the time that they may take."""

    name: str
    limit: float
    """Seconds after which it is ended."""
    least: float
    """Seconds that must be left for it to begin."""
    pieces: tuple[str, ...] = ("",)
    """Each is a process."""
    tiny: tuple[str, ...] = ()
    """Those of ``--tiny``, where the others only tell that they are left out, or are tests that run elsewhere."""
    processes: int = 1
    """That run at the same time."""
    beside: bool = False
    """The next part need not wait for it."""


OPERATIONS = ("gca", "landmark", "knn", "search")
PARITY = tuple(f"{op} {dtype}" for op in OPERATIONS for dtype in ("bfloat16", "float32", "float16"))
REAL = (*(f"{op} real" for op in OPERATIONS), "codes", "attention", "choice", "rows", "index", "hils")
PARTS = (
    Part(
        name="compile", limit=90, least=30, processes=14, beside=True,
        pieces=tuple(
            f"{kernel} {dtype}"
            for kernel in ("gca", "landmark 64", "landmark 50", "knn")
            for dtype in ("bfloat16", "float32")
        ),
        tiny=("gca bfloat16",),
    ),
    Part(name="ceilings", limit=25, least=5),
    Part(
        name="parity", limit=90, least=30, processes=8,
        pieces=(*PARITY, *REAL),
        tiny=(*(f"{op} float32" for op in OPERATIONS), *REAL),
    ),
    Part(
        name="attach", limit=60, least=20, processes=4,
        pieces=("promises", "cases", "more"),
        tiny=("promises", "cases"),
    ),
    Part(
        name="models", limit=80, least=25, processes=5,
        pieces=("cases", "more", "shipped", "training", "waits"),
        tiny=("cases",),
    ),
    Part(name="kernels", limit=110, least=40),
    Part(name="speed", limit=100, least=40, pieces=("8b", "8b without cuDNN", "135m"), tiny=("135m",)),
    Part(name="tiers", limit=30, least=10),
    Part(name="tune", limit=500, least=60),
)  # fmt: skip


def main() -> int:
    """Run the parts; 1 where a row says that something is wrong."""
    options = _options()
    if options.part:
        sys.path.insert(0, str(ROOT))
        from benchmarks.on_gpu.child import run

        run(options.part, options.piece, options.seconds, tiny=options.tiny)
        return 0
    if not options.tiny and shutil.which("nvidia-smi") is None and shutil.which("rocm-smi") is None:
        print("There is no GPU here. --tiny tries some of every part, small, on a pretended one.")
        return 0
    parts = [part for part in PARTS if options.parts is None or part.name in options.parts]
    with options.out.open("a", encoding="utf-8") as out, _folder() as folder:
        rows = Run(out, options.budget, folder, tiny=options.tiny).run([Part(name="about", limit=60, least=0), *parts])
    print("\n".join(table(rows)))
    return int(any(row.get("ok") is False for row in rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), help="where rows are appended")
    parser.add_argument("--budget", type=float, default=530, help="seconds in all")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS])
    parser.add_argument("--tiny", action="store_true", help="some of every part, small, on a pretended device")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--piece", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=600, help=argparse.SUPPRESS)
    return parser.parse_args()


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """For stores and compiled kernels; removed at the end."""
    made = Path(tempfile.mkdtemp(prefix="memstore-gpu-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


class Run:
    """All parts, one after the other, within a budget of seconds."""

    def __init__(
        self, out: TextIO, budget: float, folder: Path, *, tiny: bool, command: Sequence[str] | None = None
    ) -> None:
        self.rows: list[Row] = []
        self._out, self._folder, self._tiny = out, folder, tiny
        self._begun, self._budget = time.monotonic(), budget
        self._command = [sys.executable, str(Path(__file__).resolve())] if command is None else list(command)
        self._lock = threading.Lock()
        self._seen = 0

    @property
    def left(self) -> float:
        """Seconds."""
        return self._budget - (time.monotonic() - self._begun)

    def run(self, parts: Sequence[Part]) -> list[Row]:
        """Every part that there is time for. What was said, in order."""
        beside: list[threading.Thread] = []
        for part in parts:
            if part.beside:
                beside.append(threading.Thread(target=self._part, args=(part,)))
                beside[-1].start()
                continue
            self._part(part)
            for thread in beside:  # the part that ran beside them is over: no other shall share the machine with them
                thread.join()
            beside.clear()
        for thread in beside:
            thread.join()
        return self.rows

    def _part(self, part: Part) -> None:
        if self.left < part.least:
            self.add(
                {"part": part.name, "name": "skipped", "note": f"{self.left:.0f} s left, it needs {part.least:.0f}"}
            )
            return
        slower = 5 if self._tiny else 1  # interpreted kernels, on a processor
        end = time.monotonic() + min(part.limit * slower, self.left)
        begun = time.monotonic()
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        pieces = part.tiny if self._tiny and part.tiny else part.pieces
        for piece in pieces:
            waiting.put(piece)
        threads = [
            threading.Thread(target=self._pieces, args=(part, waiting, end))
            for _ in range(min(part.processes, len(pieces)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.add({"part": part.name, "name": "took", "value": round(time.monotonic() - begun, 1), "unit": "s"})

    def _pieces(self, part: Part, waiting: queue.SimpleQueue[str], end: float) -> None:
        while True:
            try:
                piece = waiting.get_nowait()
            except queue.Empty:
                return
            if end - time.monotonic() < 1:
                self.add(
                    {"part": part.name, "name": piece or part.name, "ok": False, "error": "no time was left for it"}
                )
                continue
            self._process(part, piece, end)

    def _process(self, part: Part, piece: str, end: float) -> None:
        """One process in a group of its own, killed with all that it started when its time is over."""
        seconds = end - time.monotonic()
        command = [*self._command, "--part", part.name, "--piece", piece, "--seconds", f"{seconds - 1:.1f}"]
        command += ["--tiny"] if self._tiny else []
        with tempfile.TemporaryFile(dir=self._folder) as said:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=said, stdin=subprocess.DEVNULL, cwd=ROOT,
                env=self._environment(part.name, piece), start_new_session=True,
            )  # fmt: skip
            reader = threading.Thread(target=self._read, args=(part.name, piece, process.stdout), daemon=True)
            reader.start()
            over = False
            try:
                process.wait(max(0.1, seconds))
            except subprocess.TimeoutExpired:
                over = True
            _end(process)
            reader.join(5)  # something that left the group may hold the pipe for ever
            if over or process.returncode:
                said.seek(max(0, said.seek(0, os.SEEK_END) - 8192))
                tail = said.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
                why = f"ended after {seconds:.0f} s" if over else f"exit status {process.returncode}"
                self.add({"part": part.name, "name": piece or part.name, "ok": False, "error": "\n".join([why, *tail])})

    def _read(self, part: str, piece: str, pipe: Any) -> None:
        rubbish, rows = 0, 0
        with contextlib.suppress(OSError, ValueError), pipe:
            while line := pipe.readline(LONGEST_LINE):
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    row = None
                if not isinstance(row, dict) or not isinstance(row.get("name"), str):
                    rubbish += 1
                elif rows < MOST_ROWS:
                    rows += 1
                    self.add({**row, "part": part})
        if rubbish:
            self.add({"part": part, "name": piece or part, "note": f"{rubbish} lines were no rows"})

    def add(self, row: Row) -> None:
        """One row more: in the file at once, and short on the screen."""
        with self._lock:
            row = {"t": round(self._budget - self.left, 1), **row} | ({"tiny": True} if self._tiny else {})
            self.rows.append(row)
            self._out.write(json.dumps(row, default=str) + "\n")
            self._out.flush()
            print(line(row), flush=True)

    def _environment(self, part: str, piece: str) -> dict[str, str]:
        more = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "MEMSTORE_CACHE": os.environ.get("MEMSTORE_CACHE", str(self._folder / "cache")),
            "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(self._folder / "triton")),
            "TMPDIR": str(self._folder),
        }
        if "without cuDNN" in piece:
            more["TORCH_CUDNN_SDPA_DEPRIORITIZED"] = "1"
        if self._tiny and part not in ("about", "compile"):
            more["TRITON_INTERPRET"] = "1"
        return os.environ | more


def _end(process: subprocess.Popen[bytes]) -> None:
    """The whole group of a process, asked first and then killed."""
    for number, patience in ((signal.SIGTERM, 2), (signal.SIGKILL, 5)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def line(row: Row) -> str:
    """A row for people."""
    mark = {True: "ok  ", False: "FAIL"}.get(row.get("ok"), "    ")  # type: ignore[arg-type]
    said = [f"{row['part']:<9}{mark} {row['name']}"]
    if row.get("value") is not None:
        said.append(f"{row['value']} {row.get('unit', '')}")
    if row.get("ms") is not None:
        said.append(f"{row['ms']} ms" + (f", {row['baseline']}: {row['of']} ms" if row.get("of") else ""))
    said += [str(row[key]).splitlines()[-1] for key in ("note", "error") if row.get(key)]
    return "  ".join(said)[:200]


def table(rows: Sequence[Row]) -> list[str]:
    """Failures first, then what was measured."""
    failed = [row for row in rows if row.get("ok") is False]
    right = sum(row.get("ok") is True for row in rows)
    measured = [row for row in rows if row.get("ok") is None and (row.get("ms") or row.get("value") is not None)]
    lines = [
        "",
        f"{len(failed)} failed, {right} right, {len(measured)} measured",
        *map(line, failed),
        *map(line, measured),
    ]
    if len(lines) > TABLE_LINES:
        lines[TABLE_LINES - 1 :] = [f"... and {len(lines) - TABLE_LINES + 1} more"]
    return lines


if __name__ == "__main__":
    sys.exit(main())
