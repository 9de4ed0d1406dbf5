"""A stock model with a memory: its promises on this device, and every case of the tests against the CPU."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import memstore
from benchmarks.on_gpu.child import Piece
from memstore.readers.kinds import Retrieval
from tests.device import cases
from tests.models.stock import small_llama

OPTIONS: dict[str, Any] = {"block_size": 16, "window": 32, "sink": 16}
EVERYTHING = Retrieval(top_k="all", positions="true")
READ = 256


def attach(here: Piece) -> None:
    """The promises, or cases."""
    if here.piece == "promises":
        _promises(here)
        return
    known = cases.CASES if here.piece == "cases" else cases.MORE
    judge(here, {name: case for name, case in known.items() if name.startswith("attach")})


def judge(here: Piece, known: Mapping[str, Callable[[cases.Run], None]]) -> None:
    """Each case on the CPU and on the device."""
    for name in list(known)[: here.size(len(known), 1)]:
        with here.attempt(name, least=here.size(5, 0)):
            with tempfile.TemporaryDirectory() as folder:
                expected = cases.Run("cpu", None, Path(folder))
                known[name](expected)
            with tempfile.TemporaryDirectory() as folder:
                got = cases.Run("cuda", None, Path(folder), move=None if here.tiny else lambda model: model.to("cuda"))
                known[name](got)
            wrong = cases.different(expected.results, got.results)
            here.row(name, ok=not wrong, note=f"differ: {wrong}" if wrong else None)


def _promises(here: Piece) -> None:
    model = cases.Run("cuda", None, Path(), move=None if here.tiny else lambda one: one.to("cuda")).model(
        small_llama(97, cases.LAYERS)
    )
    ids = torch.randint(1, 97, (here.size(READ, 96),), generator=torch.Generator().manual_seed(0))
    prompt = torch.randint(1, 97, (1, 24), generator=torch.Generator().manual_seed(2)).to("cuda")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        full = model(torch.cat([ids.to("cuda")[None], prompt], 1)).logits[:, len(ids) :]
        logits = {}
        for segment in (32, 64):
            path = f"{folder}/memory-{segment}"
            options = {**OPTIONS, "segment": segment, "retrieval": EVERYTHING}
            with memstore.attach(model, path, **options) as reader:
                reader.read(ids, document="d")
            with memstore.attach(model, path, document="d", **options):
                logits[segment] = model(prompt).logits
        for name, one, other in (
            ("all blocks at their places are full attention", logits[32], full),
            ("read in segments is read at once", logits[32], logits[64]),
        ):
            with here.attempt(name):
                far = float((one - other).abs().max())
                here.row(name, ok=far <= 1e-4 * max(1.0, float(full.abs().max())), value=far, unit="largest difference")
        with here.attempt("another process gives the same bits", least=here.size(10, 0)):
            program = "import sys; from benchmarks.on_gpu.attached import again; again(*sys.argv[1:])"
            said = [
                subprocess.run(
                    [sys.executable, "-c", program, f"{folder}/memory-32", "tiny" if here.tiny else ""],
                    capture_output=True, text=True, check=True, timeout=max(10, here.left - 1),
                ).stdout.split()[-1]
                for _ in range(here.size(2, 1))
            ]  # fmt: skip
            here.row("another process gives the same bits", ok=len({*said, fingerprint(logits[32])}) == 1)


def again(path: str, tiny: str) -> None:
    """In another process: the logits behind the same memory, as one number."""
    import contextlib

    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        if tiny:
            from tests.pretended import pretended

            stack.enter_context(pretended())
        torch.backends.cuda.matmul.allow_tf32 = False
        run = cases.Run("cuda", None, Path(), move=None if tiny else lambda one: one.to("cuda"))
        model = run.model(small_llama(97, cases.LAYERS))
        prompt = torch.randint(1, 97, (1, 24), generator=torch.Generator().manual_seed(2)).to("cuda")
        options = {**OPTIONS, "segment": 32, "retrieval": EVERYTHING}
        with memstore.attach(model, path, document="d", **options), torch.no_grad():
            sys.stdout.write(fingerprint(model(prompt).logits) + "\n")


def fingerprint(x: torch.Tensor) -> str:
    """Of all bits of a tensor."""
    import hashlib

    return hashlib.sha256(x.cpu().contiguous().numpy().tobytes()).hexdigest()
