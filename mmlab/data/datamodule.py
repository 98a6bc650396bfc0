"""The one LightningDataModule: sources through a task's examples to loaders of whole optimizer steps."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule

from mmlab.data.collate import Examples
from mmlab.data.config import DataConfig, accumulation
from mmlab.data.files import combined_sha256
from mmlab.data.loader import AllReduce, BadSamples, Execution, TrainLoader, ValidationLoader
from mmlab.data.mixing import MixtureOrder
from mmlab.data.order import Order
from mmlab.data.packing import Planner
from mmlab.data.sources.base import Source, SourceConfig
from mmlab.data.sources.mixture import Mixture

__all__ = ["DataModule", "accumulation"]

log = logging.getLogger("mmlab")


class DataModule(LightningDataModule):
    """Feeds a trainer, or a loop of one's own: `loader()` and `validation_loader()` need no trainer.

    Args:
        config: what is read and how it is cut into steps.
        examples: how raw samples become arrays; the task's.
        seed: decides the order and all random transforms.
        total_steps: optimizer steps of the whole run.
        cache: folder for tokens, indices and hashes.
    """

    def __init__(
        self, config: DataConfig, examples: Examples, seed: int, total_steps: int, cache: Path
    ) -> None:
        super().__init__()
        self.config, self.examples, self.seed, self.total_steps = config, examples, seed, total_steps
        self.cache = Path(cache)
        self._raw: dict[str, Source] = {}
        self._ready: dict[str, Source] = {}

    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything that is read: the sources' content and what examples are made of."""
        names = [name for name in ("train", "validation") if getattr(self.config, name) is not None]
        parts = [part for name in names for part in (name, self._source(name).fingerprint())]
        return combined_sha256(self.examples.fingerprint(), *parts)

    @property
    def train(self) -> Source:
        """What is trained on, prepared."""
        return self._prepared("train")

    @property
    def validation(self) -> Source | None:
        """What is validated on, prepared; None without one."""
        return self._prepared("validation") if self.config.validation is not None else None

    def prepare_data(self) -> None:
        """Builds the caches; Lightning calls this in one process of a machine, before the others."""
        self.setup("fit")

    def setup(self, stage: str) -> None:
        """Opens the sources and checks what their preparation left out."""
        if stage in ("fit", "train"):
            _ = self.train
        _ = self.validation

    def loader(
        self, ranks: int = 1, rank: int = 0, all_reduce: AllReduce = dict, pin_memory: bool = False
    ) -> TrainLoader:
        """Training micro-batches of one rank; by default of a single process."""
        config, source = self.config, self.train
        planner = Planner(
            self._order(source),
            config.batching,
            config.batch_size,
            config.max_length,
            config.window,
            source.lengths,
        )
        execution = self._execution(ranks, rank, all_reduce, pin_memory, accumulation(config, ranks))
        return TrainLoader(source, self.examples, planner, self.total_steps, execution, config.bad_samples)

    def validation_loader(
        self, ranks: int = 1, rank: int = 0, all_reduce: AllReduce = dict, pin_memory: bool = False
    ) -> ValidationLoader:
        """Validation micro-batches of one rank; by default of a single process."""
        config, source = self.config, self.validation
        if source is None:
            raise ValueError("data.validation is null: there is nothing to validate on")
        micro = config.validation_micro_batch_size or config.micro_batch_size
        micro = micro or max(config.batch_size // ranks, 1)
        return ValidationLoader(
            source,
            self.examples,
            rows=max(micro // config.max_length, 1) if config.unit == "tokens" else micro,
            seed=self.seed,
            samples=config.validation_samples,
            sort_within=0 if config.batching == "padded" else config.window,
            execution=self._execution(ranks, rank, all_reduce, pin_memory),
            bad_samples=config.bad_samples,
        )

    def train_dataloader(self) -> TrainLoader:
        """The training loader of this process, whose state Lightning saves in every checkpoint."""
        return self.loader(**self._layout())

    def val_dataloader(self) -> ValidationLoader | list[Any]:
        """The validation loader of this process."""
        return self.validation_loader(**self._layout()) if self.config.validation is not None else []

    def _source(self, name: str) -> Source:
        if name not in self._raw:
            config: SourceConfig = getattr(self.config, name)
            self._raw[name] = config.build(self.cache)
        return self._raw[name]

    def _prepared(self, name: str) -> Source:
        if name not in self._ready:
            raw = self._source(name)
            if isinstance(raw, Mixture):
                self._ready[name] = raw.prepared(lambda part, source: self._prepare(f"{name}.{part}", source))
            else:
                self._ready[name] = self._prepare(name, raw)
        return self._ready[name]

    def _prepare(self, where: str, raw: Source) -> Source:
        """`raw` as it is read; the limit of bad samples holds for each source of a mixture by itself."""
        source = self.examples.prepare(raw, self.cache)
        bad = list(source.bad)
        BadSamples(where, self.config.bad_samples).add(bad, len(bad), len(raw))
        return source

    def _order(self, source: Source) -> Order | MixtureOrder:
        config = self.config
        if not isinstance(source, Mixture):
            return Order(len(source), self.seed, config.shuffle, config.shuffle_block)
        shares = source.shares()
        for name, part, share in zip(source.components, source.components.values(), shares, strict=True):
            log.info("mixture: %s gives %.4g %% of the samples drawn, of %d", name, 100 * share, len(part))
        return MixtureOrder(source.sizes, shares, self.seed, config.shuffle, config.shuffle_block)

    def _execution(
        self, ranks: int, rank: int, all_reduce: AllReduce, pin_memory: bool, micro_batches: int = 1
    ) -> Execution:
        config = self.config
        return Execution(
            ranks, rank, micro_batches, config.num_workers, config.prefetch, pin_memory, all_reduce
        )

    def _layout(self) -> dict[str, Any]:
        """This process's place among those that read different data."""
        if self.trainer is None:
            return {}
        strategy = self.trainer.strategy
        place = getattr(strategy, "distributed_sampler_kwargs", None) or {
            "num_replicas": self.trainer.world_size,
            "rank": self.trainer.global_rank,
        }
        device = strategy.root_device
        layout = {"ranks": place["num_replicas"], "rank": place["rank"], "pin_memory": device.type == "cuda"}
        if layout["ranks"] > 1:
            mesh = getattr(strategy, "device_mesh", None)
            group = mesh["data_parallel"].get_group() if mesh is not None else None
            layout["all_reduce"] = partial(_all_reduce, device=device, group=group)
        return layout


def _all_reduce(
    values: dict[str, float], device: torch.device, group: dist.ProcessGroup | None
) -> dict[str, float]:
    packed = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    dist.all_reduce(packed, group=group)
    return dict(zip(values, packed.tolist(), strict=True))
