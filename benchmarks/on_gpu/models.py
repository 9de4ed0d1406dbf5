"""Models that learn to retrieve: every case of the tests against the CPU, those that come along, training, waits."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

import memstore
from benchmarks.on_gpu.attached import judge
from benchmarks.on_gpu.child import Piece
from memstore.progress import progress_bar
from tests.device import cases


def models(here: Piece) -> None:
    """Cases, whole answers of the models that come along, trainings, or who makes the host wait."""
    match here.piece:
        case "cases" | "more":
            known = cases.CASES if here.piece == "cases" else {**cases.MORE, **cases.LISTS}
            judge(here, {name: case for name, case in known.items() if not name.startswith("attach")})
        case "shipped":
            for task, model, length in (
                ("passkey", "passkey", 16384), ("two-hop", "two-hop", 16384), ("passkey", "landmark-passkey", 16384)
            )[: here.size(3, 1)]:  # fmt: skip
                with here.attempt(f"{model} answers", least=here.size(10, 0)):
                    _answers(here, task, model, length)
        case "training":
            for kind in ("drt", "landmark"):
                with here.attempt(f"training of a {kind} in bfloat16", least=here.size(10, 0)):
                    _training(here, kind)
        case _:
            _waits(here)


def _answers(here: Piece, task: str, name: str, length: int) -> None:
    """Whole answers on the device, and logits against the CPU's."""
    if here.tiny:
        here.row(f"{name} answers", note="left out: a pretended device is too slow for 16,384 tokens")
        return
    from memstore.eval.filler import load_filler
    from memstore.eval.run import TaskPlan, evaluate, memory_spec
    from memstore.tools.models import load_model

    loaded, other = load_model(name, device="cuda"), load_model(name)
    ids = torch.randint(5, 200, (1, 512), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, two = (m.model(ids.to(m.model.device), use_cache=False).logits.float().cpu() for m in (loaded, other))
    far = float((one - two).abs().max())
    here.row(
        f"{name}: logits of 512 tokens",
        ok=far <= 1e-4 * max(1.0, float(two.abs().max())),
        value=far,
        unit="from the CPU's",
    )
    plan = TaskPlan(task=task, lengths=[length], samples=5)
    with progress_bar("filler", 0, 1, False) as advance:
        filler = load_filler(loaded.tokenizer, [], at_most=2 * length, advance=advance)
    with memstore.open("ram:", spec=memory_spec(loaded.model, loaded.tokenizer)) as memory:
        for row in evaluate(loaded.model, loaded.tokenizer, plan, filler, memory):
            decode: Any = loaded.tokenizer.decode
            told = row.to_dict(decode)
            right = float(told.get("accuracy", told.get("correct", 0)))
            here.row(
                f"{name} answers",
                ok=right > 0,
                value=right,
                unit="of 5 right",
                note=json.dumps(told, default=str)[:300],
            )


def _training(here: Piece, kind: str) -> None:
    """Thirty steps: the loss falls."""
    if here.tiny:
        here.row(f"training of a {kind}", note="left out: the cases train one step")
        return
    from memstore.models.drt.training import DRT
    from memstore.models.landmark import LandmarkConfig
    from memstore.models.landmark.training import LANDMARK
    from memstore.train.options import Optimisation, Runtime
    from memstore.train.texts import train_on_texts

    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("\n".join(path.read_text() for path in sorted(Path(memstore.__file__).parent.rglob("*.py"))))
        given: dict[str, Any] = {"family": DRT} if kind == "drt" else {"family": LANDMARK, "config": LandmarkConfig()}
        train_on_texts(
            [text], Path(folder) / "out", context=256,
            optimisation=Optimisation(steps=30, batch=4, bf16=True, warmup=5),
            runtime=Runtime(device="auto", save_every=1000, log_every=5), **given,
        )  # fmt: skip
        losses = []
        for log in Path(folder, "out").rglob("*.json*"):
            for line in log.read_text().splitlines():
                if '"loss"' in line:
                    try:
                        losses.append(float(json.loads(line)["loss"]))
                    except (ValueError, KeyError, TypeError):
                        continue
        fell = len(losses) > 1 and min(losses[-2:]) < losses[0]
        here.row(f"training of a {kind} in bfloat16", ok=fell, note=f"losses {losses[:10]}")


def _waits(here: Piece) -> None:
    """How often the host waits for the device, by what torch itself says of it."""
    for name in ("attach", "drt", "landmark", "train drt", "train landmark")[: here.size(5, 1)]:
        with here.attempt(f"waits of {name}", least=here.size(5, 0)), tempfile.TemporaryDirectory() as folder:
            if here.tiny:
                here.row(f"waits of {name}", note="left out: tests/device counts them")
                continue
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    cases.CASES[name](cases.Run("cuda", None, Path(folder), move=lambda model: model.to("cuda")))
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            waits = [warning for warning in said if "synchroniz" in str(warning.message)]
            places = {f"{Path(w.filename).name}:{w.lineno}" for w in waits}
            here.row(
                f"waits of {name}", value=len(waits), unit="in the whole case", note=", ".join(sorted(places)[:12])
            )
