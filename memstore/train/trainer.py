"""The Trainer of transformers, with this package's schedule, and errors for losses that are not finite."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerControl, TrainerState

from memstore.errors import DamagedError, MemstoreError, TrainingDiverged, first_line
from memstore.train.needles import NeedleRows
from memstore.train.options import Optimisation
from memstore.train.recipes import Recipe
from memstore.train.run import COMPLETE, Run, complete, digests, write_json


def rate(step: int, steps: int, optimisation: Optimisation) -> float:
    """Return the learning rate of a step as a part of the highest: linear warm-up on a cosine from 1 to ``final_rate``.

    After ``restart`` the schedule starts again, from ``restart_rate`` of the highest.
    """
    again = None if optimisation.restart is None else round(optimisation.restart * steps)
    height = 1.0
    if again is not None:
        first = step < again
        step, steps, height = (step, again, 1.0) if first else (step - again, steps - again, optimisation.restart_rate)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / max(1, steps))))
    warm = min(1.0, (step + 1) / max(1, min(optimisation.warmup, steps // 10)))
    return height * warm * (optimisation.final_rate + (1 - optimisation.final_rate) * cosine)


class MemoryTrainer(Trainer):
    """A trainer on batches with ``labels``."""

    def __init__(
        self,
        run: Run,
        model: Any,
        args: TrainingArguments,
        optimisation: Optimisation,
        *,
        data: Any,
        collate: Callable[[list[Any]], dict[str, Tensor]],
        tokenizer: PreTrainedTokenizerBase,
        fresh: bool = True,
    ) -> None:
        super().__init__(model=model, args=args, train_dataset=data, data_collator=collate, processing_class=tokenizer)
        self.run = run
        self.trained = model
        self.optimisation = optimisation
        self.fresh = fresh
        """Whether the model began with random weights."""
        self.losses: Tensor | None = None
        """The sum of the losses since the last check."""
        self.tokens = 0
        """Tokens trained on since this process began."""
        self.tokens_before, self.seconds_before = 0, 0.0
        """Of the training before the checkpoint that this process began with."""
        self.parts: dict[str, list[Tensor]] = {}
        """Values for the next line of the log, besides the loss."""
        # This callback prints to standard output, which is only for reports.
        self.callback_handler.callbacks = [
            each for each in self.callback_handler.callbacks if type(each).__name__ != "PrinterCallback"
        ]
        self.add_callback(_CheckpointCallback(self))

    @property
    def progress(self) -> float:
        """Return the part of the training that is done, from 0 to 1."""
        return self.state.global_step / self.state.max_steps

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LRScheduler:
        """Create the schedule; see ``rate``."""
        if self.lr_scheduler is None:
            chosen: Any = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = LambdaLR(chosen, lambda step: rate(step, num_training_steps, self.optimisation))
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of all matrices."""
        return [name for name, parameter in model.named_parameters() if parameter.dim() > 1]

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run one batch forward and backward. Raises ``TrainingDiverged`` for a loss that is not finite."""
        self.tokens += inputs["input_ids"].numel() * self.args.world_size
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        self.losses = loss.detach() + (0 if self.losses is None else self.losses)
        if loss.device.type == "cpu":
            self.check_loss()
        return loss

    # On a GPU, a check of every loss would wait for every step.
    def check_loss(self) -> None:
        """Raise ``TrainingDiverged`` if a loss since the last check was not finite: their sum shows it."""
        losses, self.losses = self.losses, None
        if losses is not None and not bool(torch.isfinite(losses)):
            raise self.diverged(f"the loss is {losses.item()} at step {self.state.global_step + 1}")

    def diverged(self, what: str) -> TrainingDiverged:
        """Return the error that ends a training whose numbers are not finite."""
        last = self.run.checkpoint()
        kept = f"The last good checkpoint is {last}" if last else "There is no checkpoint yet"
        whole = last is not None and (last / "config.json").exists()  # otherwise it holds adapters, and no model
        on = f"start again from it with --init {last}," if whole else "start again with"
        return TrainingDiverged(f"{what}; training stopped. {kept}: {on} a new --out and a smaller --learning-rate.")

    def check_weights(self) -> None:
        """Raise ``TrainingDiverged`` if a weight is not finite."""
        for name, parameter in self.trained.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                raise self.diverged(f"{name} is not finite after step {self.state.global_step}")

    def keep(self, checkpoint: Path) -> None:
        """Write the state to ``checkpoint`` that training needs besides weights and optimizer; here nothing."""

    def resume(self, checkpoint: Path) -> None:
        """Read the state that ``keep`` wrote."""

    def finish(self) -> None:
        """Undo what only training needs, before the model is saved and measured; here nothing."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the means of ``parts`` to the log."""
        self.check_loss()
        means = {name: float(torch.stack(values).mean()) for name, values in self.parts.items()}
        self.parts.clear()
        super().log({**logs, **means}, start_time)


