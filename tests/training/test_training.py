"""Whole tiny runs: what they write down, and that switches which must not matter do not."""

import csv
import math

import pytest
import torch
from probes import recorded
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from tiny_runs import losses, make_run, tiny

from mmlab.config import configure
from mmlab.runconfig import flat
from mmlab.tasks.base import NonFiniteGradientError
from mmlab.train import build_data, build_task, build_trainer, run


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def plain(root):
    """A float32 run that records what it sees."""
    record = f"+callbacks.record={{_target_: probes.RecordConfig, folder: {root}/seen}}"
    folder = make_run(root / "plain", tiny(root, record))
    run(folder)
    return folder


def rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def events(folder):
    return EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()


def test_the_loss_falls(plain):
    found = losses(plain)
    assert found[1] == pytest.approx(math.log(257), abs=0.1)
    assert found[20] < found[1] - 1.0


def test_the_learning_rate_is_that_of_the_closed_formula_at_every_optimizer_step(plain, root):
    config = configure(tiny(root))
    expected = [config.optimizer.learning_rate * config.schedule.factor(step) for step in range(1, 21)]
    assert [float(row["train/learning_rate"]) for row in rows(plain)] == pytest.approx(expected, abs=1e-15)
    assert max(expected) == expected[config.schedule.warmup_steps - 1]


def test_validation_loss_is_the_sum_over_the_count_and_does_not_depend_on_the_batch(root):
    found = {}
    for size in (32, 128, 352):
        folder = make_run(
            root / f"batch-{size}",
            tiny(root, f"data.validation_micro_batch_size={size}", "trainer.validate_every=20"),
        )
        found[size] = run(folder)
    for tag in ("val/loss", "val/perplexity", "val/bits_per_byte"):
        assert found[32][tag] == pytest.approx(found[128][tag], rel=1e-5)
        assert found[32][tag] == pytest.approx(found[352][tag], rel=1e-5)


def test_bits_per_byte_counts_the_bytes_of_the_documents_and_the_nats_of_their_ends(plain, root):
    config = configure(tiny(root))
    documents = config.data.validation.build(root / "cache")
    size = sum(len(documents[index]["text"].encode()) for index in range(len(documents)))
    lines = [line for line in recorded(root / "seen") if line["kind"] == "validation"]
    assert sum(line["counts"]["bytes"] for line in lines) == 2 * size
    assert sum(line["counts"]["nll"] for line in lines) == 2 * (size + len(documents))
    last = rows(plain)[-1]
    nats = float(last["val/loss"]) * (size + len(documents))
    assert float(last["val/bits_per_byte"]) == pytest.approx(nats / math.log(2) / size, rel=1e-9)
    assert float(last["val/perplexity"]) == pytest.approx(math.exp(float(last["val/loss"])), rel=1e-9)


def test_tensorboard_has_the_numbers_and_only_plain_tags(plain):
    tags = events(plain).Tags()["scalars"]
    wanted = {
        "train/loss",
        "train/learning_rate",
        "train/gradient_norm",
        "train/tokens_per_second",
        "val/loss",
    }
    assert wanted <= set(tags)
    assert all(
        set(tag) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-") for tag in tags
    )
    found = {event.step: event.value for event in events(plain).Scalars("train/loss")}
    assert found == pytest.approx(losses(plain), rel=1e-6)


def hparams_of(folder):
    """(hyper-parameters, metric tags) that TensorBoard's HPARAMS page reads from a run."""
    metadata = events(folder).summary_metadata
    contents = {
        tag: plugin_data_pb2.HParamsPluginData.FromString(metadata[tag].plugin_data.content)
        for tag in metadata
        if metadata[tag].plugin_data.plugin_name == "hparams"
    }
    start = next(item.session_start_info for item in contents.values() if item.HasField("session_start_info"))
    experiment = next(item.experiment for item in contents.values() if item.HasField("experiment"))
    values = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
    return values, {info.name.tag for info in experiment.metric_infos}


