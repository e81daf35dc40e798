"""Checkpoints of several ranks: read back by any number of them, and errors that all ranks share."""

import errno
import os
import warnings
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from mpicoll.io.checkpoint import CheckpointError, Checkpoints, Shard, folder, layout, saving
from mpicoll.io.sampler import part

ROWS = 101  # of the array that is spread over the ranks; divides by no number of ranks


@pytest.fixture
def where(comm, tmp_path):
    """One folder for all ranks."""
    yield Path(comm.bcast(str(tmp_path))) / "run"
    comm.Barrier()


@pytest.fixture(params=[False, True], ids=["file per rank", "file per node"])
def per_node(request):
    return request.param


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Arrays of a test's size are cut, too."""
    monkeypatch.setattr(layout, "SMALL", 1 << 12)


def content():
    random = np.random.default_rng(5)
    return {
        "weight": random.standard_normal((70, 90)).astype(np.float32),
        "wide": random.standard_normal((3, 20_001)).T,
        "bias": random.standard_normal(5).astype(ml_dtypes.bfloat16),
        "loss": np.array(2.5),
        "mask": np.array([True, False]),
        "none": np.zeros((0, 3)),
    }, random.standard_normal((ROWS, 3))


def state(comm, fill=True):
    """Return arrays that all ranks have, and rows of one that each has a part of."""
    whole, spread = content()
    rows = part(ROWS, comm.rank, comm.size)
    whole = {name: array if fill else np.zeros_like(array) for name, array in whole.items()}
    mine = spread[rows].copy() if fill else np.zeros_like(spread[rows])
    return {"params": whole, "optimizer": {"mean": Shard(mine, (ROWS, 3), (rows.start, 0))}}


def check(comm, arrays):
    whole, spread = content()
    for name, array in arrays["params"].items():
        assert array.tobytes() == whole[name].tobytes(), name
    assert (arrays["optimizer"]["mean"].array == spread[part(ROWS, comm.rank, comm.size)]).all()


def some(comm, count):
    """The first `count` ranks as a communicator; None on the others."""
    chosen = comm.Split(0 if comm.rank < count else MPI.UNDEFINED, comm.rank)
    return None if chosen == MPI.COMM_NULL else chosen


