"""The GPT trains to the same curve on any number of ranks, goes on after an end, and says what is wrong."""

import csv
import json
import signal

import click
import numpy as np
import pytest
from mlp import same_bits
from rich.console import Console

import mpicoll
from mpicoll.io.text import pack_text

SMALL = [
    "model.layers=1",
    "model.heads=2",
    "model.width=16",
    "model.context=12",
    "training.batch=16",
    "training.steps=24",
    "training.evaluations=2",
    "optimizer.lr=0.01",
]


@pytest.fixture
def train(job, text):
    """Train a small GPT with some settings changed."""

    def train(comm, *changes, **others):
        config = job("gpt_config").load(None, [*SMALL, *changes], comm.size)
        model, curve, optimizer = job("train_gpt").train(comm, *text, config, **others)
        return model, curve

    return train


@pytest.fixture(scope="module")
def known():
    """What has been trained already, for several tests to compare with."""
    return {}


@pytest.fixture
def plain(comm, train, known):
    if "plain" not in known:
        known["plain"] = train(comm)
    return known["plain"]


@pytest.mark.parametrize(
    "changes",
    [
        ("optimizer.eps=1e-7",),
        ("model.dropout=0.2", "training.batch=17", "training.passes=2"),  # uneven parts, dealt in two passes
        ("communication.bucket_mb=0.002", "communication.overlap=true", "model.dropout=0.1"),
        ("optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.nesterov=true", "optimizer.lr=0.1"),
        ("precision.dtype=bfloat16", "training.passes=2", "model.dropout=0.1"),
        ("precision.dtype=float16", "precision.loss_scale=1024", "communication.overlap=true"),
        ("optimizer.name=lamb", "optimizer.weight_decay=0.1", "optimizer.clip=0"),
    ],
)
def test_the_curve_is_that_of_one_rank(comm, alone, train, changes):
    model, curve = train(comm, *changes)
    lone_model, lone_curve = train(alone, *changes)
    assert same_bits(comm, model.params.flat)
    tolerance = 0.02 if "precision" in changes[0] else 1e-4
    np.testing.assert_allclose(curve.loss, lone_curve.loss, rtol=0, atol=tolerance)
    assert list(curve.validation) == list(lone_curve.validation) == [12, 24]
    for step, loss in curve.validation.items():
        assert abs(loss - lone_curve.validation[step]) < tolerance
    assert curve.loss[-1] < curve.loss[0] - 0.3


@pytest.mark.parametrize("compression", ["fp16", "bf16", "int8", "topk", "powersgd"])
def test_compressed_gradients_train_nearly_as_well(comm, train, plain, compression):
    size = {"topk": ["communication.ratio=0.2"], "powersgd": ["communication.rank=4"]}.get(compression, [])
    model, curve = train(comm, f"communication.compression={compression}", *size)
    assert same_bits(comm, model.params.flat)
    assert abs(curve.validation[24] - plain[1].validation[24]) < (0.02 if "16" in compression else 0.3)
    assert comm.size == 1 or not np.array_equal(curve.loss, plain[1].loss)


@pytest.mark.parametrize("compression", ["topk communication.ratio=0.2", "powersgd communication.rank=8"])
def test_compression_that_begins_late_ends_within_one_percent(comm, train, known, compression):
    longer = "model.width=32", "training.steps=200", "optimizer.lr=6e-3"
    if "longer" not in known:
        known["longer"] = train(comm, *longer)[1]
    plain = known["longer"]
    changes = f"communication.compression={compression} communication.start=100".split()
    model, curve = train(comm, *longer, *changes)
    assert same_bits(comm, model.params.flat)
    np.testing.assert_allclose(curve.loss[:100], plain.loss[:100], rtol=1e-3)
    assert comm.size == 1 or not np.allclose(curve.loss[105:], plain.loss[105:], rtol=1e-3)
    assert curve.validation[200] == pytest.approx(plain.validation[200], rel=0.01)


def test_a_loss_that_is_not_finite_ends_the_run_naming_the_step(comm, train):
    changes = "optimizer.lr=1e30", "optimizer.name=sgd", "optimizer.clip=0"
    with pytest.raises(
        click.ClickException, match=r"the loss is (nan|inf) at step \d; try optimizer.lr below 1e\+30"
    ):
        train(comm, *changes)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_two_bytes_train_nearly_as_well(comm, train, plain, dtype):
    model, curve = train(comm, f"precision.dtype={dtype}")
    assert same_bits(comm, model.params.flat) and curve.loss != plain[1].loss
    assert curve.validation[24] == pytest.approx(plain[1].validation[24], rel=0.02)


class Interrupted(Exception):
    pass


