"""What a fault harness hands back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """Counts of one harness on one store, and every promise that was broken."""

    counts: Counter[str] = field(default_factory=Counter)
    losses: list[str] = field(default_factory=list)
    """Committed and not there, or there and not committed."""
    wrong: list[str] = field(default_factory=list)
    """Answers that were not what was committed."""
    crashes: list[str] = field(default_factory=list)
    """Ended by a signal that nobody sent, never ended, or ended by an error that is not one of ours."""

    @property
    def failures(self) -> list[str]:
        """All of them."""
        return self.losses + self.wrong + self.crashes
