"""What is committed: no machine's paths, no private ids, no package index, no names that collide."""

from __future__ import annotations

import subprocess

import pytest

from tests.architecture import rules
from tests.architecture.source import ROOT

SET_UP_FILES = ["Makefile", ".ci/run", "constraints.txt", "pyproject.toml", ".pre-commit-config.yaml"]


def tracked() -> list[str]:
    """Files that are committed or would be by `git add`, as paths below the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"not a git checkout: {done.stderr.strip()}")
    return sorted(name for name in done.stdout.split("\0") if name and (ROOT / name).is_file())


def texts(names: list[str]) -> dict[str, str]:
    """Contents of those files that are text."""
    raw = {name: (ROOT / name).read_bytes() for name in names}
    return {name: data.decode("utf-8") for name, data in raw.items() if b"\0" not in data[:8192]}


def test_committed_files_name_no_machine() -> None:
    files = texts(tracked())
    assert len(files) > 30, "the files were not found"
    breaches = rules.private_text(files)
    assert not breaches, "\n".join(["", *breaches])


def test_committed_names_do_not_collide() -> None:
    assert rules.duplicate_names(tracked()) == []


@pytest.mark.parametrize("name", SET_UP_FILES)
def test_set_up_names_no_index(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "index-url" not in text
    assert "://" not in text


def test_private_text_is_found() -> None:
    line = "see " + "/" + "home/someone/data"
    assert rules.private_text({"a.md": f"fine\n{line}"}) == [
        f"a.md:2 path of one machine: {'/' + 'home/s'!r}"
    ]
    assert rules.private_text({"a.py": "# " + "LT" + "-02"}) == [f"a.py:1 private id: {'LT' + '-02'!r}"]
    assert rules.private_text({"a.py": "UTF-08 x/home/y https://example.org/work/1"}) == []


def test_colliding_names_are_found() -> None:
    assert rules.duplicate_names(["a/B.py", "a/b.py", "c"]) == [
        "a/B.py: differs from another in case only",
        "a/b.py: differs from another in case only",
    ]