@pytest.fixture
def savers(comm, job, folder):
    """Make savers of a small run with some settings changed."""

    def saver(*changes, resume):
        changes = [*SMALL, *changes, "checkpoint.every=10", f"checkpoint.folder={folder}"]
        config, quiet = job("gpt_config").load(None, changes, comm.size), Console(quiet=True)
        return job("gpt_saver").Saver(comm, config, "text", resume, quiet)

    return saver


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("communication.compression=int8", "model.dropout=0.1"),
        ("communication.compression=powersgd", "communication.rank=2", "communication.start=4"),
        ("communication.compression=topk", "communication.start=12"),  # the checkpoint is of step 10
        ("precision.dtype=float16", "precision.loss_scale=64"),
    ],
)
def test_a_resumed_run_ends_with_the_same_bits(comm, train, savers, changes):
    def interrupt(step, curve):
        if step == 13:
            raise Interrupted

    whole, whole_curve = train(comm, *changes)
    first = savers(*changes, resume=False)
    with pytest.raises(Interrupted):
        train(comm, *changes, saver=first, report=interrupt)
    first.close()
    second, steps = savers(*changes, resume=True), []
    model, curve = train(comm, *changes, saver=second, report=lambda step, _: steps.append(step))
    second.close()
    assert steps == list(range(11, 25))
    assert np.array_equal(model.params.flat, whole.params.flat)
    assert (curve.loss, curve.validation) == (whole_curve.loss, whole_curve.validation)


def test_a_job_about_to_end_saves_and_stops_on_all_ranks_together(
    comm, train, plain, savers, folder, monkeypatch
):
    def told(step, curve):
        if step == 7 and comm.rank == comm.size - 1:
            signal.raise_signal(signal.SIGTERM)

    again = folder / "again"
    monkeypatch.setenv("MPICOLL_REQUEUE", str(again))
    before = signal.getsignal(signal.SIGTERM)
    first = savers(resume=False)
    _, curve = train(comm, saver=first, report=told)
    first.close()
    assert len(curve.loss) == 7 and signal.getsignal(signal.SIGTERM) == before
    comm.Barrier()
    assert again.exists()
    second = savers(resume=True)
    model, curve = train(comm, saver=second)
    second.close()
    whole, whole_curve = plain
    assert np.array_equal(model.params.flat, whole.params.flat) and curve.loss == whole_curve.loss


def settings(*changes):
    return [word for change in (*SMALL, *changes) for word in ("--set", change)]


def test_the_program_writes_curve_sample_timeline_and_checkpoints(comm, run, folder, capfd):
    changes = settings(
        f"data.cache={folder / 'cache'}",
        "data.files=4",
        f"output.folder={folder / 'out'}",
        "output.trace=[3, 4]",
        "output.sample=20",
        "output.plot=false",
        "checkpoint.every=12",
    )
    run("train_gpt", *changes, "--check", "--resume")
    shown = capfd.readouterr().out
    run("train_gpt", *changes, "--resume", "--set", "training.steps=30")
    comm.Barrier()
    resumed = capfd.readouterr().out
    if comm.rank:
        assert shown == ""
        return
    assert f"no checkpoint in {folder / 'out' / 'checkpoints'}: beginning with step 1" in shown
    assert "going on after step 24, which " in resumed and "-step-24" in resumed
    assert f"parameters on ranks 0 to {comm.size - 1}: " in shown
    assert "\ndef " in shown and "validation loss" in shown and "communicating" in shown
    with (folder / "out" / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, 31))
    assert {path.name for path in (folder / "out").iterdir()} == {"loss.csv", "trace.json", "checkpoints"}


def test_the_timeline_shows_the_steps_asked_for(comm, job, train, folder):
    timeline = mpicoll.timeline.Timeline(comm)
    train(comm, "output.trace=[3, 4]", "communication.overlap=true", timeline=timeline)
    timeline.write(folder / "trace.json")
    comm.Barrier()
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    for rank in range(comm.size):
        names = [event["name"] for event in events if event["pid"] == rank and event["ph"] == "X"]
        for name in "forward", "backward", "wait for the average", "update":
            assert names.count(name) == 2
        if comm.size > 1:
            assert names.count("Iallreduce") == 2


def absent(folder):
    return [folder / "absent.toml"]


def typo(folder):
    (folder / "a.json").write_text('{"model": {"layer": 1}}')
    return [folder / "a.json"]


def too_short(folder):
    (folder / "text.txt").write_bytes(b"short")
    pack_text([folder / "text.txt"], folder / "text.h5")
    return settings(f"data.file={folder / 'text.h5'}")


