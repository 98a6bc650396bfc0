"""From a composed configuration to a running run: its folder, what it continues, and its processes.

One process decides; what it decided stands in the run folder, and every rank starts from there.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from mmlab import records
from mmlab.runconfig import CONFIG_FILE, RunConfig, save_config
from mmlab.typed import ConfigError

Fingerprint = Callable[[RunConfig], str]
"""What a run reads, by content."""

Say = Callable[[str], None]

RANK_MODULE = "mmlab.train"
"""What every rank runs, with the run folder as its argument."""


@dataclass(frozen=True)
class Place:
    """Where a run goes: its folder, whether it is there already, and whether there is nothing left to do."""

    folder: Path
    resumed: bool = False
    finished: bool = False


def create_run(config: RunConfig, *, folder: Path | None = None, command: Sequence[str] = ()) -> Path:
    """Makes a run folder with config.yaml and manifest.json; `python -m mmlab.train FOLDER` then trains it.

    Args:
        config: the run.
        folder: the folder, where it is fixed (a job of a sweep); else a new one below `config.paths.runs`.
        command: the words that started the run.
    """
    if folder is None:
        folder = records.new_folder(Path(config.paths.runs) / config.name)
    folder.mkdir(parents=True, exist_ok=True)
    save_config(config, folder)
    records.write_manifest(folder, config, command=command)
    return folder


def decide(
    config: RunConfig,
    fingerprint: Fingerprint,
    *,
    folder: Path | None = None,
    command: Sequence[str] = (),
    say: Say = print,
) -> Place:
    """The place of the run: what `resume` names or finds, else a new folder.

    Raises:
        ConfigError: `resume` is a path to something that is not this run.
    """
    if config.resume == "none":
        return Place(create_run(config, folder=folder, command=command))
    if config.resume == "auto":
        found = _newest(config, fingerprint, say)
    else:
        found = Path(config.resume)
        _check(found, config, fingerprint)
    if found is None:
        return Place(create_run(config, folder=folder, command=command))
    if folder is not None and folder.resolve() != found.resolve():
        records.remove_if_empty(folder)  # the sweep made it for a job that now goes on elsewhere
    step = records.last_step(found)
    ended = (records.read_manifest(found) or {}).get("status") == "finished"
    if ended and step is not None and step >= config.schedule.steps:
        say(f"{found} is finished: step {step} of {config.schedule.steps}{_metrics(found)}")
        return Place(found, resumed=True, finished=True)
    say(f"resuming {found} after step {step or 0} of {config.schedule.steps}")
    save_config(config, found)
    return Place(found, resumed=True)


def _newest(config: RunConfig, fingerprint: Fingerprint, say: Say) -> Path | None:
    """The newest run of the same identity and data that has a checkpoint; else says in one line why not."""
    wanted = records.identity(config)
    runs = records.find_runs(Path(config.paths.runs))
    same = [(folder, manifest) for folder, manifest in runs if manifest["identity"] == wanted]
    reason = _near_miss(config, runs)
    data = fingerprint(config) if same else None
    for folder, manifest in same:
        if manifest["data_fingerprint"] not in (None, data):
            reason = f"{folder} has the same configuration, but its data was another ({_short(manifest)})"
        elif records.last_step(folder) is None:
            reason = f"{folder} is the same run, but has no checkpoint"
        elif not _is_free(folder):
            reason = f"{folder} is the same run, but another process is training it"
        else:
            return folder
    say(f"resume=auto starts a new run: {reason}")
    return None


def _short(manifest: Mapping[str, Any]) -> str:
    return f"fingerprint {manifest['data_fingerprint'][:12]}"


def _near_miss(config: RunConfig, runs: Sequence[tuple[Path, Mapping[str, Any]]]) -> str:
    for folder, manifest in runs:
        if manifest["name"] == config.name:
            found = records.differences(config, _saved(folder))
            return f"the newest run named {config.name}, {folder}, differs in {_listed(found)}"
    return f"there is no run of this identity in {config.paths.runs}"


def _listed(found: Sequence[tuple[str, Any, Any]], limit: int = 3) -> str:
    parts = [f"{path} ({_text(theirs)} there, {_text(mine)} now)" for path, mine, theirs in found[:limit]]
    more = len(found) - limit
    return ", ".join(parts) + (f" and {more} more" if more > 0 else "")


def _text(value: Any) -> str:
    return "null" if value is None else str(value)


def _check(folder: Path, config: RunConfig, fingerprint: Fingerprint) -> None:
    manifest = records.read_manifest(folder)
    if manifest is None:
        raise ConfigError(
            f"resume: {folder} is not a run folder (no {records.MANIFEST}); or 'none' or 'auto'"
        )
    found = records.differences(config, _saved(folder))
    if found:
        raise ConfigError(f"resume: {folder} is another run: {_listed(found, limit=8)}")
    saved = manifest["data_fingerprint"]
    if saved is not None and saved != fingerprint(config):
        raise ConfigError(f"resume: {folder} read other data ({_short(manifest)}) than is there now")
    if not _is_free(folder):
        raise ConfigError(f"resume: another process is training {folder}")


def _saved(folder: Path) -> dict[str, Any]:
    try:
        node = yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, yaml.YAMLError) as error:
        raise ConfigError(f"{folder / CONFIG_FILE} cannot be read: {error}") from error
    return node if isinstance(node, dict) else {}


def _is_free(folder: Path) -> bool:
    with records.claim(folder) as mine:
        return mine


def _metrics(folder: Path) -> str:
    manifest = records.read_manifest(folder) or {"metrics": {}}
    kept = {name: value for name, value in manifest["metrics"].items() if name.startswith("val/")}
    return "".join(f", {name} {value:.4f}" for name, value in kept.items() if isinstance(value, float))


# -- processes ----------------------------------------------------------------------------------------------


def train(config: RunConfig, folder: Path, run_here: Callable[[Sequence[str]], Any]) -> None:
    """Trains the run in `folder`: in this process, or with `devices` > 1 in as many new ones.

    Raises:
        SystemExit: a rank failed; carries its exit status.
        ConfigError: another process trains this run.
    """
    with ExitStack() as stack:
        if not stack.enter_context(records.claim(folder)):
            raise ConfigError(f"another process is training {folder}")
        if config.devices == 1 or outer() is not None:
            run_here([str(folder)])
        else:
            _start_ranks(config.devices, folder)


def _start_ranks(count: int, folder: Path) -> None:
    """Starts `count` processes; if one fails, the others are stopped. Signals reach all of them."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    plan = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=f"{folder.name}-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="spawn",
    )
    try:
        elastic_launch(plan, entrypoint=sys.executable)("-m", RANK_MODULE, str(folder))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        manifest = records.read_manifest(folder)
        if manifest is not None and manifest["status"] in ("created", "running"):
            reason = f"rank {rank} ended with exit status {failure.exitcode}"
            records.finish(folder, "failed", reason=reason)
        raise SystemExit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode) from None


