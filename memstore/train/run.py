"""The folder of a run: the finished model, the settings that made it, checkpoints on the way, a log.

::

    OUT/
      config.json, model.safetensors, tokenizer.json ...   the model, when it is done
      run.json          the settings; a run with others is refused
      log.jsonl         one line for every few steps
      report.json       the result; written last
      checkpoints/      the last two, to resume from
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError

from memstore import paths
from memstore.errors import DamagedError, DifferentRun, InvalidArgument, MemstoreError, StoreFull, first_line
from memstore.json_checks import Check, anything, members, number, table, text, whole

SETTINGS, REPORT, LOG, CHECKPOINTS, COMPLETE = "run.json", "report.json", "log.jsonl", "checkpoints", "complete.json"

BEGINNINGS = (SETTINGS, LOG, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
"""All files of a run that came to no result. Another run may replace them."""
_VALUES = members(anything, 10_000)


class Run:
    """An output folder of a run."""

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        """Make the folder, or resume the run in it.

        Raises ``DifferentRun`` if it has other settings, ``InvalidArgument`` if the folder holds anything else.
        """
        self.out = out
        wanted = json.loads(json.dumps(settings))  # as JSON returns it
        path = out / SETTINGS
        if path.exists():
            there = read_json(path)
            if there == wanted:
                return
            if self.report is not None or self.checkpoint() is not None:
                raise _different(out, there, wanted)
            for name in BEGINNINGS:
                (out / name).unlink(missing_ok=True)
            shutil.rmtree(self.checkpoints, ignore_errors=True)  # none of them is whole
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InvalidArgument(f"{out} exists, but it is not a training run; name a new folder with --out")
        try:
            out.mkdir(parents=True, exist_ok=True)
            write_json(path, wanted)
        except OSError as error:
            raise InvalidArgument(
                f"the folder {out} cannot be created or written ({error.strerror}); name another one with --out"
            ) from None

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.out / CHECKPOINTS

    @property
    def report(self) -> dict[str, Any] | None:
        """The report, if the run is done."""
        path = self.out / REPORT
        return read_json(path) if path.exists() else None

    def checkpoint(self) -> Path | None:
        """The newest whole checkpoint."""
        return last_checkpoint(self.out)

    def drop_incomplete(self) -> None:
        """Remove checkpoints that are incomplete or damaged. Training then resumes from the one before."""
        for path in self.checkpoints.glob("checkpoint-*"):
            if not is_whole(path) or not complete(path).get("files", {}).items() <= digests(path).items():
                shutil.rmtree(path)

    def finish(self, report: Mapping[str, Any]) -> None:
        """Write the report, which marks the run as done."""
        write_json(self.out / REPORT, report)

    def rewind_log(self, step: int) -> None:
        """Remove later steps from the log, because they are run again, and damaged lines."""
        path = self.out / LOG
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        paths.write(self.out, LOG, [line for line in lines if _is_until(step, line)])

    def log(self, values: Mapping[str, Any]) -> None:
        """Add a line to the log."""
        with (self.out / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def last_checkpoint(out: Path) -> Path | None:
    """Return the newest whole checkpoint of the run in ``out``."""
    whole = [path for path in (out / CHECKPOINTS).glob("checkpoint-*") if is_whole(path)]
    return max(whole, key=lambda path: complete(path)["step"], default=None)


def is_whole(checkpoint: Path) -> bool:
    """Return whether a checkpoint has the mark that is written last."""
    try:
        return bool(complete(checkpoint))
    except OSError:  # DamagedError is one
        return False


def complete(checkpoint: Path) -> dict[str, Any]:
    """Return the ``step`` of a whole checkpoint, ``tokens`` and ``seconds`` until then, and digests of its ``files``.

    The last two lack in checkpoints of older versions.
    """
    optional = {"seconds": number(1e12), "files": members(text(100), 10_000)}
    return read_json(checkpoint / COMPLETE, table(optional, step=whole(), tokens=whole()))


def digests(checkpoint: Path) -> dict[str, str]:
    """Return a checksum of each file of a checkpoint."""
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != COMPLETE]
    return {str(path.relative_to(checkpoint)): digest_of_files(path.parent, path.name) for path in files}


def digest_of_files(folder: Path, pattern: str) -> str:
    """Return a checksum of the files of ``folder`` whose names match ``pattern``."""
    state = xxhash.xxh3_64()
    for path in sorted(folder.glob(pattern)):
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                state.update(piece)
    return state.hexdigest()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write all of the file or nothing."""
    paths.write(path.parent, path.name, [json.dumps(value, indent=2).encode() + b"\n"])


def read_json(path: Path, check: Check = _VALUES) -> dict[str, Any]:
    """Return the JSON value in ``path``, which passes ``check``. Raises ``DamagedError`` and ``OSError``."""
    try:
        return _checked(path.read_bytes(), check)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged ({error}): repair it, or name a new folder with --out") from None


def _is_until(step: int, line: bytes) -> bool:
    """Whether ``line`` is a whole line of a log, about ``step`` or an earlier one."""
    try:
        return line.endswith(b"\n") and _checked(line, table(step=whole()))["step"] <= step
    except (ValueError, RecursionError):
        return False


def _checked(raw: bytes, check: Check) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(raw)  # results may be NaN, which json_checks.parse refuses
    check(found, "")
    return found


UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


@contextmanager
def saying_what_is_safe(out: Path) -> Iterator[None]:
    """Raise ``StoreFull`` if the body's data does not fit, and name the checkpoint to resume from."""
    try:
        yield
    except MemstoreError:
        raise
    except (OSError, SafetensorError, RuntimeError) as error:
        if not _is_of_the_disk(error):
            raise
        last = last_checkpoint(out)
        where = (
            f"continues from step {complete(last)['step']:,}" if last else "starts again: there is no checkpoint yet"
        )
        raise StoreFull(
            f"{out} cannot be written ({first_line(error)}). Free some space, and run the same command again; it "
            f"{where}"
        ) from error


def _is_of_the_disk(error: Exception) -> bool:
    """Return whether a write failed. The libraries that write tensors use their own words for it."""
    if isinstance(error, OSError):
        return error.errno in UNWRITABLE
    return any(words in str(error) for words in ("I/O error", "PytorchStreamWriter", "unexpected pos"))


def _different(out: Path, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> DifferentRun:
    old, new = _flat(there), _flat(wanted)
    name, *more = [name for name in old | new if old.get(name) != new.get(name)]
    others = f" (and {len(more)} more)" if more else ""
    what = f"{name} is {old.get(name)!r}, not {new.get(name)!r}"
    what = f"{name} have other words" if name == "texts" else what  # digests say nothing to people
    return DifferentRun(
        f"{out} holds a different run: its {what}{others}. Name a new folder with --out, or repeat the command that "
        "started the run."
    )


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, each in value.items():
        flat |= _flat(each, f"{prefix}{name}.") if isinstance(each, dict) else {prefix + name: each}
    return flat
