"""The command line: `mmlab VERB key=value ...`.

Help, printing a configuration and refusing a wrong one need neither torch nor lightning; help does not even
need Hydra. Exit status: 0 done, 1 the run failed, 2 the command line or the configuration is wrong.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mmlab import help

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from mmlab.config import RunConfig
    from mmlab.launch import Outer

HELP = {"-h", "--help", "help"}
COMPLETION = {"-sc", "--shell-completion"}
FULL_ERROR = "HYDRA_FULL_ERROR"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the verb that is named first; leaves through SystemExit where the exit status is not 0."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    verb, rest = (words[0], words[1:]) if words else ("--help", [])
    if verb in HELP:
        print(help.general())
    elif verb == "--version":
        from importlib.metadata import version

        print(f"mmlab {version('mmlab')}")
    elif verb in COMPLETION:
        _complete(words)
    elif verb == "train":
        _train(rest)
    elif verb in help.VERBS:
        _other(verb, rest)
    else:
        from mmlab.typed import suggest

        wish = suggest(verb, help.VERBS)
        _stop(f"{verb}: unknown verb{wish}\nmmlab VERB key=value ...   (mmlab --help lists the verbs)")


def _other(verb: str, words: list[str]) -> None:
    """A verb of one process: module `mmlab.VERB` with a config class, `run`, and the entry conf/VERB.yaml."""
    if HELP & set(words):
        print(help.other(verb))
        return
    module = importlib.import_module(f"mmlab.{verb}")
    jobs = Jobs(
        verb, words, getattr(module, f"{verb.title()}Config"), lambda config, folder: module.run(config)
    )
    _with_hydra(words, jobs, verb)
    jobs.report()


def _train(words: list[str]) -> None:
    if HELP & set(words):
        print(help.train())
        return
    here = None
    if {"WORLD_SIZE", "SLURM_PROCID"} & set(os.environ):
        from mmlab import launch

        here = launch.outer()
    if here is not None and {"-m", "--multirun"} & set(words):
        _stop("a sweep starts its own processes: run it without torchrun or srun, with devices=N")
    if here is not None and here.rank > 0:
        folder = launch.await_folder(here)
        if folder is not None:
            _train_here([str(folder)])
        return
    from mmlab.config import RunConfig

    start = functools.partial(_start, command=["mmlab", "train", *words], here=here)
    jobs = Jobs("train", words, RunConfig, start)
    _with_hydra(words, jobs, "train")
    jobs.report()


def _start(config: RunConfig, folder: Path | None, *, command: list[str], here: Outer | None) -> None:
    """Decides where a run goes and trains it there."""
    from mmlab import launch

    if here is not None:
        config = launch.with_outer_devices(config, here)
    place = launch.decide(config, _data_fingerprint, folder=folder, command=command)
    if here is not None:
        launch.announce(here, None if place.finished else place.folder)
    if not place.finished:
        launch.train(config, place.folder, _train_here)


class Jobs:
    """Runs the jobs that Hydra gives it, and remembers those that failed: one failure stops no other job.

    Args:
        verb: what every job does.
        words: the command line after the verb.
        cls: dataclass of a job's configuration.
        run: does one job, given its checked configuration and, in a sweep, its folder.
    """

    def __init__(
        self, verb: str, words: Sequence[str], cls: type[Any], run: Callable[[Any, Path | None], None]
    ) -> None:
        self.verb, self.words, self.cls, self.run = verb, list(words), cls, run
        self.sweep = False
        self.started = 0
        self.failed: list[tuple[str, BaseException]] = []

    def __call__(self, composed: DictConfig) -> None:
        """One job: its resolved and checked configuration, its folder, its work."""
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        settings = HydraConfig.get()
        self.sweep = settings.mode == RunMode.MULTIRUN
        self.started += 1
        label = f"job {settings.job.num} ({' '.join(settings.overrides.task)})" if self.sweep else self.verb
        folder = Path(os.path.relpath(settings.runtime.output_dir)) if self.sweep else None
        try:
            self.run(self._checked(composed), folder)
        except (Exception, SystemExit) as error:
            if type(error).__name__ in ("SIGTERMException", "SignalException"):
                raise  # the process was asked to stop: so does a sweep
            self.failed.append((label, error))
            if self.sweep:
                _show(label, error)

    def _checked(self, composed: DictConfig) -> Any:
        from hydra.core.hydra_config import HydraConfig

        from mmlab.config import resolve, typed

        sources = HydraConfig.get().runtime.config_sources
        node = resolve(composed, [Path(source.path) for source in sources if source.schema == "file"])
        return typed(node, self.cls)

    def report(self) -> None:
        """Names the jobs that failed and leaves with their exit status; does nothing if all went well."""
        from mmlab.typed import ConfigError

        if not self.failed:
            return
        if not self.sweep:
            error = self.failed[0][1]
            if isinstance(error, ConfigError) and not _wants_stack():
                _stop(str(error))
            raise error
        print(f"{len(self.failed)} of {self.started} jobs failed:", file=sys.stderr)
        for label, error in self.failed:
            print(f"  {label}: {_named(error)}", file=sys.stderr)
        raise SystemExit(2 if all(isinstance(error, ConfigError) for _, error in self.failed) else 1)


def _with_hydra(words: Sequence[str], task: Callable[[DictConfig], None], entry: str) -> None:
    """Lets Hydra parse `words` over conf/ENTRY.yaml and call `task` for every job; explains what fails."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from mmlab.config import conf_folder, explain, register

    register()
    folder = conf_folder()
    argv, sys.argv = sys.argv, [sys.argv[0], *words]
    before = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"  # so that Hydra raises what it would print and exit with
    try:
        hydra.main(version_base="1.3", config_path=str(folder), config_name=entry)(task)()
    except (HydraException, OmegaConfBaseException) as error:
        if before == "1":
            raise
        overrides = [word for word in words if not word.startswith("-")]
        _stop(str(explain(error, overrides, folder, entry)))
    finally:
        sys.argv = argv
        os.environ.pop(FULL_ERROR)
        if before is not None:
            os.environ[FULL_ERROR] = before


def _complete(words: list[str]) -> None:
    """Completion as Hydra does it, after the verb has been taken out of the line."""
    typed_so_far = os.environ.get("COMP_LINE", "").split(" ")[1:]  # the program's name aside
    if "query" in words[-1]:
        if len(typed_so_far) < 2:
            print(" ".join(help.VERBS))
            return
        if typed_so_far[-1].startswith("experiment="):
            print(" ".join(f"experiment={name}" for name in help.experiments()))
            return
        os.environ["COMP_LINE"] = " ".join(["mmlab", *typed_so_far[1:]])
    entry = typed_so_far[0] if typed_so_far and typed_so_far[0] in help.VERBS else "train"
    _with_hydra(words, lambda composed: None, entry)


def _train_here(arguments: Sequence[str]) -> None:
    from mmlab import train

    train.main(arguments)


def _data_fingerprint(config: RunConfig) -> str:
    from mmlab import train

    return train.data_fingerprint(config)


def _wants_stack() -> bool:
    return os.environ.get(FULL_ERROR) == "1"


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _show(label: str, error: BaseException) -> None:
    from mmlab.typed import ConfigError

    if isinstance(error, Exception) and (not isinstance(error, ConfigError) or _wants_stack()):
        import traceback

        traceback.print_exception(error)
    print(f"{label} failed: {_named(error)}", file=sys.stderr, flush=True)


def _stop(message: str) -> NoReturn:
    print(f"mmlab: {message}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
