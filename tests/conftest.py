"""Settings and fixtures of the whole suite."""

import os
from pathlib import Path

# Before torch is imported, and inherited by every process that a test starts: the networks here are so small
# that a second thread costs more than it brings, and nothing may ask the network for a model.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def run_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for the runs of this session of tests; pass it as `paths.runs`."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Local data folder: $MMLAB_SHARED_DATA, else shared/data beside the checkout; skips where absent."""
    folder = Path(os.environ.get("MMLAB_SHARED_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no local data folder at {folder} (set MMLAB_SHARED_DATA)")
    return folder
