"""Checkpoints in one process: what is cut and how, HDF5 made by hand, and every kind of damage."""

import errno
import fcntl
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import warnings
from functools import partial

import h5py
import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from mpicoll.io import hdf5
from mpicoll.io.checkpoint import CheckpointError, Checkpoints, Shard, folder, layout

DTYPES = [np.float32, ">f8", np.float16, np.int64, np.bool_, np.complex64, ml_dtypes.bfloat16]


def state(value=0.0):
    return {"params": {"weight": np.full((5, 4), float(value)), "bias": np.full(3, value, np.float32)}}


def values(arrays):
    return {float(array.flat[0]) for array in arrays["params"].values()}


@pytest.fixture
def checkpoints(tmp_path):
    with Checkpoints(tmp_path / "run", MPI.COMM_SELF, model={"width": 4}) as made:
        yield made


@pytest.fixture
def two(checkpoints):
    """Checkpoints of steps 1 and 2, in which everything is 1 and 2."""
    for step in 1, 2:
        checkpoints.save(step, state(step), extra={"lr": 0.5 * step})
    return checkpoints


def newest(checkpoints):
    return folder.kept(checkpoints.folder)[-1].path


# -- layout ------------------------------------------------------------------------------------------


def test_nested_states_become_paths():
    found = layout.entries({"a": {"b": np.zeros(2), "c/d": np.zeros(())}, "e": np.zeros((0, 3))})
    assert [entry.name for entry in found] == ["a/b", "a/c/d", "e"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "the state holds no array"),
        ({"a": 1.0}, "a: float is not an array; what is no array goes into extra="),
        ({"a": [1.0]}, "a: list is not an array"),
        ({"a": np.array(["x"])}, "a: arrays of <U1 cannot be kept"),
        ({"a": np.array([None])}, "a: arrays of object cannot be kept"),
        ({"a": np.zeros(2, "m8[s]")}, "cannot be kept"),
        ({"": np.zeros(1)}, "a name that HDF5 cannot hold: ''"),
        ({"a": {"../b": np.zeros(1)}}, "cannot hold: 'a/../b'"),
        ({"/a": np.zeros(1)}, "cannot hold: '/a'"),
        ({3: np.zeros(1)}, "cannot hold: '3'"),
        ({"a": np.zeros(1), "a/b": np.zeros(1)}, "two things in the state are called 'a'"),
        ({"a": {"b": np.zeros(1)}, "a/b": np.zeros(1)}, "two things in the state are called 'a/b'"),
        ({"a": Shard(np.zeros(3), (4,), (2,))}, r"a: a block of shape \(3,\) at \(2,\) does not lie in"),
        ({"a": Shard(np.zeros(3), (4, 1), (0, 0))}, "does not lie in shape"),
        ({"a": Shard(np.zeros(3), (4,), (-1,))}, "does not lie in shape"),
    ],
)
def test_a_wrong_state_is_refused(wrong, message):
    with pytest.raises(CheckpointError, match=message):
        layout.entries(wrong)