@pytest.mark.parametrize(
    ("make", "code", "message"),
    [
        (absent, 2, "absent.toml: No such file or directory"),
        (typo, 2, "a.json: unknown key 'model.layer'; did you mean model.layers?"),
        (
            lambda folder: settings("training.batch=0"),
            2,
            "training.batch: expected a whole number of at least 1",
        ),
        (lambda folder: settings("model.heads=3"), 2, "model.width = 16 is no multiple of model.heads = 3"),
        (too_short, 1, "are too few for batches of 16 sequences of 12 bytes"),
        (lambda folder: settings("data.file=absent.h5"), 1, "absent.h5: no such file"),
        (lambda folder: settings("output.folder=/proc"), 1, "no file can be made here"),
        (
            lambda folder: settings(
                "checkpoint.every=5", "checkpoint.folder=/proc", "data.files=4", f"data.cache={folder}"
            ),
            1,
            "/proc: no file can be made here",
        ),
    ],
)
def test_what_is_wrong_ends_all_ranks_with_one_message(comm, run, folder, capfd, make, code, message):
    arguments = comm.bcast(make(folder) if comm.rank == 0 else None)
    with pytest.raises(SystemExit) as end:
        run("train_gpt", "--set", f"output.folder={folder / 'out'}", *arguments)
    assert end.value.code == code
    error = capfd.readouterr().err
    assert (error.count("Error: ") == 1 and message in error) if comm.rank == 0 else error == ""


def test_checkpoints_of_another_model_are_refused_and_kept(comm, run, folder, capfd):
    here = [f"data.cache={folder / 'cache'}", "data.files=4", f"output.folder={folder / 'out'}"]
    small = settings(*here, "output.sample=0", "output.plot=false", "checkpoint.every=24")
    run("train_gpt", *small)
    comm.Barrier()
    before = sorted(path.name for path in (folder / "out" / "checkpoints").iterdir())
    capfd.readouterr()
    for words, message in ("--resume", "of another model"), ("--check", "checkpoints of an earlier run"):
        with pytest.raises(SystemExit) as end:
            run("train_gpt", *small, words, "--set", "model.width=8")
        assert end.value.code == 1
        error = capfd.readouterr().err
        assert message in error if comm.rank == 0 else error == ""
    comm.Barrier()
    assert sorted(path.name for path in (folder / "out" / "checkpoints").iterdir()) == before


def test_settings_are_compared_with_the_first(comm, run, folder, capfd):
    runs = "communication.compression=none", "communication.compression=topk communication.start=12"
    named = [word for settings in runs for word in ("--run", settings)]
    common = settings(f"data.cache={folder / 'cache'}", "data.files=4")
    run("compare_gpt", *common, *named, "--seeds", 2, "--sequences", 40, "--keep", folder / "kept.json")
    shown = capfd.readouterr().out
    comm.Barrier()
    kept = json.loads((folder / "kept.json").read_text())
    assert kept["ranks"] == comm.size and list(kept["results"]) == list(runs)
    first, second = kept["results"].values()
    sent = 1 if comm.size == 1 else 0.5 + 0.5 * second["compressed"] / first["sent"]
    assert second["sent"] == pytest.approx(sent * first["sent"])
    more = np.array(second["losses"]) / first["losses"] - 1
    assert len(more) == 2 and abs(more).max() < 0.1
    rows = [line.split() for line in shown.splitlines() if line.startswith("communication.")]
    assert [row[-4] for row in rows] == (["+0.00%", f"{more.mean():+.2%}"] if comm.rank == 0 else [])
    wrong = {"model.widht=3": "did you mean model.width?", f" {runs[0]}": "two --run say the same"}
    for last, message in wrong.items():
        with pytest.raises(SystemExit):  # before anything is trained
            run("compare_gpt", *common, *named, "--run", last)
        error = capfd.readouterr()
        assert error.out == "" and (message in error.err) == (comm.rank == 0)


def test_settings_that_diverge_do_not_keep_others_from_being_compared(comm, run, folder, capfd):
    runs = "training.steps=6", "optimizer.lr=1e30", "training.steps=7"
    named = [word for changes in runs for word in ("--run", changes)]
    common = settings(f"data.cache={folder / 'cache'}", "data.files=4")
    with pytest.raises(SystemExit) as end:
        run("compare_gpt", *common, *named, "--sequences", 40, "--keep", folder / "kept.json")
    assert end.value.code == 1
    shown = capfd.readouterr()
    comm.Barrier()
    kept = json.loads((folder / "kept.json").read_text())
    assert list(kept["results"]) == [runs[0], runs[2]] and list(kept["failed"]) == [runs[1]]
    assert ("1 of 3 settings did not train to the end" in shown.err) == (comm.rank == 0)