@dataclass(frozen=True)
class Outer:
    """This process as one of `size` that torchrun or SLURM started; `key` is the same for all of them."""

    rank: int
    size: int
    key: str


def outer(environment: Mapping[str, str] = os.environ) -> Outer | None:
    """How this process was started, if it is one of several (one node)."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
        key = "-".join([str(os.getppid()), *(environment.get(name, "") for name in names)])
        return Outer(int(environment["RANK"]), int(environment["WORLD_SIZE"]), key)
    if int(environment.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environment:
        key = f"slurm-{environment.get('SLURM_JOB_ID')}-{environment.get('SLURM_STEP_ID')}"
        return Outer(int(environment["SLURM_PROCID"]), int(environment["SLURM_NTASKS"]), key)
    return None


def with_outer_devices(config: RunConfig, here: Outer) -> RunConfig:
    """`config` on as many devices as there are processes.

    Raises:
        ConfigError: `devices` asks for another number.
    """
    if config.devices not in (1, here.size):
        raise ConfigError(f"devices={config.devices}, but {here.size} processes were started")
    try:
        return replace(config, devices=here.size)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def announce(here: Outer, folder: Path | None) -> None:
    """Rank 0 tells the other ranks the run folder; None says that there is nothing to do."""
    path = _notice(here)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(str(folder.resolve()) if folder is not None else "")
    partial.replace(path)


def await_folder(here: Outer, patience: float = 600.0) -> Path | None:
    """The run folder that rank 0 announces, waiting for at most `patience` seconds."""
    path, deadline = _notice(here), time.monotonic() + patience
    while time.monotonic() < deadline:
        if path.exists() and path.stat().st_uid == os.getuid():
            text = path.read_text()
            return Path(text) if text else None
        time.sleep(0.05)
    raise TimeoutError(f"rank {here.rank}: rank 0 named no run folder within {patience:.0f} s (by {path})")


def _notice(here: Outer) -> Path:
    return Path(tempfile.gettempdir()) / f"mmlab-{os.getuid()}-{here.key}.folder"
