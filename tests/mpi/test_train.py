"""Data-parallel training is the training of one rank, shared out; and the program around it."""

import csv
import hashlib
import importlib
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll.buckets import Buckets, Flat
from mpicoll.data import pack_text
from mpicoll.optim import broadcast_parameters

JOBS = Path(__file__).parents[2] / "jobs"
TEXT = np.frombuffer((JOBS / "train_text.py").read_bytes() + (JOBS / "ngram.py").read_bytes(), np.uint8)
PART = slice(0, 10_000), slice(10_000, None)


@pytest.fixture
def job(monkeypatch):
    monkeypatch.syspath_prepend(str(JOBS))
    return importlib.import_module("train_text")


@pytest.fixture
def alone():
    comm = mpicoll.Intracomm(MPI.COMM_SELF.Dup())
    yield comm
    comm.Free()


@pytest.fixture
def folder(comm, tmp_path):
    yield Path(comm.bcast(str(tmp_path)))
    comm.Barrier()


def same_bits(comm, array):
    return len(set(comm.allgather(hashlib.sha256(array).hexdigest()))) == 1


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
def test_the_curve_is_that_of_one_rank(comm, alone, job, batch):
    settings = job.Settings(steps=60, batch=batch, context=4, embed=8, hidden=32)
    model, curve = job.train(comm, TEXT[PART[0]], TEXT[PART[1]], settings)
    lone_model, lone_curve = job.train(alone, TEXT[PART[0]], TEXT[PART[1]], settings)
    assert same_bits(comm, model.params.flat)
    np.testing.assert_allclose(curve.loss, lone_curve.loss, rtol=0, atol=2e-5)
    assert list(curve.validation) == list(lone_curve.validation)
    np.testing.assert_allclose(
        list(curve.validation.values()), list(lone_curve.validation.values()), rtol=0, atol=2e-5
    )
    np.testing.assert_allclose(model.params.flat, lone_model.params.flat, rtol=0, atol=2e-3)
    if batch == 120:
        assert curve.loss[-1] < curve.loss[0] - 1


def test_the_same_run_gives_the_same_bits(comm, job):
    settings = job.Settings(steps=15, batch=31, context=4, embed=8, hidden=16)
    first, second = (job.train(comm, TEXT[PART[0]], TEXT[PART[1]], settings) for _ in range(2))
    assert np.array_equal(first[0].params.flat, second[0].params.flat)
    assert first[1].loss == second[1].loss


def test_a_loss_that_is_not_finite_ends_the_run_naming_the_step(comm, job):
    settings = job.Settings(steps=50, batch=8, context=4, embed=8, hidden=16, lr=1e30)
    with pytest.raises(
        click.ClickException, match=r"the loss is (nan|inf) at step \d; try --lr below 1e\+30"
    ):
        job.train(comm, TEXT[PART[0]], TEXT[PART[1]], settings)


def run(job, monkeypatch, *arguments):
    """Run the program as its command line would, on the ranks of this test."""
    monkeypatch.setattr(sys, "argv", ["train_text.py", *map(str, arguments)])
    job.start()


def test_the_program_writes_curve_and_sample(comm, job, folder, capfd, monkeypatch):
    run(
        job,
        monkeypatch,
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


def test_without_matplotlib_there_is_a_note(comm, job, folder, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run(job, monkeypatch, "--steps", 2, "--files", 4, "--cache", folder, "--out", folder)
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
        (damaged, "text.h5: not a readable HDF5 file"),
        (too_short, "are too few for a context of 8"),
        (blocked, "Not a directory"),
        (lambda folder: ("--steps", "many"), "'many' is not a valid integer"),
    ],
)
def test_bad_data_ends_all_ranks_with_one_message(comm, job, folder, capfd, monkeypatch, make, message):
    arguments = comm.bcast(make(folder) if comm.rank == 0 else None)
    with pytest.raises(SystemExit) as end:
        run(job, monkeypatch, "--out", folder / "out", *arguments)
    assert end.value.code == (2 if message.startswith("'many'") else 1)
    error = capfd.readouterr().err
    assert (error.count("Error: ") == 1 and message in error) if comm.rank == 0 else error == ""
