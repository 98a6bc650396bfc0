"""A run's configuration: composed by Hydra, resolved to plain types, checked into frozen dataclasses.

For the command line and for notebooks. Free of torch at import; Hydra is imported only to compose.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import yaml

from mmlab import complaints
from mmlab.records import stamp
from mmlab.runconfig import PathsConfig, RunConfig, flat, load_config, save_config
from mmlab.typed import ConfigError, identity, plain_defaults, to_plain, typed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omegaconf import DictConfig

__all__ = [
    "ConfigError",
    "PathsConfig",
    "RunConfig",
    "compose",
    "conf_folder",
    "configure",
    "flat",
    "identity",
    "load_config",
    "save_config",
    "to_plain",
    "typed",
]


def conf_folder() -> Path:
    """The folder of config groups: inside the installed package, else beside it in the repository."""
    package = Path(__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise ConfigError(f"no conf folder in {package} or beside it")


def configure(overrides: Sequence[str] = ()) -> RunConfig:
    """The checked configuration that `mmlab train` would run with these overrides."""
    return typed(compose(overrides), RunConfig)


def compose(
    overrides: Sequence[str] = (), *, config_name: str = "train", folder: Path | None = None
) -> dict[str, Any]:
    """Composes an entry config and resolves it to plain types; calls do not depend on each other.

    Args:
        overrides: as on the command line, `key=value`.
        config_name: the entry config.
        folder: the folder of config groups, where it is not the lab's own.

    Raises:
        ConfigError: an override or a file that cannot be composed.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    folder = folder or conf_folder()
    with _fresh_hydra(folder):
        try:
            return resolve(hydra.compose(config_name, list(overrides)), [folder])
        except (HydraException, OmegaConfBaseException) as error:
            raise explain(error, list(overrides), folder, config_name) from error


@contextmanager
def _fresh_hydra(folder: Path) -> Iterator[None]:
    """Hydra's global state over `folder`; afterwards it is what it was before."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    state = GlobalHydra.instance()
    before, state.hydra = state.hydra, None
    register()
    try:
        with hydra.initialize_config_dir(str(folder.resolve()), version_base="1.3", job_name="mmlab"):
            yield
    finally:
        GlobalHydra.instance().hydra = before


def register() -> None:
    """Tells Hydra the dataclasses' defaults, and OmegaConf `${stamp:}`, one value for a whole sweep."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    ConfigStore.instance().store("dataclass_defaults", defaults())
    OmegaConf.register_new_resolver("stamp", functools.cache(stamp), replace=True)


def defaults() -> dict[str, Any]:
    """The defaults of every node whose class is fixed: so each of their keys can be seen and overridden."""
    hints = get_type_hints(RunConfig)
    return {
        field.name: plain_defaults(hints[field.name])
        for field in dataclasses.fields(RunConfig)
        if dataclasses.is_dataclass(hints[field.name]) and not inspect.isabstract(hints[field.name])
    }


def resolve(config: DictConfig, folders: Sequence[Path] = ()) -> dict[str, Any]:
    """Plain types without references; refuses numbers that YAML reads in another base.

    Args:
        config: what Hydra composed, without its own node.
        folders: where its files came from.
    """
    from omegaconf import OmegaConf

    for folder in folders:
        check_notation(folder)
    node = OmegaConf.to_container(config, resolve=True)
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}


_OTHER_BASE = re.compile(
    r"[-+]?(?:0[0-9_]+|0[bBxX][0-9A-Fa-f_]+|[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?)"
)


def check_notation(folder: Path) -> None:
    """Refuses `007`, `0x1F` and `1:30` in the YAML files of `folder`: YAML 1.1 reads 7, 31 and 90.

    Raises:
        ConfigError: names file, line and value.
    """
    for path in sorted(folder.rglob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        if re.search(r"(?<![\w.])0\w|\d:\d", text) is None:
            continue  # nothing that could be such a number; parsing every file would cost the start-up
        for token in yaml.scan(text, yaml.SafeLoader):
            if isinstance(token, yaml.ScalarToken) and token.plain and _OTHER_BASE.fullmatch(token.value):
                raise ConfigError(
                    f"{path}:{token.start_mark.line + 1}: {token.value} means another number in YAML; "
                    "write a plain decimal number, or put it in quotes if text is meant"
                )


def explain(error: Exception, overrides: Sequence[str], folder: Path, entry: str = "train") -> ConfigError:
    """One message for what Hydra or OmegaConf could not compose, with the word that was probably meant."""

    def composed(words: Sequence[str]) -> dict[str, Any]:
        return compose(words, config_name=entry, folder=folder)

    return ConfigError(complaints.message(error, overrides, folder, composed))
