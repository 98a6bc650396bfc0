"""What a callback may rely on in the module that it watches."""

from collections.abc import Mapping
from typing import Protocol

from mmlab.data.collate import Batch


class Published(Protocol):
    """A task, as callbacks see it: the numbers that it publishes and when."""

    rate: tuple[str, str]
    """Name of the unit of throughput, and the count that it is read from."""

    latest: dict[str, float]
    """Newest value of every published tag."""

    def publish(self, values: Mapping[str, float]) -> None:
        """Writes `values` to every logger at the present optimizer step."""

    def publish_step(self, batch: Batch) -> None:
        """Publishes a whole optimizer step, given its last micro-batch."""

    def is_due(self, step: int) -> bool:
        """Whether optimizer step `step` is one whose numbers are written down."""