@pytest.mark.parametrize("wait", [True, False])
def test_any_number_of_ranks_reads_what_any_number_wrote(comm, where, per_node, wait):
    for writers in {1, comm.size // 2 or 1, comm.size}:
        group, place = some(comm, writers), where / str(writers)
        if group:
            with Checkpoints(place, group, per_node=per_node) as checkpoints:
                assert checkpoints.load(state(group)) is None
                checkpoints.save(7, state(group), extra=[writers], wait=wait)
            group.Free()
        comm.Barrier()
        for readers in {1, (comm.size + 1) // 2, comm.size}:
            if group := some(comm, readers):
                arrays = state(group, fill=False)
                with Checkpoints(place, group) as checkpoints:
                    saved = checkpoints.load(arrays)
                assert (saved.step, saved.extra, saved.ranks) == (7, [writers], writers)
                check(group, arrays)
                group.Free()


def test_ranks_share_the_work_and_the_parts_show_as_one_file(comm, where, per_node):
    with Checkpoints(where, comm, per_node=per_node) as checkpoints:
        checkpoints.save(1, state(comm))
    comm.Barrier()
    path = folder.kept(where)[0].path
    sizes = [file.stat().st_size for file in sorted(path.glob("part-*.h5"))]
    assert len(sizes) == 1 if per_node else max(sizes) < sum(sizes) / comm.size * 1.3
    with h5py.File(path / "checkpoint.h5", locking=False) as file:
        whole, spread = content()
        assert (file["optimizer/mean"][:] == spread).all()
        for name, array in whole.items():
            assert np.asarray(file["params"][name]).tobytes() == array.tobytes()


def test_the_copy_is_of_the_moment_of_the_call(comm, where, per_node):
    arrays = state(comm)
    with Checkpoints(where, comm, per_node=per_node) as checkpoints:
        for step in range(3):
            checkpoints.save(step, arrays, wait=False)
            for array in [*arrays["params"].values(), arrays["optimizer"]["mean"].array]:
                array[...] = 0
            comm.Barrier()
            arrays = state(comm)
        arrays = state(comm, fill=False)
        assert checkpoints.load(arrays).step == 2
        check(comm, arrays)


def test_training_goes_on_while_a_thread_writes(comm, where):
    total = np.ones(50_000)
    with Checkpoints(where, comm) as checkpoints:
        for step in range(10):
            checkpoints.save(step, {"total": total}, wait=False)
            for _ in range(5):
                comm.Allreduce(MPI.IN_PLACE, total)
                total /= comm.size
    assert [one.step for one in folder.kept(where)] == [7, 8, 9]


def test_replicas_of_a_shard_are_written_once(comm, where):
    half = slice(0, 4) if comm.rank % 2 == 0 else slice(4, 8)
    if comm.size == 1:
        half = slice(0, 8)
    whole = np.arange(8000.0).reshape(8, 1000)
    with Checkpoints(where, comm) as checkpoints:
        checkpoints.save(1, {"a": Shard(whole[half], (8, 1000), (half.start, 0))})
        arrays = {"a": np.zeros((8, 1000))}
        checkpoints.load(arrays)  # what was spread may be whole another time
    assert (arrays["a"] == whole).all()
    comm.Barrier()
    assert sum(file.stat().st_size for file in where.rglob("part-*.h5")) < 64_000 + 8192 * comm.size


def test_a_state_that_differs_between_ranks_is_refused(comm, where):
    arrays = {"a": np.zeros(3 if comm.rank < comm.size - 1 else 4)}
    with Checkpoints(where, comm) as checkpoints:
        if comm.size == 1:
            checkpoints.save(1, arrays)
            return
        words = (
            rf"rank {comm.size - 1}: the state differs from that of rank 0: "
            r"'a', <f8 of shape \(4,\), here, 'a', <f8 of shape \(3,\), there"
        )
        with pytest.raises(CheckpointError, match=words):
            checkpoints.save(1, arrays)
        with pytest.raises(CheckpointError, match=r"rank 0: b: float is not an array"):
            checkpoints.save(1, {"b": 1.0 if comm.rank == 0 else np.zeros(1)})
        checkpoints.save(1, {"a": np.zeros(3)})


def test_every_rank_hears_of_what_rank_0_alone_sees(comm, where):
    with Checkpoints(where, comm) as checkpoints:
        with pytest.raises(CheckpointError, match="extra must be what JSON can hold"):
            checkpoints.save(1, state(comm), extra={1, 2} if comm.rank == 0 else None)
        with pytest.raises(CheckpointError, match="no checkpoint of step 4"):
            checkpoints.load(state(comm), step=4)
        checkpoints.save(1, state(comm))
    comm.Barrier()
    with Checkpoints(where, comm, model="another") as checkpoints:
        with pytest.raises(CheckpointError, match="of another model: None in the checkpoint, 'another' here"):
            checkpoints.load(state(comm))


@pytest.mark.parametrize("wait", [True, False])
def test_one_full_disk_stops_the_checkpoint_on_all_ranks(comm, where, monkeypatch, wait):
    with Checkpoints(where, comm) as checkpoints:
        checkpoints.save(1, state(comm))
        with monkeypatch.context() as patch:
            if comm.rank == comm.size - 1:

                def full(path, blocks):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

                patch.setattr(saving, "write", full)
            words = (
                rf"rank {comm.size - 1}: .*part-.*: No space left on device; the checkpoint of step 2 is not"
            )
            with pytest.raises(CheckpointError, match=words):
                checkpoints.save(2, state(comm), wait=wait)
                checkpoints.wait()
        comm.Barrier()
        assert [one.path.name for one in folder.kept(where)] == ["000001-step-1"]
        arrays = state(comm, fill=False)
        assert checkpoints.load(arrays).step == 1
        check(comm, arrays)
        checkpoints.save(2, state(comm))


def test_a_folder_that_is_not_shared_is_told(comm, where, monkeypatch):
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(saving, "write", lambda path, blocks: (path / "absent").open("rb"))
    with Checkpoints(where, comm) as checkpoints:
        with pytest.raises(
            CheckpointError, match=f"rank {comm.size - 1}: .*is it on a disk that all nodes share?"
        ):
            checkpoints.save(1, state(comm))


def test_all_ranks_pass_over_what_is_damaged(comm, where):
    with Checkpoints(where, comm) as checkpoints:
        for step in 1, 2:
            checkpoints.save(step, state(comm))
        comm.Barrier()
        parts = sorted(folder.kept(where)[-1].path.glob("part-*.h5"))
        if comm.rank == 0:
            os.truncate(parts[-1], parts[-1].stat().st_size - 1)
        comm.Barrier()
        arrays = state(comm, fill=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert checkpoints.load(arrays).step == 1
        check(comm, arrays)
        told = [str(one.message) for one in caught if "passed over" in str(one.message)]
        assert len(told) == (comm.rank == 0) and all(parts[-1].name in words for words in told)
        comm.Barrier()
        if comm.rank == 0:
            parts[0].with_name("manifest.json").write_text("")
            os.truncate(folder.kept(where)[0].path / "part-00000.h5", 10)
        comm.Barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(CheckpointError, match="no checkpoint is whole: .*step-2.*; .*step-1"):
                checkpoints.load(arrays)


def test_the_communicator_is_given_back(comm, where, per_node):
    checkpoints = Checkpoints(where, comm, per_node=per_node)
    checkpoints.save(1, state(comm), wait=False)
    checkpoints.close()
    checkpoints.close()
    assert checkpoints._ranks.comm == MPI.COMM_NULL
    comm.Barrier()
    assert folder.kept(where)[0].complete
