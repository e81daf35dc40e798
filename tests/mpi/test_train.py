"""Data-parallel training is the training of one rank, shared out; and the program around it."""

import csv
import sys

import click
import numpy as np
import pytest
from mlp import same_bits

from mpicoll.io.text import pack_text
from mpicoll.train.buckets import Buckets, Flat
from mpicoll.train.optim import broadcast_parameters


@pytest.fixture
def train(job, text):
    """Train a small model with some settings changed."""

    def train(comm, **changes):
        settings = {"context": 4, "embed": 8, "hidden": 16, **changes}
        return job("train_text").train(comm, *text, job("train_text").Settings(**settings))

    return train


@pytest.mark.parametrize("flat", [True, False])
def test_all_start_from_the_roots_parameters(comm, flat):
    root = comm.size - 1
    params = Flat.of({"a": np.full((2, 3), comm.rank + 1.0), "b": np.full((), comm.rank + 2.0)})
    broadcast_parameters(params if flat else dict(params), comm, root=root)
    assert params.flat.tolist() == [root + 1.0] * 6 + [root + 2.0]


@pytest.mark.parametrize("nbytes", [1 << 20, 4000, 0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_gradients_are_averaged_in_place(comm, nbytes, dtype):
    params = {"a": np.zeros((30, 40), dtype), "b": np.zeros(7, dtype), "c": np.zeros((0, 3), dtype)}
    gradients = Buckets(params, comm, nbytes)
    for turn in range(3):
        for gradient in gradients.values():
            gradient[...] = (np.arange(gradient.size).reshape(gradient.shape) % 50 + comm.rank) * (turn + 1)
        before = {name: id(gradient) for name, gradient in gradients.items()}
        gradients.average()
        for name, gradient in gradients.items():
            expected = (np.arange(gradient.size).reshape(gradient.shape) % 50 + (comm.size - 1) / 2) * (
                turn + 1
            )
            np.testing.assert_allclose(gradient, expected, rtol=2e-3 if dtype == np.float16 else 1e-6)
            assert id(gradient) == before[name] and same_bits(comm, np.ascontiguousarray(gradient))


@pytest.mark.parametrize(
    "batch", [120, 50, 2]
)  # 50 does not divide by 3; with 2, ranks from the third on idle
def test_the_curve_is_that_of_one_rank(comm, alone, train, batch):
    model, curve = train(comm, steps=60, batch=batch, hidden=32)
    lone_model, lone_curve = train(alone, steps=60, batch=batch, hidden=32)
    assert same_bits(comm, model.params.flat)
    np.testing.assert_allclose(curve.loss, lone_curve.loss, rtol=0, atol=1e-4)
    assert list(curve.validation) == list(lone_curve.validation)
    np.testing.assert_allclose(
        list(curve.validation.values()), list(lone_curve.validation.values()), rtol=0, atol=1e-4
    )
    np.testing.assert_allclose(model.params.flat, lone_model.params.flat, rtol=0, atol=2e-3)
    if batch == 120:
        assert curve.loss[-1] < curve.loss[0] - 1


def test_the_same_run_gives_the_same_bits(comm, train):
    first, second = (train(comm, steps=15, batch=31) for _ in range(2))
    assert np.array_equal(first[0].params.flat, second[0].params.flat)
    assert first[1].loss == second[1].loss


def test_a_loss_that_is_not_finite_ends_the_run_naming_the_step(comm, train):
    with pytest.raises(
        click.ClickException, match=r"the loss is (nan|inf) at step \d; try --lr below 1e\+30"
    ):
        train(comm, steps=50, batch=8, lr=1e30)


def test_the_program_writes_curve_and_sample(comm, run, folder, capfd):
    run(
        "train_text",
        "--steps",
        25,
        "--batch",
        31,
        "--files",
        4,
        "--cache",
        folder / "c",
        "--out",
        folder / "o",
        "--check",
    )
    shown = capfd.readouterr().out
    if comm.rank:
        assert shown == ""
        return
    assert f"parameters on ranks 0 to {comm.size - 1}: " in shown
    assert "\ndef " in shown and "validation loss" in shown and "gain" in shown
    with (folder / "o" / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, 26))
    assert rows[-1]["validation"]
    written = {path.name for path in (folder / "o").iterdir()} | {
        path.suffix for path in (folder / "c").iterdir()
    }
    assert written - {"loss.png"} == {"loss.csv", ".h5"}
    if "loss.png" in written:
        assert (folder / "o" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_a_note(comm, run, folder, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run("train_text", "--steps", 2, "--files", 4, "--cache", folder, "--out", folder)
    assert ("matplotlib is not installed" in capfd.readouterr().out) == (comm.rank == 0)
    comm.Barrier()
    assert (folder / "loss.csv").exists() and not (folder / "loss.png").exists()


def damaged(folder):
    (folder / "text.h5").write_bytes(b"no HDF5")
    return "--data", folder / "text.h5"


def too_short(folder):
    (folder / "text.txt").write_bytes(b"short")
    pack_text([folder / "text.txt"], folder / "text.h5")
    return "--data", folder / "text.h5"


def blocked(folder):
    (folder / "file").touch()
    return "--cache", folder / "file" / "cache"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: ("--data", folder / "absent.h5"), "absent.h5: no such file"),
        (lambda folder: ("--data", folder), ": a directory, expected a file"),
        (damaged, "text.h5: not a readable HDF5 file"),
        (too_short, "are too few for a context of 8"),
        (blocked, "Not a directory"),
        (lambda folder: ("--out", "/proc"), "no file can be made here"),  # before anything is trained
        (lambda folder: ("--steps", "many"), "'many' is not a valid integer"),
    ],
)
def test_bad_data_ends_all_ranks_with_one_message(comm, run, folder, capfd, make, message):
    arguments = comm.bcast(make(folder) if comm.rank == 0 else None)
    with pytest.raises(SystemExit) as end:
        run("train_text", "--out", folder / "out", *arguments)
    assert end.value.code == (2 if message.startswith("'many'") else 1)
    error = capfd.readouterr().err
    assert (error.count("Error: ") == 1 and message in error) if comm.rank == 0 else error == ""


def test_a_run_that_ends_no_better_than_guessing_has_failed(comm, run, folder, capfd):
    small = "--steps", 20, "--files", 4, "--cache", folder / "c", "--out", folder / "o", "--no-plot"
    with pytest.raises(SystemExit) as end:
        run("train_text", *small, "--lr", 1000)
    shown = capfd.readouterr()
    assert end.value.code == 1
    message = "nats per byte, that of guessing ln 256 = 5.5452; try --lr below 1000\n"
    assert shown.err.endswith(message) if comm.rank == 0 else shown.err == ""
    assert "gain" not in shown.out and (comm.rank or (folder / "o" / "loss.csv").exists())
