"""Arrays of samples in HDF5, tokens as samples, batches made ahead, and the ends of epochs."""

import os
import threading
import time

import h5py
import numpy as np
import pytest

from mpicoll.io.arrays import ArrayData, Windows, pack_arrays
from mpicoll.io.prefetch import Prefetch
from mpicoll.io.sampler import Sampler
from mpicoll.io.text import DataError, TextData, pack_text

COUNT = 1000
ARRAYS = {
    "x": np.random.default_rng(0).standard_normal((COUNT, 3, 5)).astype(np.float32),
    "y": np.arange(COUNT, dtype=np.uint16),
    "group/mask": np.arange(COUNT * 2).reshape(COUNT, 2) % 3 == 0,
}
PLACES = [slice(10, 20), slice(None), slice(990, 2000), slice(0, 0), [7, 3, 7], [-1, 0], np.arange(0, 900, 7)]


@pytest.fixture(params=["packed", "chunked"])
def data(request, tmp_path):
    path = tmp_path / "new" / "data.h5"
    if request.param == "packed":
        pack_arrays(path, ARRAYS, source="a test")
    else:
        path.parent.mkdir()
        with h5py.File(path, "w") as file:
            for name, array in ARRAYS.items():
                file.create_dataset(name, data=array, chunks=(64, *array.shape[1:]), compression="gzip")
            file["note"] = "no samples"
    with ArrayData(path) as opened:
        yield opened


@pytest.fixture
def packed(tmp_path):
    path = tmp_path / "data.h5"
    pack_arrays(path, ARRAYS)
    return path


@pytest.mark.parametrize("where", PLACES)
def test_samples_are_read_like_those_of_an_array(data, where):
    assert (len(data), data.count, set(data)) == (3, COUNT, set(ARRAYS))
    rows = data.rows(where)
    for name, array in ARRAYS.items():
        assert data[name].shape == array.shape and data[name].dtype == array.dtype == rows[name].dtype
        assert np.array_equal(data[name][where], array[where]) and np.array_equal(rows[name], array[where])


def test_what_is_not_there_is_no_sample(data):
    for where in [COUNT], [-COUNT - 1], [0, 10**9]:
        with pytest.raises(IndexError):
            data.rows(where)


def test_some_arrays_may_be_chosen(packed):
    with ArrayData(packed, "y") as data:
        assert list(data) == ["y"]
    with pytest.raises(DataError, match=r"data\.h5: no array 'z'; there are: group/mask, x, y"):
        ArrayData(packed, "z")


def test_arrays_of_different_lengths_do_not_belong_together(tmp_path):
    arrays = {"a": np.zeros(3), "b": np.zeros(4)}
    with pytest.raises(DataError, match="a has 3 samples, b has 4"):
        pack_arrays(tmp_path / "a.h5", arrays)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.update(arrays)
    with pytest.raises(DataError, match=r"b\.h5: a has 3 samples, b has 4; name the arrays that belong"):
        ArrayData(tmp_path / "b.h5")
    assert ArrayData(tmp_path / "b.h5", "b").count == 4


@pytest.mark.parametrize("wrong", [np.array(1.0), np.array(["x"]), np.array([None])])
def test_only_samples_made_of_numbers_are_packed(tmp_path, wrong):
    with pytest.raises(DataError, match="a: .* expected samples made of numbers"):
        pack_arrays(tmp_path / "a.h5", {"a": wrong})
    with pytest.raises(DataError, match="no arrays"):
        pack_arrays(tmp_path / "a.h5", {})
    assert not list(tmp_path.iterdir())


def test_missing_foreign_and_newer_files_are_named(packed, tmp_path):
    with pytest.raises(DataError, match=r"absent\.h5: no such file; make it with"):
        ArrayData(tmp_path / "absent.h5")
    (tmp_path / "odd.h5").write_text("odd")
    with pytest.raises(DataError, match=r"odd\.h5: not a readable HDF5 file"):
        ArrayData(tmp_path / "odd.h5")
    h5py.File(tmp_path / "empty.h5", "w").close()
    with pytest.raises(DataError, match=r"empty\.h5: no arrays"):
        ArrayData(tmp_path / "empty.h5")
    with h5py.File(packed, "r+") as file:
        file.attrs["format"] = 2
    with pytest.raises(DataError, match="format 2, this version of mpicoll reads format 1"):
        ArrayData(packed)


