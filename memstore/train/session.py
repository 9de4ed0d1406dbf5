"""One run from its folder to its report, in one process or several, with a progress bar."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerState

from memstore.readers.kinds import quiet_transformers
from memstore.train.corpora import ShuffledItems
from memstore.train.options import Optimisation, Runtime
from memstore.train.run import REPORT, Run, complete, saying_what_is_safe
from memstore.train.trainer import MemoryTrainer
from memstore.train.training import Folder

Report = dict[str, Any]


@dataclass(frozen=True)
class Session:
    """A run and the processes that carry it out."""

    run: Run
    state: PartialState
    """The processes that take part."""
    optimisation: Optimisation
    runtime: Runtime

    def drawn(self, items: Any) -> ShuffledItems:
        """Return as many of ``items``, shuffled, as training will see in all processes."""
        wanted = self.optimisation
        batch = wanted.batch * wanted.accumulate * self.state.num_processes
        steps = wanted.steps or math.ceil(wanted.epochs * len(items) / batch)
        return ShuffledItems(items, steps * batch, wanted.seed)

    def arguments(self, config: Any, items: int, batch: int) -> TrainingArguments:
        """Return the Trainer's arguments for ``items`` in batches of ``batch``; see also ``MemoryTrainer``."""
        wanted, processes = self.optimisation, self.state.num_processes
        cpu = self.runtime.device == "cpu" or not torch.cuda.is_available()
        made = TrainingArguments(
            output_dir=str(self.run.checkpoints),
            max_steps=items // (batch * wanted.accumulate * processes),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=wanted.accumulate,
            learning_rate=wanted.learning_rate,
            weight_decay=wanted.weight_decay,
            adam_beta1=wanted.betas[0],
            adam_beta2=wanted.betas[1],
            max_grad_norm=wanted.clip,
            optim="adamw_torch",
            seed=wanted.seed,
            bf16=wanted.bf16,
            save_steps=self.runtime.save_every,
            save_total_limit=2,
            logging_steps=self.runtime.log_every,
            logging_nan_inf_filter=False,
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            dataloader_num_workers=0,
            dataloader_pin_memory=not cpu,
            use_cpu=cpu,
            ddp_backend="gloo" if cpu and processes > 1 else None,
            ddp_find_unused_parameters=getattr(config, "leaves_parameters_unused", False),
            disable_tqdm=True,
            report_to="none",
        )
        # One process with several GPUs would use DataParallel, which ignores banks. torchrun starts one per GPU.
        made._n_gpu = min(made.n_gpu, 1)
        return made

    def fit(self, trainer: MemoryTrainer, measure: Callable[[], Report]) -> Report:
        """Train, write the model, measure it, and write the report."""
        last = self.run.checkpoint()
        resumed = 0 if last is None else complete(last)["step"]
        if self.runtime.gradient_checkpointing:
            _keep_few_activations(trainer.trained)
        begun = time.perf_counter()
        self._train(trainer, last)
        seconds = time.perf_counter() - begun
        trainer.check_weights()
        trainer.finish()
        if self.state.is_main_process:
            trainer.trained.config.use_cache = True  # the Trainer has turned it off
            trainer.trained.save_pretrained(self.run.out)
            self.run.finish({**_figures(trainer, resumed, seconds), **measure()})
        self.state.wait_for_everyone()
        assert self.run.report is not None, f"{REPORT} has just been written"
        return self.run.report

    def _train(self, trainer: MemoryTrainer, last: Path | None) -> None:
        bar = None
        if self.runtime.progress and self.state.is_main_process:
            bar = _Bar()
            trainer.add_callback(bar)
        try:
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
        finally:
            if bar is not None:
                bar.stop()


@contextmanager
def session(
    out: Folder, settings: Mapping[str, Any], optimisation: Optimisation, runtime: Runtime
) -> Iterator[Session]:
    """Begin or resume the run in the folder ``out``; transformers is silent meanwhile.

    Raises ``StoreFull`` if the folder cannot be written any more, and the errors of ``Run``.
    """
    state = PartialState(cpu=runtime.device == "cpu")
    with state.main_process_first():
        run = Run(Path(out).expanduser(), {**settings, "processes": state.num_processes})
        if state.is_main_process and run.report is None:
            run.drop_incomplete()
    with quiet_transformers(), saying_what_is_safe(run.out):
        yield Session(run, state, optimisation, runtime)


def _figures(trainer: MemoryTrainer, resumed: int, seconds: float) -> Report:
    return {
        "model": str(trainer.run.out),
        "parameters": sum(parameter.numel() for parameter in trainer.trained.parameters()),
        "steps": trainer.state.global_step,
        "resumed_from_step": resumed,
        "tokens": trainer.tokens_before + trainer.tokens,
        "seconds": round(trainer.seconds_before + seconds, 2),
        "tokens_per_second": round(trainer.tokens / seconds, 1),
        "loss": round(next(each["loss"] for each in reversed(trainer.state.log_history) if "loss" in each), 6),
    }


def _keep_few_activations(model: Any) -> None:
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # the name in newer transformers
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(options)


class _Bar(TrainerCallback):
    """A bar of steps, with the last loss, on standard error."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("training"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("step {task.completed:,.0f} of {task.total:,.0f}{task.fields[said]}"),
            TimeRemainingColumn(),
        )
        self._console = Console(stderr=True)
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("", total=None, said="")

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._bar.reset(self._task, total=state.max_steps, completed=state.global_step)
        self._bar.start()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._bar.update(self._task, completed=state.global_step)

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Show the loss; without a terminal, in a line of its own."""
        if not logs or "loss" not in logs:
            return
        shown = {"loss": "loss", "answer_loss": "answer", "text_loss": "text", "whole_answers": "whole answers"}
        said = ", ".join(f"{word} {logs[name]:.3f}" for name, word in shown.items() if name in logs)
        self._bar.update(self._task, said=f", {said}")
        if not self._console.is_terminal:
            self._console.print(f"step {state.global_step:,} of {state.max_steps:,}: {said}", soft_wrap=True)

    def stop(self) -> None:
        self._bar.stop()
