"""Rows become tensors; several examples in a row stay apart."""

import numpy as np
import pytest
import torch

from mmlab.data.collate import Batch, collate

PADDING = {"tokens": 0, "targets": -100}


def example(*tokens):
    ids = np.array(tokens, np.int64)
    return {"tokens": ids, "targets": ids + 1}


def test_full_rows_need_no_structure():
    tensors = collate([[example(1, 2)], [example(3, 4)]], None, PADDING)
    assert sorted(tensors) == ["targets", "tokens"]
    assert tensors["tokens"].tolist() == [[1, 2], [3, 4]]
    assert tensors["tokens"].dtype == torch.int64


def test_padding_is_marked():
    tensors = collate([[example(1, 2, 3)], [example(4)]], None, PADDING)
    assert tensors["tokens"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert tensors["targets"].tolist() == [[2, 3, 4], [5, -100, -100]]
    assert tensors["segments"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert tensors["positions"].tolist() == [[0, 1, 2], [0, 0, 0]]
    assert tensors["segments"].dtype == torch.int32
    assert tensors["positions"].dtype == torch.int64


def test_packed_examples_stay_apart():
    tensors = collate([[example(1, 2), example(3, 4, 5)], [example(6)]], 6, PADDING)
    assert tensors["tokens"].tolist() == [[1, 2, 3, 4, 5, 0], [6, 0, 0, 0, 0, 0]]
    assert tensors["segments"].tolist() == [[1, 1, 2, 2, 2, 0], [1, 0, 0, 0, 0, 0]]
    assert tensors["positions"].tolist() == [[0, 1, 0, 1, 2, 0], [0] * 6]
    assert tensors["targets"][0].tolist() == [2, 3, 4, 5, 6, -100]


def test_two_examples_that_fill_a_row_are_still_two():
    tensors = collate([[example(1), example(2)]], 2, PADDING)
    assert tensors["segments"].tolist() == [[1, 2]]


def test_fixed_fields_have_one_entry_an_example():
    rows = [[example(1) | {"label": np.array(7)}, example(2) | {"label": np.array(8)}]]
    assert collate(rows, None, PADDING)["label"].tolist() == [7, 8]


def test_sequences_may_carry_more_dimensions():
    rows = [[{"mel": np.ones((2, 3), np.float32)}], [{"mel": np.ones((1, 3), np.float32)}]]
    mel = collate(rows, None, {"mel": -1.0})["mel"]
    assert mel.dtype == torch.float32
    assert mel[1].tolist() == [[1, 1, 1], [-1, -1, -1]]


def test_what_cannot_be_a_row_is_refused():
    with pytest.raises(ValueError, match="a row of 3 does not fit the width 2"):
        collate([[example(1, 2), example(3)]], 2, PADDING)
    with pytest.raises(ValueError, match=r"different lengths \[2, 1\]"):
        collate([[{"tokens": np.zeros(2), "targets": np.zeros(1)}]], None, PADDING)


def test_a_batch_moves_its_tensors_and_nothing_else():
    batch = Batch({"tokens": torch.ones(1, 2)}, ids=torch.tensor([3]), counts={"nll": 2.0}, step=4)
    moved = batch.to("meta", non_blocking=True)
    assert moved.tensors["tokens"].device.type == "meta"
    assert (moved.ids.tolist(), moved.counts, moved.step) == ([3], {"nll": 2.0}, 4)