def test_hyper_parameters_stand_beside_the_final_metric_also_of_runs_with_other_keys(plain, root):
    other = make_run(root / "other", tiny(root, "optimizer.learning_rate=1e-4", "+model.decoder.mlp_size=48"))
    metrics = run(other)
    first, tags = hparams_of(plain)
    second, _ = hparams_of(other)
    assert (first["optimizer.learning_rate"], second["optimizer.learning_rate"]) == (3e-3, 1e-4)
    assert second["model.decoder.mlp_size"] == 48
    assert {name: first[name] for name in flat(configure(tiny(root)))} == flat(configure(tiny(root)))
    assert {"val/loss", "val/bits_per_byte"} <= tags
    newest = events(other).Scalars("val/loss")[-1]
    assert (newest.step, newest.value) == (20, pytest.approx(metrics["val/loss"], rel=1e-6))
    assert newest.value not in (-1, 0)


def test_activation_checkpointing_changes_no_loss(plain, root):
    dropout = "backbone.dropout=0.1"
    folders = [
        make_run(root / f"ac-{on}", tiny(root, dropout, f"trainer.activation_checkpointing={on}"))
        for on in ("false", "true")
    ]
    for folder in folders:
        run(folder)
    assert losses(folders[0]) == losses(folders[1])


@pytest.mark.parametrize(
    ("precision", "weights", "tolerance"),
    [("bf16-mixed", torch.float32, 0.03), ("bf16-true", torch.bfloat16, 0.15)],
)
def test_bf16_runs_are_close_to_float32_and_keep_float32_where_it_matters(
    plain, root, precision, weights, tolerance
):
    folder = make_run(root / precision, tiny(root, f"precision={precision}"))
    run(folder)
    expected, found = losses(plain), losses(folder)
    assert max(abs(found[step] - expected[step]) for step in expected) < tolerance
    assert found != expected
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert {value.dtype for value in saved["state_dict"].values()} == {weights}
    state = saved["optimizer_states"][0]["state"]
    assert {value.dtype for entry in state.values() for value in entry.values()} == {torch.float32}


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16-true"])
def test_a_resumed_run_in_each_precision_gives_the_same_losses(root, precision):
    from probes import StopHere

    from mmlab.runconfig import save_config

    words = tiny(root, f"precision={precision}", "schedule.steps=8")
    whole = make_run(root / f"whole-{precision}", words)
    run(whole)
    stopped = make_run(
        root / f"stopped-{precision}", [*words, "+callbacks.stop={_target_: probes.StopConfig, step: 7}"]
    )
    with pytest.raises(StopHere):
        run(stopped)
    save_config(configure(words), stopped)
    run(stopped)
    assert losses(stopped) == losses(whole)


def test_a_gradient_that_is_not_finite_stops_the_run_before_a_weight_changes(root):
    config = configure(tiny(root))
    task, data = build_task(config), build_data(config)

    def poisoned(batch):
        sums = type(task).sums(task, batch)
        return {"nll": sums["nll"] * (math.nan if batch.step == 3 else 1.0)}

    task.sums = poisoned
    trainer = build_trainer(config, root / "poisoned")
    with pytest.raises(NonFiniteGradientError, match=r"optimizer step 3: .* nan; .*\[\d+"):
        trainer.fit(task, datamodule=data)
    assert trainer.global_step == 2
    assert all(torch.isfinite(parameter).all() for parameter in task.parameters())


def test_two_runs_with_one_seed_are_equal_and_another_seed_is_not(plain, root):
    again = make_run(root / "again", tiny(root))
    other = make_run(root / "other-seed", tiny(root, "seed=1"))
    run(again)
    run(other)
    assert losses(again) == losses(plain)
    assert losses(other) != losses(plain)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks at its inputs
def test_compiled_and_plain_runs_have_the_same_checkpoint(plain, root):
    folder = make_run(
        root / "compiled", tiny(root, "trainer.compile=true", "schedule.steps=4", "schedule.warmup_steps=2")
    )
    eager = make_run(root / "eager", tiny(root, "schedule.steps=4", "schedule.warmup_steps=2"))
    run(folder)
    run(eager)
    compiled, reference = (
        torch.load(path / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for path in (folder, eager)
    )
    assert list(compiled) == list(reference)
    assert not any("_orig_mod" in name for name in compiled)
    assert max(abs(losses(folder)[step] - losses(eager)[step]) for step in range(1, 5)) < 1e-5
    for first, second in ((compiled, reference), (reference, compiled)):
        config = configure(tiny(root))
        task = build_task(config)
        task.configure_model()
        task.load_state_dict(first, strict=True)
        assert sorted(task.state_dict()) == sorted(second)
