"""One training run, from its folder: `python -m mmlab.train RUN_FOLDER`.

The folder holds `config.yaml`, the whole resolved configuration; every rank of a run, a job of a sweep and a
resumed run start from that file. If the folder has checkpoints, training goes on from the newest.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import warnings
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmlab.runconfig import RunConfig, flat, load_config

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import Logger

    from mmlab.data.datamodule import DataModule
    from mmlab.tasks.base import Task

CHECKPOINTS = "checkpoints"

log = logging.getLogger("mmlab")


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains the run in the folder that is named on the command line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if len(words) != 1:
        raise SystemExit("usage: python -m mmlab.train RUN_FOLDER")
    run(Path(words[0]))


def run(folder: Path) -> dict[str, float]:
    """Trains the run in `folder` to its last step and returns its newest metrics, by tag."""
    import torch
    from lightning.pytorch.utilities import rank_zero_only

    from mmlab import records

    config = load_config(folder)
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\.pytorch\.utilities\._pytree")  # its own deprecation
    start = newest_checkpoint(folder)
    if start is not None and _step(start) >= config.schedule.steps:
        return _already_finished(folder, config, start)
    task, data = build_task(config, load_weights=start is None), build_data(config)
    first = getattr(rank_zero_only, "rank", 0) == 0
    if first:  # before anything of an earlier process is touched: it refuses other data and another identity
        records.start_segment(folder, config, data.fingerprint(), from_step=_step(start))
    try:
        trainer = build_trainer(config, folder, after_step=_step(start))
        trainer.fit(task, datamodule=data, ckpt_path=start, weights_only=True)
    except BaseException as error:
        interrupted = isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt)
        if first:
            reason = "interrupted from the keyboard" if interrupted else f"{type(error).__name__}: {error}"
            records.finish(folder, "interrupted" if interrupted else "failed", task.latest, reason=reason)
        if interrupted:
            raise KeyboardInterrupt from error
        raise
    if first:
        records.finish(folder, "finished", task.latest)
        _report(folder, config, task.latest)
    return task.latest


def _already_finished(folder: Path, config: RunConfig, last: Path) -> dict[str, float]:
    """Metrics of a run whose last checkpoint exists; completes what a process killed after it left undone."""
    import torch

    from mmlab import records
    from mmlab.callbacks.checkpoint import tidy

    log.warning("%s is finished: step %d of %d", folder, _step(last), config.schedule.steps)
    manifest = records.read_manifest(folder)
    if manifest is not None and manifest["status"] == "finished":
        return dict(manifest["metrics"])
    state = torch.load(last, weights_only=True, mmap=True)["callbacks"]["Checkpoints"]
    tidy(last.parent, state["best"], config.trainer.keep_last)
    if manifest is not None:
        records.finish(folder, "finished", state["latest"])
    return dict(state["latest"])


def build_task(config: RunConfig, *, load_weights: bool = True) -> Task:
    """The task of a run, with the switches of its trainer.

    Args:
        config: the run.
        load_weights: the network starts from `adapt.weights`; False where a checkpoint is loaded afterwards.
    """
    from mmlab.tasks.base import Switches
    from mmlab.tasks.config import TaskParts

    parts = TaskParts(**{field.name: getattr(config, field.name) for field in fields(TaskParts)})
    task = parts.build()
    task.switches = Switches(
        activation_checkpointing=config.trainer.activation_checkpointing,
        compile=config.trainer.compile,
        log_every=config.trainer.log_every,
        load_weights=load_weights,
    )
    return task


def build_data(config: RunConfig) -> DataModule:
    """The data of a run, read through its task's examples."""
    from mmlab.data.datamodule import DataModule

    return DataModule(
        config.data,
        config.task.examples(config.modality, config.data.max_length),
        seed=config.seed,
        total_steps=config.schedule.steps,
        cache=Path(config.paths.cache),
    )


