"""Train a model on texts, by a recipe, or on prompts and answers. After an interruption, all three resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from memstore.errors import InvalidArgument
from memstore.eval.needles import prose_text
from memstore.eval.pairs import collate_pairs, encode_pairs, read_pairs
from memstore.readers.kinds import DRT, shipped_model, trainable
from memstore.train.corpora import Documents, collate, cut, digest, encoded, held_out, sources, train_tokenizer
from memstore.train.needles import NeedleRows
from memstore.train.options import Optimisation, Runtime
from memstore.train.recipes import Recipe, find_recipe
from memstore.train.session import Report, Session, session
from memstore.train.trainer import MemoryTrainer, measure_answers, perplexity
from memstore.train.training import Folder, Start, Training, recipes, starting, training_of

DEFAULT_BLOCKS = 32
"""Blocks of a segment, if no context is given."""


def train_on_texts(
    texts: Sequence[Folder],
    out: Folder,
    *,
    config: Any = None,
    family: Training | None = None,
    changes: Mapping[str, Any] | None = None,
    tokenizer: Folder | None = None,
    init: Folder | None = None,
    lora: int | None = None,
    context: int | None = None,
    valid: float = 0.0,
    column: str = "text",
    optimisation: Optimisation | None = None,
    runtime: Runtime | None = None,
) -> Report:
    """Train on text files, folders of them, or dataset folders. Return the report; the model is in ``out``.

    Args:
        texts: see ``Documents``.
        out: a new folder, or the folder of the same run, which is then resumed.
        config: the model's configuration; the preset ``tiny`` if None. A given tokenizer's vocabulary replaces its own.
        family: the kind of ``config`` or ``init``; a DRT if None. A stock Llama-like ``init`` becomes a landmark model.
        changes: options that differ in the configuration of such a model.
        tokenizer: a folder. If None, ``init``'s tokenizer is used, or one is trained on the texts.
        init: a model folder to start from, instead of ``config``.
        lora: train low-rank adapters of this rank in ``init``, and its landmark, instead of all weights. They are
            merged at the end: ``out`` holds a model like any other. For landmark models; needs ``peft``.
        context: tokens of a segment; 32 blocks if None.
        valid: the part of the text that is kept out of training, and whose perplexity is measured at the end.
        column: the column of a dataset.
        optimisation: the settings that decide the result.
        runtime: the settings that do not.
    """
    optimisation, runtime = optimisation or Optimisation(), runtime or Runtime()
    start = starting(config, init, tokenizer, family=family or training_of(DRT), changes=changes, lora=lora)
    context = _context(context, start.config)
    documents = Documents(texts, column=column)
    settings = {
        "kind": "texts",
        "texts": digest(documents),
        "context": context,
        "valid": valid,
        **start.settings(),
        "optimisation": optimisation.to_dict(),
    }
    with session(out, settings, optimisation, runtime) as opened:
        return opened.run.report or _on_texts(opened, start, documents, context, valid)


def train_recipe(
    recipe: str | Recipe,
    out: Folder,
    *,
    init: Folder | None = None,
    texts: Sequence[Folder] = (),
    runtime: Runtime | None = None,
) -> Report:
    """Train by a recipe, from nothing or from the model folder ``init``. Return the report; the model is in ``out``.

    If a DRT has fewer upper layers or groups than the recipe's, it is grown first: new layers begin as copies.
    ``texts``: the texts that hide the needles (see ``Documents``); by default, texts that come with every Python.
    """
    recipe = find_recipe(recipe, recipes()) if isinstance(recipe, str) else recipe
    if init is None and recipe.start is not None:
        init = shipped_model(find_recipe(recipe.start, recipes()).task)
    family = training_of(trainable()[recipe.kind])
    family = family if family.of_recipe is None else family.of_recipe(recipe)
    start = starting(family.config.preset("tiny", **recipe.model), init, grow=family.grow is not None, family=family)
    around = ["\n\n".join(Documents(texts))] if texts else [prose_text(), sources()]
    settings = {"kind": "recipe", "recipe": recipe.to_dict(), "texts": digest(around), **start.settings()}
    with session(out, settings, recipe.optimisation, runtime or Runtime()) as opened:
        return opened.run.report or _by_recipe(opened, start, recipe, around)


def train_on_pairs(
    pairs: Folder,
    out: Folder,
    *,
    init: Folder,
    prompt_field: str = "prompt",
    answer_field: str = "answer",
    optimisation: Optimisation | None = None,
    runtime: Runtime | None = None,
) -> Report:
    """Fine-tune the model folder ``init`` on a JSON Lines file of prompts and answers, of any length.

    The loss is on the answers alone. Prompts are aligned with blocks (see ``align``), as the model needs it in use.
    """
    optimisation, runtime = optimisation or Optimisation(), runtime or Runtime()
    start = starting(None, init, family=training_of(DRT))
    found = read_pairs(Path(pairs), prompt=prompt_field, answer=answer_field)
    settings = {
        "kind": "pairs",
        "pairs": digest(text for pair in found for text in pair),
        **start.settings(),
        "optimisation": optimisation.to_dict(),
    }
    with session(out, settings, optimisation, runtime) as opened:
        return opened.run.report or _on_pairs(opened, start, found)


def _context(context: int | None, config: Any) -> int:
    context = DEFAULT_BLOCKS * config.tokens_per_block if context is None else context
    if context < 2 * config.tokens_per_block:
        raise InvalidArgument(
            f"--context is {context} tokens, but retrieval needs at least two blocks: use at least "
            f"{2 * config.tokens_per_block}"
        )
    return context


def _on_texts(opened: Session, start: Start, documents: Documents, context: int, valid: float) -> Report:
    with opened.state.main_process_first():
        tokenizer = start.tokenizer_of(opened.run, lambda: train_tokenizer(documents, start.config.vocab_size))
    end = start.config.vocab_size - 1 if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)
    rows = cut(encoded(documents, tokenizer), context, end)
    rows, kept = held_out(rows, valid)
    batch = opened.optimisation.batch
    trainer = _trainer(opened, start, tokenizer, opened.drawn(rows), collate, batch)

    def measure() -> Report:
        measured = {"valid_perplexity": round(perplexity(trainer.trained, kept, batch), 4)} if len(kept) else {}
        return {"segments": len(rows), "context": context, **measured}

    return opened.fit(trainer, measure)


def _on_pairs(opened: Session, start: Start, found: list[tuple[str, str]]) -> Report:
    with opened.state.main_process_first():
        tokenizer = start.tokenizer_of(opened.run)
    pairs = encode_pairs(found, tokenizer, start.config.tokens_per_block)
    longest = max(len(pair.prompt) + len(pair.answer) for pair in pairs)
    trainer = _trainer(opened, start, tokenizer, opened.drawn(pairs), collate_pairs, opened.optimisation.batch)
    return opened.fit(trainer, lambda: {"pairs": len(pairs), "longest": longest})


def _trainer(
    opened: Session,
    start: Start,
    tokenizer: PreTrainedTokenizerBase,
    data: Any,
    collate: Any,
    batch: int,
    make: Callable[..., MemoryTrainer] | None = None,
) -> MemoryTrainer:
    """Return the trainer that ``make`` makes, by default that of texts, for ``data`` in batches of ``batch``."""
    return (make or start.family.text_trainer)(
        opened.run,
        start.model(tokenizer, opened.optimisation.seed),
        opened.arguments(start.config, len(data), batch),
        opened.optimisation,
        data=data,
        collate=collate,
        tokenizer=tokenizer,
        fresh=start.init is None,
    )


def _by_recipe(opened: Session, start: Start, recipe: Recipe, texts: list[str]) -> Report:
    with opened.state.main_process_first():
        tokenizer = start.tokenizer_of(opened.run, lambda: train_tokenizer(texts, start.config.vocab_size))
    tokens = list(encoded(texts, tokenizer))
    size, seed = start.config.tokens_per_block, recipe.optimisation.seed
    batches = (recipe.optimisation.steps or 1) * recipe.optimisation.accumulate * opened.state.num_processes
    data = NeedleRows(recipe, tokenizer, tokens, size, batches, seed)
    assert start.family.needle_trainer is not None, f"there is no recipe for a {start.family.kind.name}"
    make = partial(start.family.needle_trainer, recipe)
    trainer = _trainer(opened, start, tokenizer, data, itemgetter(0), 1, make)  # the dataset makes whole batches
    fresh = NeedleRows(recipe.asking_only(recipe.task), tokenizer, tokens, size, recipe.checked, seed + 1)
    return opened.fit(trainer, lambda: _measured(trainer.trained, recipe, fresh, opened))


def _measured(model: Any, recipe: Recipe, fresh: NeedleRows, opened: Session) -> Report:
    """Measure whole answers on rows that training has not seen."""
    return {
        "recipe": recipe.name,
        "task": recipe.task,
        "samples": recipe.checked,
        "accuracy": round(measure_answers(model, fresh, recipe.checked), 4),
        "next_command": recipe.next_command.format(model=opened.run.out),
    }
