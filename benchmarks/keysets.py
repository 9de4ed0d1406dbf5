"""Key sets that vector indexes are measured with: clustered ones, keys of stock models, landmarks of a DRT.

Real queries and keys of attention come from two distributions, so an index that is good on one set may be poor on
another. Each set has queries of two kinds, and none is counted twice: some that an index may learn from, as a memory
would have logged them, and later ones that it is measured with. What takes long to compute is kept in a folder, in
parts, each of which is there whole or not at all; reading more text later goes on after the last part.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.paths import cache_folder

PART = 16_384
"""Keys in one file."""
SEGMENT = 512
"""Tokens that the stock model reads at a time, each segment by itself."""
SEGMENTS = 4
"""Segments side by side in one forward pass."""
QUERY_STEP = 8
"""Of so many tokens in a row, the queries of one are kept."""
SMOLLM2, GEMMA = "SmolLM2-135M", "Gemma 3 270M"
GEMMA_LAYER = 5
"""The first layer of Gemma 3 270M that attends to all tokens; its one key head has 256 numbers."""
DRT_ROWS, DRT_BLOCKS = 16, 64
"""Texts that the DRT reads side by side, each by itself, and blocks in each."""
CLUSTERS = 256


@dataclass(frozen=True, kw_only=True)
class KeySet:
    """Keys of one head, and queries for them."""

    name: str
    keys: Tensor
    """``[N, D]`` float32"""
    logged: Tensor
    """``[M, D]`` float32: queries that an index may learn from; made by tokens among or before those of the keys."""
    queries: Tensor
    """``[T, D]`` float32: later queries, which no index has seen."""
    scale: float
    """What the model multiplies inner products with before its softmax."""
    origin: str
    """How it was made, in a sentence."""


def parsed(parser: argparse.ArgumentParser, table: Callable[[Any], str]) -> argparse.Namespace:
    """The options of a comparison that keeps its rows in a file; ``--table`` prints such a file and ends."""
    parser.add_argument("--folder", type=Path, default=cache_folder() / "keysets", help="where keys of models are kept")
    parser.add_argument("--out", type=Path, help="where all rows are written, as JSON")
    parser.add_argument("--table", type=Path, metavar="ROWS", help="print such a file as a table in Markdown instead")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text("utf-8"))))
        parser.exit()
    return options


def clustered(n: int, dim: int = 64, *, queries: int = 256, seed: int = 0) -> KeySet:
    """Keys around random centres, queries beside random keys: what approximate indexes are usually shown with."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLUSTERS, dim, generator=generator)
    keys = centres[torch.randint(CLUSTERS, (n,), generator=generator)]
    keys = keys + 0.4 * torch.randn(n, dim, generator=generator)
    near = keys[torch.randint(n, (5 * queries,), generator=generator)]
    near = near + 0.4 * torch.randn(near.shape, generator=generator)
    return KeySet(
        name="clustered",
        keys=keys,
        logged=near[queries:],
        queries=near[:queries],
        scale=1.0,
        origin=f"{n} keys around {CLUSTERS} normal centres, noise 0.4; queries beside keys, with the same noise",
    )


def smollm2(folder: Path, n: int, *, layer: int, head: int, queries: int = 256) -> KeySet:
    """Position-free keys of one key head of SmolLM2-135M over the first ``n`` tokens of a text, and its own queries.

    Raises ``InvalidArgument`` where ``collect_smollm2`` has not read enough into ``folder``.
    """
    return _stock(folder, "smollm2", SMOLLM2, n, layer, head, queries)


def gemma(folder: Path, n: int, *, queries: int = 256) -> KeySet:
    """Keys of Gemma 3 270M, after its norm and before positions, over the first ``n`` tokens of a text; its queries.

    Raises ``InvalidArgument`` where ``collect_gemma`` has not read enough into ``folder``.
    """
    return _stock(folder, "gemma", GEMMA, n, GEMMA_LAYER, 0, queries)