def build_trainer(config: RunConfig, folder: Path, after_step: int = 0) -> Trainer:
    """Lightning's trainer as `config` asks for it; the run's files go to `folder`.

    Args:
        config: the run.
        folder: its folder.
        after_step: the optimizer step that training starts from.
    """
    from lightning.pytorch import Trainer
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    from mmlab.data.datamodule import accumulation

    rhythm = config.trainer
    accelerator: str = rhythm.accelerator
    if accelerator == "auto":
        accelerator = _AcceleratorConnector._choose_auto_accelerator()
    device = {"gpu": "cuda"}.get(accelerator, accelerator)
    micro_batches = accumulation(config.data, config.devices)
    return Trainer(
        accelerator=accelerator,
        devices=config.devices,
        strategy=config.strategy.build(config.devices, device),
        plugins=[config.precision.build(device), *_cluster()],
        max_steps=config.schedule.steps,
        max_epochs=-1,
        accumulate_grad_batches=micro_batches,
        val_check_interval=rhythm.validate_every * micro_batches,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=rhythm.sanity_batches if config.data.validation is not None else 0,
        limit_val_batches=1.0 if config.data.validation is not None else 0,
        log_every_n_steps=1,
        logger=_loggers(config, folder, after_step),
        callbacks=_callbacks(config, folder),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        inference_mode=False,
        default_root_dir=folder,
    )


def _cluster() -> list[Any]:
    """Under SLURM, its environment without Lightning's requeueing, which saves in the middle of a step."""
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    return [SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else []


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of the run in `folder`, or None."""
    files = sorted((folder / CHECKPOINTS).glob("step-*.ckpt"))
    return files[-1] if files else None


def data_fingerprint(config: RunConfig) -> str:
    """What the run reads: sources, vocabulary and transform, by content."""
    return build_data(config).fingerprint()


def _step(checkpoint: Path | None) -> int:
    from mmlab.callbacks.checkpoint import step_of

    return step_of(checkpoint) if checkpoint is not None else 0


def _loggers(config: RunConfig, folder: Path, after_step: int) -> list[Logger]:
    from mmlab.callbacks.metrics_file import MetricsFile
    from mmlab.callbacks.tensorboard import TensorBoard

    loggers: list[Logger] = []
    if config.logger.tensorboard:
        loggers.append(TensorBoard(folder, after_step))
    if config.logger.csv:
        loggers.append(MetricsFile(folder / "metrics.csv", after_step))
    return loggers


def _callbacks(config: RunConfig, folder: Path) -> list[Any]:
    from mmlab.callbacks.checkpoint import Checkpoints
    from mmlab.callbacks.step_metrics import StepMetrics
    from mmlab.callbacks.tensorboard import HyperParameters

    rhythm = config.trainer
    callbacks: list[Any] = [StepMetrics(), *(callback.build() for callback in config.callbacks.values())]
    if config.logger.tensorboard:
        callbacks.append(HyperParameters(flat(config)))
    callbacks.append(
        Checkpoints(
            folder / CHECKPOINTS,
            every=rhythm.checkpoint_every,
            validate_every=rhythm.validate_every,
            keep_last=rhythm.keep_last,
            keep_best=rhythm.keep_best,
            monitor=rhythm.monitor,
            steps=config.schedule.steps,
        )
    )
    return callbacks


def _report(folder: Path, config: RunConfig, metrics: dict[str, float]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"\nrun folder  {folder}")
    for name, value in metrics.items():
        if name.startswith("val/"):
            console.print(f"{name:<22}{value:.4f}")
    train = f"{_program('mmlab')} train"
    console.print("\nnext:")
    console.print(f"  {_program('tensorboard')} --logdir {config.paths.runs}    # look at it")
    console.print(f"  {train} backbone.qk_norm=true    # change one thing")
    console.print(f"  {train} -m seed=1,2,3    # three seeds of the same")


def _program(name: str) -> str:
    """How the shell finds `name`: by itself, or by the path into this environment."""
    found = Path(sys.executable).with_name(name)
    near = os.path.relpath(found)
    return name if shutil.which(name) else str(found) if near.startswith("..") else near


if __name__ == "__main__":
    main()
