"""Learning-rate schedules as closed formulas in optimizer steps.

The rate of step n depends on n and on the configuration alone, so a resumed run needs no scheduler state
and accumulation cannot change it.
"""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ScheduleConfig:
    """How many optimizer steps a run takes and how the learning rate moves over them.

    The rate rises linearly over `warmup_steps` (step n has n / warmup_steps of the peak), then follows
    `shape` and reaches `final` (a fraction of the peak) at the last step. `trapezoid` holds the peak and
    falls linearly over the last `cooldown_steps` (Hägele et al. 2024, arXiv:2405.18392).
    """

    steps: int
    warmup_steps: int = 0
    shape: Literal["constant", "cosine", "linear", "trapezoid"] = "cosine"
    cooldown_steps: int | None = None
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if not 0 <= self.warmup_steps <= self.steps:
            raise ValueError(f"warmup_steps must lie in 0..steps ({self.steps}), got {self.warmup_steps}")
        if not 0.0 <= self.final <= 1.0:
            raise ValueError(f"final is a fraction of the peak in 0..1, got {self.final}")
        if (self.shape == "trapezoid") != (self.cooldown_steps is not None):
            raise ValueError(
                f"cooldown_steps belongs to shape 'trapezoid': got shape {self.shape!r} and "
                f"cooldown_steps {self.cooldown_steps}"
            )
        room = self.steps - self.warmup_steps
        if self.cooldown_steps is not None and not 1 <= self.cooldown_steps <= room:
            raise ValueError(
                f"cooldown_steps must lie in 1..steps - warmup_steps ({room}), got {self.cooldown_steps}"
            )

    def factor(self, step: int) -> float:
        """Fraction of the peak learning rate that optimizer step `step` (1-based) uses."""
        if step < self.warmup_steps:
            return step / self.warmup_steps
        span = self.steps - self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / span) if span else 1.0
        if self.shape == "constant" or not span:
            return 1.0
        if self.shape == "cosine":
            return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))
        if self.shape == "linear":
            return 1 - (1 - self.final) * done
        assert self.cooldown_steps is not None
        left = max(0, self.steps - step)
        return self.final + (1 - self.final) * min(1.0, left / self.cooldown_steps)