def _stock(folder: Path, kind: str, model: str, n: int, layer: int, head: int, queries: int) -> KeySet:
    parts = _enough(folder, kind, n)
    stored = [_load(part, f"k.{layer}") for part in parts[:-1]]  # of [G, t, D]
    asked = [_load(part, f"q.{layer}") for part in parts]  # of [H, t, D]
    group = asked[0].shape[0] // stored[0].shape[0]
    keys = torch.cat([each[head].float() for each in stored])[:n]
    mine = [each[head * group : (head + 1) * group].transpose(0, 1).flatten(0, 1).float() for each in asked]
    return KeySet(
        name=f"{kind} layer {layer} head {head}",
        keys=keys,
        logged=torch.cat(mine[:-1])[: n // QUERY_STEP * group],
        queries=_spread(mine[-1], queries),
        scale=keys.shape[1] ** -0.5,
        origin=f"{model} over {n} tokens of Python's reference and library, in segments of {SEGMENT}; "
        f"learned from the {group} query heads of every {QUERY_STEP}th of them, on the {PART} tokens after them",
    )


def drt(folder: Path, n: int, *, queries: int = 256) -> KeySet:
    """Landmarks of the shipped passkey DRT over ``n`` blocks of text, and the queries of the blocks after them.

    Raises ``InvalidArgument`` where ``collect_drt`` has not read enough into ``folder``.
    """
    parts = _enough(folder, "drt", n)
    asked = [_load(part, "queries").float() for part in parts]
    return KeySet(
        name="drt landmarks",
        keys=torch.cat([_load(part, "keys").float() for part in parts[:-1]])[:n],
        logged=torch.cat(asked[:-1])[: n // QUERY_STEP],
        queries=_spread(asked[-1], queries),
        scale=1.0,
        origin=f"the shipped passkey model over {n} blocks of Python's reference and library, which begin anew where "
        f"they end; learned from every {QUERY_STEP}th of these blocks, measured on the {PART} blocks after them",
    )


def collect_smollm2(
    folder: Path, n: int, *, layers: tuple[int, ...] = (4, 8), advance: Callable[[int], None] | None = None
) -> None:
    """Let SmolLM2-135M read ``n`` tokens, and one part more for queries, into ``folder``; goes on where it was.

    Only the layers up to the last one that is wanted run. A part has ``k.LAYER [3, n, 64]`` and every
    ``QUERY_STEP``-th token's ``q.LAYER [9, n / QUERY_STEP, 64]``, before positions. About 1,000 tokens a second on one
    quiet thread.
    """
    _collect_stock(folder, "smollm2", "smollm2", n, layers, ("k_proj", "q_proj"), advance)


def collect_gemma(folder: Path, n: int, model: str, *, advance: Callable[[int], None] | None = None) -> None:
    """Let Gemma 3 270M, from the GGUF file ``model``, read ``n`` tokens, and one part more, into ``folder``.

    Goes on where it was. A part has ``k.5 [1, n, 256]`` and every ``QUERY_STEP``-th token's
    ``q.5 [4, n / QUERY_STEP, 256]``, after their norms and before positions.
    """
    _collect_stock(folder, "gemma", model, n, (GEMMA_LAYER,), ("k_norm", "q_norm"), advance)


def _collect_stock(
    folder: Path,
    kind: str,
    name: str,
    n: int,
    layers: tuple[int, ...],
    modules: tuple[str, str],
    advance: Callable[[int], None] | None,
) -> None:
    """Let the model that ``load_model`` knows as ``name`` read; ``modules`` of its attention give keys and queries."""
    from memstore.eval.filler import load_filler
    from memstore.tools.models import load_model

    done, wanted = len(_parts(folder, kind)), -(-n // PART) + 1
    if done >= wanted:
        return
    folder.mkdir(parents=True, exist_ok=True)
    loaded = load_model(name)
    filler = load_filler(loaded.tokenizer, at_most=wanted * PART)
    decoder: Any = loaded.model.base_model
    decoder.layers = decoder.layers[: max(layers) + 1]
    decoder.layers[-1].mlp = torch.nn.Identity()  # nothing that is kept comes after the last layer's queries
    for number in range(done, wanted):
        ids = torch.from_numpy(filler.take(number * PART, PART))
        _save(_path(folder, kind, number), _read_stock(decoder, ids, layers, modules))
        if advance:
            advance(PART)


def collect_drt(folder: Path, n: int, *, advance: Callable[[int], None] | None = None) -> None:
    """Let the shipped passkey DRT read ``n`` blocks, and one part more for queries, into ``folder``.

    Goes on where it was. A part has ``keys [n, 64]``, and ``queries [n / QUERY_STEP, 64]`` of every ``QUERY_STEP``-th
    block.
    """
    from memstore.eval.filler import load_filler
    from memstore.readers.kinds import PASSKEY, load_folder, shipped_model

    done, wanted = len(_parts(folder, "drt")), -(-n // PART) + 1
    if done >= wanted:
        return
    folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_folder(shipped_model(PASSKEY))
    tokens = model.config.tokens_per_block * PART
    filler = load_filler(tokenizer, at_most=wanted * tokens)
    for number in range(done, wanted):
        _save(_path(folder, "drt", number), _read_drt(model, torch.from_numpy(filler.take(number * tokens, tokens))))
        if advance:
            advance(PART)


def _read_stock(decoder: Any, ids: Tensor, layers: tuple[int, ...], modules: tuple[str, str]) -> dict[str, Tensor]:
    caught: dict[str, list[Tensor]] = {}
    with ExitStack() as stack, torch.inference_mode():
        for layer in layers:
            attention = decoder.layers[layer].self_attn
            for name, module in zip("kq", modules, strict=True):
                hook = _catch(caught, f"{name}.{layer}", attention.head_dim)
                stack.callback(getattr(attention, module).register_forward_hook(hook).remove)
        for batch in ids.view(-1, SEGMENTS, SEGMENT):
            decoder(batch.long(), use_cache=False)
    states = {name: torch.cat(parts, 1) for name, parts in caught.items()}  # [heads, n, D]
    return {
        name: (rows if name.startswith("k") else rows[:, QUERY_STEP - 1 :: QUERY_STEP]).to(torch.bfloat16)
        for name, rows in states.items()
    }


def _catch(caught: dict[str, list[Tensor]], name: str, head_dim: int) -> Callable[..., None]:
    """A hook after a module that keeps what comes out, as ``[heads, t, D]``."""

    def hook(_module: Any, _inputs: Any, output: Tensor) -> None:
        by_head = output if output.dim() == 4 else output.unflatten(2, (-1, head_dim)).transpose(1, 2)  # [B, H, T, D]
        caught.setdefault(name, []).append(by_head.transpose(0, 1).flatten(1, 2))

    return hook


def _read_drt(model: Any, ids: Tensor) -> dict[str, Tensor]:
    from memstore.models.drt.retrieval import DRTPacking

    config, inner = model.config, model.model
    keys, queries = [], []
    with torch.inference_mode():
        for batch in ids.view(-1, DRT_ROWS, DRT_BLOCKS * config.tokens_per_block):
            packing = DRTPacking(
                batch, None, [0] * DRT_ROWS, config.block_size, landmark_uses_own=config.landmark_uses_own
            )
            x = inner.embed(packing.ids)
            x, _ = inner.read(x, inner.sight(packing, None, x), None)
            _, landmarks = inner.encode(packing.joined(None, x)[0])
            keys.append(landmarks.flatten(0, 1))
            queries.append(
                inner.retrievers[0].queries(packing.landmarks(x)).flatten(0, 1)[QUERY_STEP - 1 :: QUERY_STEP]
            )
    return {"keys": torch.cat(keys).half(), "queries": torch.cat(queries)}


def _spread(rows: Tensor, count: int) -> Tensor:
    """``count`` of the rows, from all over them."""
    return rows[torch.linspace(0, len(rows) - 1, min(count, len(rows))).long()]


def _path(folder: Path, kind: str, number: int) -> Path:
    return folder / f"{kind}-{number:04}.safetensors"


def _parts(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.glob(f"{kind}-*.safetensors"))


def _enough(folder: Path, kind: str, n: int) -> list[Path]:
    parts, wanted = _parts(folder, kind), -(-n // PART) + 1
    if len(parts) < wanted:
        raise InvalidArgument(
            f"{folder} has {len(parts)} parts of {PART} keys of {kind}; {n} keys and later queries need {wanted}: "
            f"collect more with collect_{kind}()"
        )
    return parts[:wanted]


def _load(path: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write beside ``path``, then put in place: a part is there whole or not at all."""
    from safetensors.torch import save_file

    partial = path.with_suffix(".partial")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
    partial.replace(path)