def test_damage_is_noticed(packed):
    content = packed.read_bytes()
    for size in range(0, len(content), len(content) // 40):
        os.truncate(packed, size)
        with pytest.raises(DataError, match=r"data\.h5: "):
            ArrayData(packed)
        packed.write_bytes(content)
    start = content.index(ARRAYS["x"].tobytes())
    packed.write_bytes(content[: start + 1000] + b"\x07" + content[start + 1001 :])
    with pytest.raises(DataError, match="damaged: the checksum of x does not match"):
        ArrayData(packed)
    with ArrayData(packed, verify=False) as data:
        assert data.count == COUNT


def test_arrays_larger_than_memory_come_from_a_map(tmp_path):
    mapped = np.memmap(tmp_path / "raw", np.int32, "w+", shape=(300_000, 5))
    mapped[...] = np.arange(300_000)[:, None]
    pack_arrays(tmp_path / "a.h5", {"a": mapped})
    with ArrayData(tmp_path / "a.h5") as data:
        assert np.array_equal(data["a"], mapped)


# -- tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["array", "text", "packed", "chunked"])
def test_windows_of_any_text(tmp_path, kind):
    text = np.frombuffer(b"to be or not to be" * 9, np.uint8)
    if kind == "array":
        tokens = text
    elif kind == "text":
        (tmp_path / "a.txt").write_bytes(text)
        pack_text([tmp_path / "a.txt"], tmp_path / "a.h5")
        tokens = TextData(tmp_path / "a.h5")
    else:
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file.create_dataset("tokens", data=text, chunks=(50,) if kind == "chunked" else None)
        tokens = ArrayData(tmp_path / "a.h5")["tokens"]
    windows = Windows(tokens, 5)
    assert len(windows) == len(text) - 4
    starts = np.array([0, len(windows) - 1, 3, 3])
    assert np.array_equal(windows[starts], [text[start : start + 5] for start in starts])
    assert windows[starts[:0]].shape == (0, 5) and windows[starts[:0]].dtype == np.uint8
    for wrong in [-1], [len(windows)]:
        with pytest.raises(IndexError):
            windows[np.array(wrong)]


def test_a_text_shorter_than_a_window_is_refused():
    with pytest.raises(DataError, match="7 tokens are too few for windows of 8"):
        Windows(np.arange(7), 8)
    with pytest.raises(ValueError, match="length must be at least 1"):
        Windows(np.arange(7), 0)


# -- the ends of epochs ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize(("ends", "batches"), [("short", 4), ("drop", 3)])
def test_epochs_end_with_their_last_batch(ends, batches, size):
    ranks = [Sampler(100, 30, seed=3, rank=rank, size=size, ends=ends) for rank in range(size)]
    whole = Sampler(100, 30, seed=3, ends=ends)
    assert whole.per_epoch == batches
    for epoch in range(3):
        dealt = [np.concatenate([rank[epoch * batches + b] for rank in ranks]) for b in range(batches)]
        assert all(np.array_equal(dealt[b], whole[epoch * batches + b]) for b in range(batches))
        assert [len(batch) for batch in dealt] == [whole.length(b) for b in range(batches)]
        assert [whole.length(b) for b in range(batches)] == [30, 30, 30, 10][:batches]
        assert len(set(np.concatenate(dealt))) == min(100, batches * 30)


def test_what_is_dropped_is_other_samples_in_every_epoch():
    sampler = Sampler(100, 30, seed=3, ends="drop")
    dropped = [
        set(range(100)) - set(np.concatenate([sampler[3 * e + b] for b in range(3)])) for e in range(4)
    ]
    assert len(set.intersection(*dropped)) < 5


def test_ends_carry_over_unless_told_otherwise():
    sampler = Sampler(100, 30, seed=3)
    assert sampler.per_epoch is None and sampler.length(3) == len(sampler[3]) == 30
    assert np.array_equal(sampler[0], Sampler(100, 30, seed=3, ends="short")[0])


@pytest.mark.parametrize("ends", ["short", "drop"])
def test_fewer_samples_than_a_batch_are_refused(ends):
    with pytest.raises(ValueError, match="5 samples are too few for a batch of 8"):
        Sampler(5, 8, ends=ends)
    with pytest.raises(ValueError, match="ends must be 'carry', 'short' or 'drop', got 'wrap'"):
        Sampler(5, 8, ends="wrap")


# -- prefetch ----------------------------------------------------------------------------------------


def test_items_come_in_order_from_a_thread():
    caller = threading.get_ident()
    with Prefetch(((k, threading.get_ident()) for k in range(50)), depth=3) as items:
        seen = list(items)
        assert [k for k, _ in seen] == list(range(50)) and caller not in {thread for _, thread in seen}
        assert list(items) == []


@pytest.mark.parametrize("depth", [1, 4])
def test_the_thread_is_so_far_ahead_and_no_further(depth):
    made = []
    with Prefetch((made.append(k) or k for k in range(100)), depth) as items:
        assert next(items) == 0
        end = time.monotonic() + 5
        while len(made) < depth + 2 and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.02)
        assert len(made) == depth + 2  # taken, ready, and one in the hand


def test_errors_come_in_their_turn():
    def source():
        yield 1
        raise OSError("the disk is gone")

    with Prefetch(source()) as items:
        assert next(items) == 1
        with pytest.raises(OSError, match="the disk is gone"):
            next(items)
        assert list(items) == []


def test_leaving_early_ends_the_thread():
    before = threading.active_count()
    with Prefetch(iter(int, 1)) as items:
        assert next(items) == 0
    assert threading.active_count() == before and list(items) == []
    with pytest.raises(ZeroDivisionError), Prefetch(iter(int, 1)):
        1 / 0  # noqa: B018
    assert threading.active_count() == before


def test_something_must_be_ahead():
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        Prefetch([], depth=0)