@pytest.mark.parametrize("writers", [1, 2, 3, 7])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3000, 1000), (2, 700_000), (1, 1, 999_999), (0, 4)])
def test_pieces_cover_an_array_once(shape, writers):
    whole = layout.entries({"a": np.broadcast_to(np.float64(0), shape)})
    pieces = layout.cut(whole, [], range(writers))["a"]
    seen = np.zeros(shape, int)
    for piece in pieces:
        seen[piece.within((0,) * len(shape))] += 1
        assert piece.source == piece.file < writers
    assert (seen == 1).all()
    assert len(pieces) <= max(1, seen.nbytes // layout.SMALL)


def test_small_arrays_go_round_the_writers():
    many = layout.entries({str(i): np.zeros(10) for i in range(8)})
    assert [pieces[0].file for pieces in layout.cut(many, [], [0, 1, 1, 2]).values()] == [
        0,
        1,
        2,
        0,
        1,
        2,
        0,
        1,
    ]


def test_very_large_arrays_are_cut_also_for_one_writer():
    huge = layout.entries({"a": np.broadcast_to(np.float32(0), (3, 100_000_000))})
    pieces = layout.cut(huge, [], [0])["a"]
    assert max(np.prod(piece.shape) * 4 for piece in pieces) <= layout.LARGE


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([((0, 0), (2, 3)), ((1, 0), (3, 3))], "overlap"),
        ([((0, 0), (2, 3)), ((2, 0), (1, 3))], "hold 9 of 12 elements"),
        ([((0, 0), (0, 3)), ((0, 0), (0, 3))], "hold 0 of 12 elements"),
    ],
)
def test_shards_must_cover_an_array_once(blocks, message):
    mine = layout.entries({"a": Shard(np.zeros(blocks[0][1]), (4, 3), blocks[0][0])})
    with pytest.raises(CheckpointError, match=message):
        layout.cut(mine, [{"a": block} for block in blocks], [0, 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_keep_their_names(dtype):
    dtype = np.dtype(dtype)
    assert layout.dtype_of(layout.dtype_name(dtype)) == dtype


# -- HDF5 made by hand -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (40, 51), (3, 1, 2)])
def test_hdf5_reads_what_we_write(tmp_path, dtype, shape):
    block = np.array(np.arange(np.prod(shape, dtype=int)).reshape(shape) % 7, dtype)
    record = hdf5.write(tmp_path / "a.h5", [("x/0", block), ("deep/er/name é/1", block.T)])
    content = (tmp_path / "a.h5").read_bytes()
    assert (record["nbytes"], record["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
    assert hdf5.checksum(tmp_path / "a.h5") == record["sha256"]
    with h5py.File(tmp_path / "a.h5") as file:
        for name, expected in ("x/0", block), ("deep/er/name é/1", block.T):
            kind = np.uint16 if dtype is ml_dtypes.bfloat16 else dtype
            assert file[name].dtype == kind and file[name].shape == expected.shape
            found = np.asarray(file[name][()], kind)
            assert found.tobytes() == np.ascontiguousarray(expected).tobytes()
            out = np.empty(expected.shape, dtype)
            inside = tuple(slice(0, n) for n in expected.shape)
            hdf5.read(tmp_path / "a.h5", record["offsets"][name], expected.shape, inside, out)
            assert out.tobytes() == np.ascontiguousarray(expected).tobytes()


def test_a_file_of_a_thousand_blocks(tmp_path):
    blocks = [(f"layer{i}/weight/0", np.full((i % 5, 3), i, np.int32)) for i in range(1, 1000)]
    hdf5.write(tmp_path / "a.h5", [block for block in blocks if block[1].size])
    with h5py.File(tmp_path / "a.h5") as file:
        assert all((file[name][()] == block).all() for name, block in blocks if block.size)


def test_part_of_a_block_is_read(tmp_path):
    block = np.arange(120.0).reshape(6, 4, 5)
    offset = hdf5.write(tmp_path / "a.h5", [("x", block)])["offsets"]["x"]
    for inside in np.s_[2:5, 1:3, 0:5], np.s_[0:6, 0:4, 0:5], np.s_[1:2, 0:4, 0:5], np.s_[5:6, 3:4, 4:5]:
        for order in "CF":
            out = np.empty(block[inside].shape, order=order)
            hdf5.read(tmp_path / "a.h5", offset, block.shape, inside, out)
            assert (out == block[inside]).all()


def test_the_parts_show_as_one_file(two, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    moved = newest(two).rename(tmp_path / "elsewhere")
    with h5py.File(moved / "checkpoint.h5") as file:
        assert (file["params/weight"][:] == 2).all() and file["params/weight"].shape == (5, 4)
        assert file["params/bias"].attrs["dtype"] == b"<f4"


# -- saving and loading ------------------------------------------------------------------------------


def test_the_newest_is_loaded_or_that_of_a_step(two):
    fresh = state()
    saved = two.load(fresh)
    assert (saved.step, saved.extra, saved.ranks, values(fresh)) == (2, {"lr": 1.0}, 1, {2.0})
    assert two.load(fresh, step=1).step == 1 and values(fresh) == {1.0}
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; complete ones are of steps: 1, 2"):
        two.load(fresh, step=7)


def test_nothing_saved_is_no_error(checkpoints):
    assert checkpoints.load(state()) is None
    with pytest.raises(CheckpointError, match="complete ones are of steps: none"):
        checkpoints.load(state(), step=3)


def test_after_going_back_the_last_saved_counts(two):
    two.load(state(), step=1)
    two.save(2, state(7))
    again = state()
    assert two.load(again).step == 2 and values(again) == {7.0}


def test_the_last_few_stay(checkpoints):
    checkpoints.keep = 2
    for step in range(5):
        checkpoints.save(step, state(step))
        assert [one.step for one in folder.kept(checkpoints.folder)] == list(range(5))[
            max(step - 1, 0) : step + 1
        ]


def test_what_was_never_completed_goes(two):
    torn = two.folder / "000003-step-3"
    shutil.copytree(newest(two), torn)
    (torn / "manifest.json").unlink()
    assert two.load(state()).step == 2
    two.save(4, state(4))
    assert [one.path.name for one in folder.kept(two.folder)] == [
        "000001-step-1",
        "000002-step-2",
        "000004-step-4",
    ]


def test_other_things_in_the_folder_are_left_alone(two):
    for name in "loss.csv", "000009-step-x", "step-9":
        (two.folder / name).mkdir()
    two.save(3, state(3))
    assert two.load(state()).step == 3
    assert {"loss.csv", "000009-step-x", "step-9"} < {path.name for path in two.folder.iterdir()}


def test_an_earlier_runs_checkpoints_are_not_pushed_out(two):
    with Checkpoints(two.folder, MPI.COMM_SELF, model={"width": 4}) as careless:
        with pytest.raises(
            CheckpointError, match="holds checkpoints of an earlier run, 000002-step-2 the newest"
        ):
            careless.save(1, state())
        with pytest.raises(CheckpointError, match="load one of them first, or save to another folder"):
            careless.afresh()
        careless.load(state())
        careless.save(3, state())


def test_a_copy_is_saved_while_the_arrays_change(checkpoints):
    arrays = state(1)
    for step in range(1, 4):
        checkpoints.save(step, arrays, wait=False)
        for array in arrays["params"].values():
            array += 1
    checkpoints.wait()
    for step in range(1, 4):
        assert checkpoints.load(arrays, step=step).step == step and values(arrays) == {float(step)}


def test_without_threads_it_waits_and_says_so(checkpoints):
    checkpoints._ranks.threaded = False
    with pytest.warns(UserWarning, match="no MPI_THREAD_MULTIPLE: the job waits for its checkpoints"):
        checkpoints.save(1, state(1), wait=False)
    assert checkpoints._thread is None and len(folder.kept(checkpoints.folder)) == 1


def test_an_error_does_not_hide_behind_another(tmp_path):
    with pytest.raises(ZeroDivisionError), Checkpoints(tmp_path, MPI.COMM_SELF) as checkpoints:
        checkpoints.save(1, state(), wait=False)
        1 / 0  # noqa: B018
    assert [one.complete for one in folder.kept(tmp_path)] == [True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": -1}, "step must be an integer, not negative, got -1"),
        ({"step": 1.5}, "step must be an integer"),
        ({"step": True}, "step must be an integer"),
        ({"step": 1, "extra": {"a": np.float32(1)}}, "extra must be what JSON can hold"),
    ],
)
def test_wrong_arguments_are_refused(checkpoints, arguments, message):
    with pytest.raises(CheckpointError, match=message):
        checkpoints.save(state=state(), **arguments)
    assert not folder.kept(checkpoints.folder)


def test_a_new_run_begins_in_an_empty_folder(checkpoints):
    checkpoints.afresh()
    checkpoints.save(1, state())
    checkpoints.save(2, state())


def test_a_model_is_compared_as_json_has_it(tmp_path):
    for _ in range(2):
        with Checkpoints(tmp_path, MPI.COMM_SELF, model={"shape": (2, 3), 1: None}) as checkpoints:
            checkpoints.load(state())
            checkpoints.save(1, state())
    with pytest.raises(CheckpointError, match="model must be what JSON can hold"):
        Checkpoints(tmp_path, MPI.COMM_SELF, model={1, 2})


def test_at_least_one_stays(tmp_path):
    with pytest.raises(CheckpointError, match="keep must be a whole number of at least 1, got 0"):
        Checkpoints(tmp_path, MPI.COMM_SELF, keep=0)


class Device:
    """What CuPy arrays do, as far as checkpoints need it."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.ndim = array, array.shape, array.dtype, array.ndim

    def __getitem__(self, where):
        return Device(self.array[where])

    def get(self):
        return self.array.copy()

    def set(self, host):
        self.array[...] = host


def test_device_arrays(checkpoints):
    there = Device(np.arange(12.0).reshape(3, 4))
    for wait in True, False:
        checkpoints.save(1, {"a": there, "b": Shard(there[1:], (2, 4), (0, 0))}, wait=wait)
    back = Device(np.zeros((3, 4)))
    part = Device(np.zeros((2, 4)))
    checkpoints.load({"a": back, "b": Shard(part, (2, 4), (0, 0))})
    assert (back.array == there.array).all() and (part.array == there.array[1:]).all()


# -- what does not fit -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"params": {"weight": np.zeros((5, 4))}}, "'params/bias' is not in the state"),
        ({**state(), "more": np.zeros(1)}, "'more' is not in the checkpoint"),
        (
            {"params": {"weight": np.zeros((5, 5)), "bias": np.zeros(3, "f4")}},
            r"'params/weight' is <f8 of shape \(5, 4\) in the checkpoint, <f8 of shape \(5, 5\) in the state",
        ),
        (
            {"params": {"weight": np.zeros((5, 4)), "bias": np.zeros(3)}},
            r"'params/bias' is <f4 of .*, <f8 of",
        ),
    ],
)
def test_another_model_is_refused(two, other, message):
    with pytest.raises(CheckpointError, match=f"000002-step-2 is of another model: {message}"):
        two.load(other)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"width": 8}, "width is 4 in the checkpoint, 8 here"),
        ({"width": 4, "depth": 2}, "depth is None in the checkpoint, 2 here"),
        ("gpt", r"\{'width': 4\} in the checkpoint, 'gpt' here"),
    ],
)
def test_another_configuration_is_refused(two, model, message):
    two.model = model
    with pytest.raises(CheckpointError, match=f"is of another model: {message}"):
        two.load(state())


def test_arrays_that_cannot_be_written_are_refused(two):
    arrays = state()
    arrays["params"]["bias"].flags.writeable = False
    with pytest.raises(CheckpointError, match="params/bias: the array is read-only"):
        two.load(arrays)


def test_a_newer_format_is_refused_and_no_older_one_taken(two):
    manifest = folder.read_manifest(newest(two))
    folder.write_manifest(newest(two), {**manifest, "format": 2})
    with pytest.raises(
        CheckpointError, match="000002-step-2: format 2, this version of mpicoll reads format 1"
    ):
        two.load(state())


# -- damage ------------------------------------------------------------------------------------------


def hurt(two, damage, name):
    """Damage a file of the newest checkpoint: the older one is loaded, with a warning."""
    path = newest(two) / name
    content = path.read_bytes()
    damage(path)
    arrays = state()
    with pytest.warns(UserWarning, match=f"{name}: .*passed over"):
        assert two.load(arrays).step == 1
    assert values(arrays) == {1.0}
    path.write_bytes(content)


def test_truncation_at_any_byte_is_noticed(two):
    for name, stride in ("manifest.json", 1), ("part-00000.h5", 37):
        for size in range(0, (newest(two) / name).stat().st_size, stride):
            hurt(two, lambda path, size=size: os.truncate(path, size), name)
    assert two.load(state()).step == 2


def test_a_changed_byte_is_noticed(two):
    for name in "manifest.json", "part-00000.h5":
        content = (newest(two) / name).read_bytes()
        for place in range(0, len(content), 1 + len(content) // 150):
            changed = bytearray(content)
            changed[place] ^= 4
            hurt(two, lambda path, changed=changed: path.write_bytes(changed), name)


def test_what_is_missing_or_too_long_is_noticed(two):
    hurt(two, lambda path: path.unlink(), "part-00000.h5")
    hurt(two, lambda path: path.write_bytes(path.read_bytes() + b"\0"), "part-00000.h5")
    hurt(two, lambda path: path.write_bytes(b"\xff\xfe"), "manifest.json")


def test_where_nothing_is_whole_the_run_does_not_start_afresh(two):
    for one in folder.kept(two.folder):
        os.truncate(one.path / "part-00000.h5", 100)
    with (
        pytest.warns(UserWarning),
        pytest.raises(CheckpointError, match="no checkpoint is whole: .*; .*damaged"),
    ):
        two.load(state())


def test_damaged_ones_do_not_push_out_whole_ones(two):
    two.keep = 2
    os.truncate(newest(two) / "part-00000.h5", 100)
    with pytest.warns(UserWarning):
        two.load(state())
    two.save(3, state(3))
    assert [one.step for one in folder.kept(two.folder)] == [1, 2, 3]
    two.save(4, state(4))
    assert [one.step for one in folder.kept(two.folder)] == [3, 4]


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_leaves_older_checkpoints_alone(two, wait):
    whole = (newest(two) / "part-00000.h5").stat().st_size
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    names = [one.path.name for one in folder.kept(two.folder)]
    for limit in (0, 1, 600, whole - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(
                CheckpointError, match="rank 0: .*File too large; the checkpoint of step 3 is not"
            ):
                two.save(3, state(3), wait=wait)
                two.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
        assert [one.path.name for one in folder.kept(two.folder)] == names
        assert two.load(state()).step == 2
    two.save(3, state(3))
    assert two.load(state()).step == 3


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with Checkpoints(tmp_path / "file" / "run", MPI.COMM_SELF) as checkpoints:
        for use in checkpoints.afresh, checkpoints.check_writable, partial(checkpoints.save, 1, state()):
            with pytest.raises(CheckpointError, match="file/run: Not a directory"):
                use()


def test_a_folder_that_cannot_be_written_is_noticed_before_the_first_save():
    with Checkpoints("/proc", MPI.COMM_SELF) as checkpoints:
        with pytest.raises(CheckpointError, match="/proc: no file can be made here"):
            checkpoints.afresh()


# -- locks -------------------------------------------------------------------------------------------


def test_locks_of_others_do_not_matter(two):
    with (newest(two) / "part-00000.h5").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert two.load(state()).step == 2


def test_a_file_system_without_locks_is_told_of_once(checkpoints, monkeypatch):
    def refuse(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder.fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="this file system refuses file locks.*HDF5_USE_FILE_LOCKING=FALSE"):
        checkpoints.save(1, state(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints.save(2, state(2))
        assert checkpoints.load(state()).step == 2


def test_a_checkpoint_is_complete_when_the_program_just_ends(tmp_path):
    program = (
        "import sys, numpy as np\nfrom mpi4py import MPI\nfrom mpicoll.checkpoint import Checkpoints\n"
        "Checkpoints(sys.argv[1], MPI.COMM_SELF).save(5, {'a': np.ones(3_000_000)}, wait=False)\n"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True, timeout=60)
    assert [(one.step, one.complete) for one in folder.kept(tmp_path)] == [(5, True)]
    assert (
        json.loads((folder.kept(tmp_path)[0].path / "manifest.json").read_text().splitlines()[0])["step"] == 5
    )
