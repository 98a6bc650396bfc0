"""Runs on two ranks, many in one start: `torchrun ... cells.py ROOT`.

Each line of ROOT/cells.json names a run folder; the ranks train them one after another. A cell that fails
stops the start, so that no test reads half a result.
"""

import json
import sys
from pathlib import Path

import torch

from mmlab.train import run


def main():
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    for folder in json.loads((root / "cells.json").read_text()):
        run(Path(folder))


if __name__ == "__main__":
    main()
