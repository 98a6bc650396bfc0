"""The learning rate of every optimizer step, against the formula written out."""

import math

import pytest

from mmlab.optim.schedule import ScheduleConfig


def test_warmup_then_cosine_reaches_the_peak_at_the_end_of_warmup_and_the_final_rate_at_the_last_step():
    schedule = ScheduleConfig(steps=10, warmup_steps=4, shape="cosine")
    expected = [0.25, 0.5, 0.75, 1.0] + [0.5 * (1 + math.cos(math.pi * k / 6)) for k in range(1, 7)]
    assert [schedule.factor(step) for step in range(1, 11)] == pytest.approx(expected, abs=1e-12)
    assert schedule.factor(10) == pytest.approx(0.0, abs=1e-12)


def test_linear_falls_to_the_final_fraction():
    schedule = ScheduleConfig(steps=5, warmup_steps=1, shape="linear", final=0.2)
    assert [schedule.factor(step) for step in range(1, 6)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_trapezoid_holds_the_peak_until_the_cooldown():
    schedule = ScheduleConfig(steps=8, warmup_steps=2, shape="trapezoid", cooldown_steps=4, final=0.2)
    expected = [0.5, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    assert [schedule.factor(step) for step in range(1, 9)] == pytest.approx(expected)


def test_constant_stays_at_the_peak():
    schedule = ScheduleConfig(steps=3, warmup_steps=0, shape="constant")
    assert [schedule.factor(step) for step in (1, 2, 3)] == [1.0, 1.0, 1.0]


def test_warmup_may_fill_the_whole_run():
    schedule = ScheduleConfig(steps=4, warmup_steps=4)
    assert [schedule.factor(step) for step in range(1, 5)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"steps": 0}, "got 0"),
        ({"steps": 5, "warmup_steps": 6}, r"0\.\.steps \(5\), got 6"),
        ({"steps": 5, "final": 1.5}, "got 1.5"),
        ({"steps": 5, "shape": "trapezoid"}, "cooldown_steps None"),
        ({"steps": 5, "cooldown_steps": 2}, "cooldown_steps 2"),
        ({"steps": 5, "warmup_steps": 3, "shape": "trapezoid", "cooldown_steps": 3}, r"\(2\), got 3"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_by_name(options, numbers):
    with pytest.raises(ValueError, match=numbers):
        ScheduleConfig(**options)
