"""A bar for people who wait."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerControl, TrainerState


class Bar(TrainerCallback):
    """Steps, and the last loss, on standard error."""

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

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show the bar."""
        self._bar.reset(self._task, total=state.max_steps, completed=state.global_step)
        self._bar.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move it."""
        self._bar.update(self._task, completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Say the loss; off a terminal, in a line of its own."""
        if not logs or "loss" not in logs:
            return
        shown = {"loss": "loss", "answer_loss": "answer", "text_loss": "text", "whole_answers": "whole answers"}
        said = ", ".join(f"{word} {logs[name]:.3f}" for name, word in shown.items() if name in logs)
        self._bar.update(self._task, said=f", {said}")
        if not self._console.is_terminal:
            self._console.print(f"step {state.global_step:,} of {state.max_steps:,}: {said}", soft_wrap=True)

    def stop(self) -> None:
        """Take the bar away."""
        self._bar.stop()
