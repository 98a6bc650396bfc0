"""Every file under conf/: it composes, is checked, says what it is for, and nothing leaks between calls."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra.core.global_hydra import GlobalHydra

from mmlab import help
from mmlab.config import (
    ConfigError,
    RunConfig,
    compose,
    conf_folder,
    configure,
    flat,
    identity,
    load_config,
    save_config,
    to_plain,
    typed,
)
from mmlab.typed import leaves

CONF = conf_folder()
EXPERIMENTS = sorted(help.experiments())
OPTIONS = sorted(
    (path.parent.relative_to(CONF).as_posix(), path.stem)
    for path in CONF.rglob("*/*.yaml")
    if "experiment" not in path.parts and "launcher" not in path.parts
)
ENTRIES = {
    "evaluation": ("evaluate", ("checkpoint=somewhere",)),
    "preparation": ("prepare", ()),
    "source": ("prepare", ("preparation=vocabulary", "output=a.tiktoken")),
}
TOGETHER = {
    **{
        ("evaluation", name): [f"evaluation.path=a.{name}"]
        for name in ("blimp", "exact_match", "gsm8k", "multiple_choice")
    },
    ("evaluation", "likelihood"): ["evaluation.source.paths=[a.txt]"],
    ("evaluation", "likelihood_jsonl"): ["evaluation.source.paths=[a.jsonl]"],
    ("preparation", "named"): ["name=gpt2"],
    ("preparation", "tokens"): ["source.paths=[a]"],
    ("preparation", "vocabulary"): ["source.paths=[a]", "output=a.tiktoken"],
    **{("source", name): ["source.paths=[a]"] for name in ("jsonl", "parquet", "text_files")},
    ("modality/text", "bpe"): ["modality.text.path=a.tiktoken"],
    ("modality/text", "huggingface"): ["modality.text.path=a"],
    ("adapt", "full"): ["adapt.weights=a"],
    ("adapt", "lora"): ["adapt.weights=a"],
    ("strategy", "ddp"): ["devices=2"],
    ("strategy", "fsdp"): ["devices=2"],
    **{
        ("data", name): [f"data.train.paths=[a.{name}]", f"data.validation.paths=[b.{name}]"]
        for name in ("text_files", "jsonl", "parquet")
    },
}


@pytest.fixture(scope="module")
def default() -> RunConfig:
    return configure()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_composes_and_builds_without_memory(name: str) -> None:
    config = configure([f"experiment={name}"])
    with torch.device("meta"):
        network = config.model.build(config.backbone, config.modality)
    assert sum(parameter.numel() for parameter in network.parameters()) > 0
    assert all(parameter.is_meta for parameter in network.parameters())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_has_a_fast_form(name: str) -> None:
    config = configure([f"experiment={name}", "debug=fast"])
    assert config.schedule.steps == 20
    assert config.backbone.width == 32


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_says_what_it_is_for(name: str) -> None:
    text = (CONF / "experiment" / f"{name}.yaml").read_text()
    lines = text.splitlines()
    assert lines[0] == "# @package _global_"  # Hydra reads it only there
    assert [line.split(":")[0] for line in lines[1:5]] == ["# question", "# command", "# needs", "# expect"]
    notes = help.header(CONF / "experiment" / f"{name}.yaml")
    assert all(notes.values())
    assert f"experiment={name}" in notes["command"]
    assert len(lines) <= 30


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_of_every_group_composes(group: str, option: str) -> None:
    entry, words = ENTRIES.get(group, ("train", ()))
    module = importlib.import_module("mmlab.config" if entry == "train" else f"mmlab.{entry}")
    node = compose([*words, f"{group}={option}", *TOGETHER.get((group, option), [])], config_name=entry)
    assert "${" not in yaml.safe_dump(node)
    typed(node, RunConfig if entry == "train" else getattr(module, f"{entry.title()}Config"))


def test_files_are_short_and_only_entries_choose() -> None:
    for path in CONF.rglob("*.yaml"):
        text = path.read_text()
        is_entry = path.parent == CONF or "experiment" in path.parts
        assert is_entry or "\ndefaults:" not in f"\n{text}", f"{path} has a defaults list"
        assert len(text.splitlines()) <= 30, path


def test_a_node_with_a_target_lists_every_field() -> None:
    """Defaults of these classes are not filled in, and Hydra lets nobody override a key that is not there."""
    for path in CONF.rglob("*.yaml"):
        for node in _nodes(yaml.safe_load(path.read_text())):
            if "_target_" in node:
                module, _, name = node["_target_"].rpartition(".")
                fields = dataclasses.fields(getattr(importlib.import_module(module), name))
                assert {field.name for field in fields} | {"_target_"} == set(node), path


def _nodes(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from _nodes(value)


def test_default_is_text_python(default: RunConfig) -> None:
    assert default == configure(["experiment=text/python"])
    assert default.name == "text-python"
    assert default.resume == "none"


def test_calls_do_not_depend_on_each_other(default: RunConfig) -> None:
    assert compose(["backbone.depth=3", "backbone.num_heads=2"])["backbone"]["depth"] == 3
    assert compose(["backbone=tiny"])["backbone"]["width"] == 32
    assert typed(compose(), RunConfig) == default
    assert not GlobalHydra.instance().is_initialized()
    with pytest.raises(ConfigError):
        compose(["nonsense=1"])
    assert not GlobalHydra.instance().is_initialized()


def test_compose_leaves_an_outer_hydra_alone() -> None:
    import hydra

    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        outer = GlobalHydra.instance().hydra
        compose()
        assert GlobalHydra.instance().hydra is outer


def test_file_gives_an_equal_config_back_alone(default: RunConfig, tmp_path: Path) -> None:
    config = configure(["optimizer.eps=1e-12", "modality/text=characters", "backbone.qk_norm=true"])
    save_config(config, tmp_path)
    assert load_config(tmp_path) == config
    assert "${" not in (tmp_path / "config.yaml").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    text = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text.replace("eps: 1.0e-12", "eps: 1e-3"))  # by hand
    assert load_config(tmp_path).optimizer.eps == 1e-3  # type: ignore[attr-defined]


def test_text_that_looks_like_a_number_stays_text(default: RunConfig, tmp_path: Path) -> None:
    for name in ("1e3", "007", "no", "1_0", "2024-01-01"):
        save_config(dataclasses.replace(default, name=name), tmp_path)
        assert load_config(tmp_path).name == name


def test_load_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml does not exist"):
        load_config(tmp_path)


HOW = {
    "name", "strategy", "devices", "trainer", "logger", "paths", "resume", "callbacks",
    "data.micro_batch_size", "data.validation_micro_batch_size", "data.num_workers", "data.prefetch",
}  # fmt: skip


def test_identity_changes_with_what_a_run_is_and_with_nothing_else(default: RunConfig) -> None:
    plain, seen = to_plain(default), set()
    for path, value in leaves(plain):
        if path.endswith("_target_"):
            continue
        changed = _replaced(plain, path, _another(value))
        how = path in HOW or path.split(".")[0] in HOW
        same = _identity_of(changed, default) == _identity_of(plain, default)
        assert same == how, f"{path} {'does not count' if same else 'counts'} towards the identity"
        seen.add(path if path in HOW else path.split(".")[0])
    assert seen >= HOW - {"strategy"}  # a class without fields
    assert _identity_of(plain, default) == identity(default)


def _identity_of(plain: dict[str, Any], like: RunConfig) -> str:
    """Identity of a plain node whose values may be impossible: dataclasses are made without their checks."""
    return identity(_unchecked(plain, like))


def _unchecked(node: Any, like: Any) -> Any:
    if dataclasses.is_dataclass(like) and not isinstance(like, type):
        copy = object.__new__(type(like))
        for field in dataclasses.fields(like):
            object.__setattr__(copy, field.name, _unchecked(node[field.name], getattr(like, field.name)))
        return copy
    if isinstance(like, dict) and node:
        return {key: _unchecked(value, like.get(key)) for key, value in node.items()}
    return tuple(node) if isinstance(like, tuple) else node


def _replaced(node: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return node | {head: _replaced(node[head], rest, value) if rest else value}


def _another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return [*value, 1]
    return {"depth": 1} if isinstance(value, dict) else f"{value}x"


def test_flat_values_suit_a_table(default: RunConfig) -> None:
    values = flat(default)
    assert values["optimizer.learning_rate"] == default.optimizer.learning_rate
    assert values["optimizer.betas"] == "0.9, 0.95"
    assert values["backbone.window"] == "null"
    assert all(isinstance(value, bool | int | float | str) for value in values.values())
    assert all(re.fullmatch(r"[A-Za-z0-9_./-]+", name) for name in values)


# -- notation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("backbone.bias=no", "backbone.bias: expected bool, got 'no' (str); write true or false"),
        ("seed=007", "seed: expected int, got '007' (str); write it without quotes or leading zeros"),
        ("seed=0x10", "seed: expected int, got '0x10' (str)"),
        ("seed=1e3", "seed: expected int, got 1000.0 (float); write 1000"),
        ("seed=1:30", "seed: expected int, got '1:30' (str)"),
        ("name=7", "name: expected str, got 7 (int); put it in quotes if text is meant"),
        ("name=true", "name: expected str, got True (bool)"),
        ("optimizer.learning_rate='1e-3'", "optimizer.learning_rate: expected float, got '1e-3' (str)"),
        ("name=a#b", "name=a#b: this value cannot be read as it stands; quote it twice: \"name='a#b'\""),
        ("name=语", "name=语: this value cannot be read as it stands; quote it twice"),
        ("name=a,b", "a comma makes a sweep, which needs -m; a list is name=[a,b], and text with a comma is"),
        ("backbone.widht=3", "backbone.widht: unknown key; did you mean 'width'?"),
        ("learning_rate=3", "learning_rate: unknown key; did you mean 'optimizer.learning_rate'?"),
        ("backbone=smal", "backbone=smal: unknown option; did you mean 'small'?"),
        ("backbne=small", "backbne: unknown key; did you mean 'backbone'?"),
        ("experiment=text/pyhton", "experiment=text/pyhton: unknown option; did you mean 'text/python'?"),
        ("model.decoder.depth=3", "model.decoder.depth: unknown key; to add it write +model.decoder.depth="),
        ("+model.decoder.widht=3", "model.decoder.widht: unknown key; did you mean 'width'?"),
        ("+model.decoder.depth=x", "model.decoder.depth: expected int, got 'x' (str)"),
        ("+modell={}", "modell: unknown key; did you mean 'model'?"),
        ("devices=2", "devices=2 needs strategy=ddp or strategy=fsdp, got strategy=single"),
        ("seed", "seed: expected key=value"),
        ("optimizer.learning_rate=nan", "optimizer.learning_rate: expected a finite number, got nan"),
        ("model.max_positions=16", "data.max_length 256 is more than the 16 positions of the model"),
    ],
)
def test_an_override_is_refused_in_one_line(override: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configure([override])
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("optimizer.learning_rate=1e-3", "optimizer.learning_rate", 1e-3),
        ("optimizer.learning_rate=1", "optimizer.learning_rate", 1.0),
        ("name=no", "name", "no"),
        ("name=007", "name", "007"),
        ("name='1e-3'", "name", "1e-3"),
        ("seed=1_000", "seed", 1000),
        ("backbone.bias=True", "backbone.bias", True),
        ("paths.runs='a#b, é'", "paths.runs", "a#b, é"),
        ("+model.decoder.depth=3", "model.decoder.depth", 3),
    ],
)
def test_an_override_arrives_as_meant(override: str, path: str, value: Any) -> None:
    found = dict(leaves(to_plain(configure([override]))))[path]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("seed: 007", "007"),
        ("seed: 0x1F # comment", "0x1F"),
        ("seed: 1:30", "1:30"),
        ("betas: [0.9, 010]", "010"),
        ("x: {a: 00}", "00"),
        ("betas: [010,0.9]", "010"),
        ("x: 1:30.5", "1:30.5"),
    ],
)
def test_yaml_numbers_in_another_base_are_refused(line: str, shown: str, tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(f"# 007 in a comment\n{line}\n")
    with pytest.raises(ConfigError, match=rf"train\.yaml:2: {shown} means another number in YAML"):
        compose(folder=tmp_path)


def test_yaml_values_arrive_as_meant(tmp_path: Path) -> None:
    lines = ["a: 1e-3", "b: no", 'c: "007"', "d: 0.05", "e: [0, 10]", "f: 3e-4 # 0x10", "g: 2024-01-01"]
    (tmp_path / "train.yaml").write_text("\n".join(lines))
    expected = {"a": 0.001, "b": False, "c": "007", "d": 0.05, "e": [0, 10], "f": 0.0003, "g": "2024-01-01"}
    assert compose(folder=tmp_path) == expected
