"""Log-likelihoods of many token sequences, batched by length.

A score does not depend on what else is in its batch: rows are padded at their end, which a causal network
cannot see, and summed in float64 over their own targets alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from mmlab.evaluation.base import DEFAULT, Execution
from mmlab.models.decoder import IGNORE

if TYPE_CHECKING:
    from mmlab.inference.model import LanguageModel

Ids = NDArray[Any]

Row = tuple[Ids, int]
"""Token ids, and the place of the first one that is scored; those before it are context."""


@contextmanager
def evaluating(network: nn.Module, autocast: bool = False) -> Iterator[torch.device]:
    """Evaluation mode without gradients, and bfloat16 autocast if asked for; gives the network's device.

    Afterwards every module is in the mode that it was in.
    """
    modes = [(module, module.training) for module in network.modules()]
    device = next(network.parameters()).device
    network.eval()
    try:
        with (
            torch.no_grad(),
            torch.autocast(device.type, dtype=torch.bfloat16) if autocast else nullcontext(),
        ):
            yield device
    finally:
        for module, mode in modes:
            module.training = mode


def log_likelihoods(
    model: LanguageModel, pairs: Sequence[tuple[Ids, Ids]], execution: Execution = DEFAULT
) -> NDArray[np.float64]:
    """Log-likelihood (nats) of each continuation after its context, float64 (n,).

    Args:
        model: the model.
        pairs: ids of context and continuation, neither of them empty.
        execution: how it is run.
    """
    for index, (context, continuation) in enumerate(pairs):
        if not len(context) or not len(continuation):
            raise ValueError(
                f"pair {index} has {len(context)} tokens of context and {len(continuation)} to score; "
                "both need at least 1"
            )
    lengths = np.array([len(context) + len(continuation) - 1 for context, continuation in pairs], np.int64)

    def row(index: int) -> Row:
        context, continuation = pairs[index]
        return np.concatenate([context, continuation]), len(context)

    return -negative_log_likelihoods(model, lengths, row, execution)


def negative_log_likelihoods(
    model: LanguageModel,
    lengths: NDArray[np.int64],
    row: Callable[[int], Row],
    execution: Execution = DEFAULT,
) -> NDArray[np.float64]:
    """Negative log-likelihood (nats) of the scored tokens of each row, float64 (n,).

    Args:
        model: the model.
        lengths: inputs of each row: its tokens less one, since the last one is only predicted.
        row: gives row `i`; called once for each, so rows need not be in memory together.
        execution: how it is run.

    Raises:
        ValueError: a row is longer than the model's positions, or its likelihood is no number.
    """
    found = np.zeros(len(lengths), np.float64)
    longest = int(lengths.max(initial=0))
    if model.max_length is not None and longest > model.max_length:
        raise ValueError(
            f"row {int(lengths.argmax())} has {longest} tokens, "
            f"but the model takes at most {model.max_length}"
        )
    done = 0
    with evaluating(model.network, execution.autocast) as device:
        for indices in batches(lengths, execution.batch_tokens):
            found[indices] = _batch(model, [row(int(index)) for index in indices], device)
            bad = indices[np.isnan(found[indices])]
            if len(bad):
                raise ValueError(f"row {bad[0]}: the model's likelihood is not a number")
            done += len(indices)
            if execution.progress is not None:
                execution.progress(done, len(lengths))
    return found


def batches(lengths: NDArray[np.int64], batch_tokens: int) -> Iterator[NDArray[np.int64]]:
    """Rows of like length together, the longest first, as many as `batch_tokens` hold when padded."""
    order, start = np.argsort(-lengths, kind="stable"), 0
    while start < len(order):
        size = max(batch_tokens // max(int(lengths[order[start]]), 1), 1)
        yield order[start : start + size]
        start += size


def _batch(model: LanguageModel, rows: Sequence[Row], device: torch.device) -> NDArray[np.float64]:
    width = max(len(ids) for ids, _ in rows) - 1
    tokens = np.full((len(rows), width), model.vocabulary.end, np.int64)
    targets = np.full((len(rows), width), IGNORE, np.int64)
    for index, (ids, first) in enumerate(rows):
        tokens[index, : len(ids) - 1] = ids[:-1]
        targets[index, first - 1 : len(ids) - 1] = ids[first:]
    output = model.network(
        torch.from_numpy(tokens).to(device), targets_BT=torch.from_numpy(targets).to(device)
    )
    assert output.nll_BT is not None
    nll_B: NDArray[np.float64] = output.nll_BT.cpu().sum(dim=1, dtype=torch.float64).numpy()
    return nll_B