class AnswerTrainer(MemoryTrainer):
    """A trainer on the batches of ``NeedleRows``: the answer's loss, and some language modelling."""

    def __init__(self, recipe: Recipe, run: Run, model: Any, *rest: Any, **options: Any) -> None:
        super().__init__(run, model, *rest, **options)
        self.recipe = recipe

    @property
    def progress(self) -> float:
        """Return the part that is done of the training before the recipe's end."""
        return self.recipe.before_closing(super().progress)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Compute the losses of answer and text, weighted by the recipe."""
        assert not return_outputs
        logits = self.logits_of(model, inputs)[:, :-1]
        asked, targets = inputs["answer"][:, 1:], inputs["input_ids"][:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view_as(targets)
        answer, text = losses[asked].mean(), losses[~asked].mean()
        found = first_right(logits, targets, asked)
        self._note("answer_loss", answer)
        self._note("text_loss", text)
        self._note("whole_answers", whole_answers(logits, targets, asked).float().mean())
        self._note("found", torch.tensor(found))
        self.learned(answer.detach(), found)
        return self.recipe.answer_weight * answer + self.recipe.text_weight * text

    def logits_of(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Return the logits of a batch, ``[B, T, vocab]``."""
        logits: Tensor = model(input_ids=inputs["input_ids"], use_cache=False).logits
        return logits

    def learned(self, answer: Tensor, found: float) -> None:
        """Receive the loss of the answers, and the part of the needles that was found; nothing depends on it here."""

    def _note(self, name: str, value: Tensor) -> None:
        self.parts.setdefault(name, []).append(value.detach())


def whole_answers(logits: Tensor, targets: Tensor, asked: Tensor) -> Tensor:
    """Return ``[B]``: whether greedy generation would write a row's answer, as each of its tokens is the likeliest."""
    right = logits[asked].argmax(-1) == targets[asked]
    wrong: Tensor = torch.zeros_like(asked).masked_scatter(asked, ~right)
    return ~wrong.any(1)


def first_right(logits: Tensor, targets: Tensor, asked: Tensor) -> float:
    """Return the part of the rows whose first answer token is the likeliest: it shows whether a needle was found."""
    first = asked & (asked.cumsum(1) == 1)
    return float((logits[first].argmax(-1) == targets[first]).float().mean())


@torch.no_grad()
def measure_answers(model: Any, rows: NeedleRows, count: int) -> float:
    """Return the part of ``count`` rows for which ``model`` gives the whole answer."""
    model.train(False)
    right, seen, number = 0, 0, 0
    while seen < count:
        batch = {name: value.to(model.device) for name, value in rows[number].items()}
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
        right += int(whole_answers(logits, batch["input_ids"][:, 1:], batch["answer"][:, 1:]).sum())
        seen += len(logits)
        number += 1
    return right / seen


@torch.no_grad()
def perplexity(model: Any, segments: Any, batch: int) -> float:
    """Return the perplexity of ``segments [N, T]`` (an array of token ids), without the first token of each."""
    model.train(False)
    total = 0.0
    for start in range(0, len(segments), batch):
        ids = torch.from_numpy(segments[start : start + batch]).long().to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        total += float(F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum"))
    return math.exp(total / segments[:, 1:].size)


class _CheckpointCallback(TrainerCallback):
    """A callback that marks whole checkpoints, lets the trainer add its state to them, and writes the log."""

    def __init__(self, trainer: MemoryTrainer) -> None:
        self._trainer = trainer
        self._begun = time.perf_counter()

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Resume at the last checkpoint."""
        self._begun = time.perf_counter()
        last = self._trainer.run.checkpoint()
        if last is not None:
            until = {"seconds": 0.0, **complete(last)}
            self._trainer.tokens_before, self._trainer.seconds_before = until["tokens"], until["seconds"]
            try:
                self._trainer.resume(last)
            except MemstoreError:
                raise
            except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
                raise DamagedError(
                    f"{last} is damaged ({first_line(error)}): remove it, and the run resumes from the one before"
                ) from error
        if state.is_world_process_zero:
            self._trainer.run.rewind_log(state.global_step)

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Add the trainer's own state, and last the mark that the checkpoint is whole."""
        self._trainer.check_loss()
        self._trainer.check_weights()
        folder = self._trainer.run.checkpoints / f"checkpoint-{state.global_step}"
        self._trainer.keep(folder)
        self._trainer.accelerator.wait_for_everyone()
        if state.is_world_process_zero:
            tokens = self._trainer.tokens_before + self._trainer.tokens
            seconds = round(self._trainer.seconds_before + time.perf_counter() - self._begun, 2)
            mark = {"step": state.global_step, "tokens": tokens, "seconds": seconds, "files": digests(folder)}
            write_json(folder / COMPLETE, mark)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log the last step too, whatever its number."""
        control.should_log |= state.global_step == state.max_steps

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and logs and "loss" in logs:
            speed = round(self._trainer.tokens / (time.perf_counter() - self._begun))
            rounded = {name: round(value, 6) for name, value in logs.items() if name != "epoch"}
            self._trainer.run.log({"step": state.global_step, **rounded, "tokens_per_second": speed})
