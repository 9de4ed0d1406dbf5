"""Flip a bit in an object of a bucket, cut it, exchange it, delete it: who reads elsewhere hears of it, or need not.

The objects are shards, pieces of the published tail, and the manifest that names those.
"""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path

from benchmarks.torture.processes import Say, run
from memstore.store.zarr.objects import from_url
from tests.faults.bit_flips import make
from tests.faults.damage import read_damaged, report
from tests.faults.outcome import Outcome
from tests.faults.world import SIZES, STORES, World, moved

KINDS = ("a bit", "cut", "exchanged", "gone")


def damage_objects(folder: Path, store: str, rounds: int, seed: int) -> Outcome:
    """Damage ``rounds`` objects, one at a time."""
    rng, outcome, world = random.Random(seed), Outcome(), World(seed, SIZES["large"])
    url = STORES[store](folder / "m")
    state = make(world, url)
    place, copies = url.removeprefix("zarr+").partition("?")[0], folder / "copies"
    saved = run(partial(_save, place, copies))
    assert saved.code == 0, saved.lines
    objects = [each for each in sorted(copies.rglob("*")) if each.is_file() and each.name != "zarr.json"]
    for number in range(rounds):
        # As often what is read at opening as any of the many shards.
        some = [each for each in objects if ("blocks" in each.parts) == bool(number % 3)]
        chosen, kind = rng.choice(some), KINDS[number % len(KINDS)]
        whole, damaged = chosen.read_bytes(), bytearray(chosen.read_bytes())
        match kind:
            case "a bit":
                damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
            case "cut":
                del damaged[rng.randrange(len(whole)) :]
            case "exchanged":
                damaged[:] = rng.choice([each for each in some if each != chosen] or objects).read_bytes()
        name = str(chosen.relative_to(copies))
        elsewhere = folder / f"elsewhere-{number}"
        done = run(partial(_put, place, name, None if kind == "gone" else bytes(damaged)))
        assert done.code == 0, done.lines  # or what is read is not damaged at all
        found = read_damaged(world, moved(url, elsewhere), state)
        done = run(partial(_put, place, name, whole))
        assert done.code == 0, done.lines
        shutil.rmtree(elsewhere, ignore_errors=True)
        outcome.counts["damaged"] += 1
        outcome.counts[f"{kind}: {found}"] += 1
        report(outcome, found, f"{kind}, {name} (seed {seed})")
    return outcome


def _save(place: str, copies: Path, _: Say) -> None:
    """A copy of every object, in a folder."""
    objects = from_url(place)
    for name in [*objects.names("blocks"), *objects.names("tail"), "manifest.json"]:
        stored = objects.get(name)
        assert stored is not None, name
        (copies / name).parent.mkdir(parents=True, exist_ok=True)
        (copies / name).write_bytes(stored.content)


def _put(place: str, name: str, content: bytes | None, _: Say) -> None:
    objects = from_url(place)
    objects.delete(name) if content is None else objects.put(name, [content], durable=False)
