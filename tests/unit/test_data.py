"""Packing, opening what is damaged, splitting, sampling."""

import errno
import hashlib
import os
import resource

import h5py
import numpy as np
import pytest

from mpicoll.io import text as data_module
from mpicoll.io.sampler import Sampler, part
from mpicoll.io.text import DataError, TextData, pack_text, replacing, stdlib_sources

CONTENT = bytes(range(256)) * 20000  # 5 MB: several blocks, the last one cut


@pytest.fixture
def packed(tmp_path):
    files = []
    for i, piece in enumerate((CONTENT[:3_000_001], b"", CONTENT[3_000_001:])):
        files.append(tmp_path / f"{i}.txt")
        files[-1].write_bytes(piece)
    out = tmp_path / "new" / "text.h5"
    pack_text(files, out, source="a test")
    return out


def test_packed_text_reads_back(packed):
    with TextData(packed) as data:
        assert (len(data), data.source) == (len(CONTENT), "a test")
        assert data.sha256 == hashlib.sha256(CONTENT).hexdigest()
        assert data[:].tobytes() == CONTENT
        assert data[2_999_990:3_000_010].tobytes() == CONTENT[2_999_990:3_000_010]
    assert [path.name for path in packed.parent.iterdir()] == ["text.h5"]  # no temporary left


def test_attributes_are_as_documented(packed):
    with h5py.File(packed) as file:
        assert set(file.attrs) == {"format", "source", "count", "sha256"}
        assert file["tokens"].dtype == np.uint8


def test_split_covers_everything_once(packed):
    with TextData(packed) as data:
        train, rest = data.split(0.1)
        assert data[train].tobytes() + data[rest].tobytes() == CONTENT
        assert len(data[rest]) == round(0.1 * len(CONTENT))
        for wrong in 0, 1, -0.5, float("nan"):
            with pytest.raises(ValueError, match="validation must be between 0 and 1"):
                data.split(wrong)


def test_packing_shows_its_progress(packed, tmp_path):
    from rich.progress import Progress

    with Progress(disable=True) as progress:
        pack_text([tmp_path / "0.txt", tmp_path / "2.txt"], packed, progress=progress)
        assert [(task.completed, task.total) for task in progress.tasks] == [(2, 2)]


def test_nothing_at_all_packs_and_opens(tmp_path):
    pack_text([], tmp_path / "empty.h5")
    with TextData(tmp_path / "empty.h5") as data:
        assert len(data) == 0 and data[:].size == 0


def test_stdlib_sources_are_real_and_in_a_fixed_order():
    sources = stdlib_sources()
    assert sources == stdlib_sources()
    assert any(path.name == "dataclasses.py" for path in sources)
    assert not any({"test", "tests", "site-packages"} & set(path.parts[-3:-1]) for path in sources)
    assert sum(path.stat().st_size for path in sources) > 5_000_000


def test_python_without_sources_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(data_module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="no Python sources"):
        stdlib_sources()


def test_missing_file_is_named_with_its_remedy(tmp_path):
    with pytest.raises(DataError, match=r"absent\.h5: no such file; make it with mpicoll\.data\.pack_text"):
        TextData(tmp_path / "absent.h5")


@pytest.mark.parametrize("share", [0, 1e-4, 0.01, 0.3, 0.5, 0.9, 0.999, 1 - 1e-7])
def test_truncated_file_is_refused(packed, share):
    os.truncate(packed, int(packed.stat().st_size * share))
    with pytest.raises(DataError, match=r"text\.h5: .*; delete the file and pack it again"):
        TextData(packed)


@pytest.mark.parametrize("where", np.linspace(0, 1, 25, endpoint=False))
def test_no_damage_goes_unnoticed(packed, where):
    """A block of zeros anywhere: an error of ours, or nothing of what we read has changed."""
    content = bytearray(packed.read_bytes())
    start = int(len(content) * where)
    content[start : start + 512] = bytes(512)
    packed.write_bytes(content)
    try:
        with TextData(packed) as data:
            assert data[:].tobytes() == CONTENT
    except DataError as error:
        assert "pack it again" in str(error)


def test_one_changed_byte_fails_the_checksum(packed):
    with h5py.File(packed, "r+") as file:
        file["tokens"][4_321_000] ^= 1
    with pytest.raises(DataError, match="checksum does not match"):
        TextData(packed)


@pytest.mark.parametrize("content", [b"plain text", b"\x89HDF\r\n\x1a\n" + b"x" * 5000])
def test_other_formats_are_refused(tmp_path, content):
    (tmp_path / "odd.h5").write_bytes(content)
    with pytest.raises(DataError, match=r"odd\.h5: not a readable HDF5 file"):
        TextData(tmp_path / "odd.h5")


def test_foreign_hdf5_is_refused(tmp_path):
    with h5py.File(tmp_path / "foreign.h5", "w") as file:
        file["tokens"] = np.zeros(3, np.uint8)
    with pytest.raises(DataError, match=r"foreign\.h5: not a text packed by mpicoll"):
        TextData(tmp_path / "foreign.h5")


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("format", 99, "format 99, this version of mpicoll reads format 1"),
        ("format", "one", "not a text packed by mpicoll"),
        ("count", 7, "7 bytes announced"),
    ],
)
def test_wrong_attributes_are_refused(packed, attribute, value, message):
    with h5py.File(packed, "r+") as file:
        file.attrs[attribute] = value
    with pytest.raises(DataError, match=message):
        TextData(packed)


@pytest.mark.parametrize("kind", ["group", "wrong type"])
def test_wrong_tokens_are_refused(packed, kind):
    with h5py.File(packed, "r+") as file:
        del file["tokens"]
        if kind == "group":
            file.create_group("tokens")
        else:
            file["tokens"] = np.zeros(len(CONTENT), np.float32)
    with pytest.raises(DataError, match="pack it again"):
        TextData(packed)


def test_failed_packing_leaves_the_old_file_and_no_temporary(packed, tmp_path):
    before = packed.read_bytes()
    with pytest.raises(FileNotFoundError):
        pack_text([tmp_path / "0.txt", tmp_path / "absent.txt"], packed)
    assert packed.read_bytes() == before
    assert [path.name for path in packed.parent.iterdir()] == ["text.h5"]


def test_full_disk_leaves_the_old_file(packed, monkeypatch):
    def no_room(descriptor):
        raise OSError(errno.ENOSPC, "no space left")

    before = packed.read_bytes()
    monkeypatch.setattr(data_module.os, "fsync", no_room)
    with pytest.raises(OSError, match="no space left"), replacing(packed) as temporary:
        temporary.write_text("new")
    assert packed.read_bytes() == before
    assert [path.name for path in packed.parent.iterdir()] == ["text.h5"]


@pytest.mark.parametrize("limit", [0, 1, 100, 2100, 4_000_000])
def test_packing_to_a_full_disk_fails_and_leaves_the_old_file(packed, tmp_path, limit):
    before = packed.read_bytes()
    room, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            pack_text([tmp_path / "0.txt", tmp_path / "2.txt"], packed)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    assert packed.read_bytes() == before
    assert [path.name for path in packed.parent.iterdir()] == ["text.h5"]


def test_files_that_grow_while_they_are_packed_are_noticed(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"1234")
    monkeypatch.setattr(data_module, "_watched", lambda paths, name, progress: [b"12345"])
    with pytest.raises(DataError, match=r"text\.h5: the files changed .*4.* announced, 5 elements found"):
        pack_text([tmp_path / "a.txt"], tmp_path / "text.h5")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 11])
@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_parts_cover_everything_once(count, size):
    parts = [range(count)[part(count, rank, size)] for rank in range(size)]
    assert [i for each in parts for i in each] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("size", [2, 3, 4, 7, 40])
def test_global_batches_do_not_depend_on_the_number_of_ranks(size):
    whole = Sampler(1001, 32, seed=5)
    ranks = [Sampler(1001, 32, seed=5, rank=rank, size=size) for rank in range(size)]
    for k in (0, 1, 31, 500, 10**9):
        assert np.array_equal(np.concatenate([rank[k] for rank in ranks]), whole[k])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 64, 1000, 1025])
def test_each_sample_comes_once_per_epoch(count):
    sampler = Sampler(count, 7, seed=3)
    dealt = np.concatenate([sampler[k] for k in range(-(-3 * count // 7))])
    epochs = [dealt[start : start + count] for start in range(0, 3 * count, count)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(count))
    if count > 10:
        assert not np.array_equal(epochs[0], epochs[1])
        assert not np.array_equal(epochs[0], np.arange(count))


def test_the_order_looks_random_and_follows_the_seed():
    first = Sampler(10**7, 4096, seed=1)[0]
    assert np.array_equal(first, Sampler(10**7, 4096, seed=1)[0])
    assert not np.array_equal(first, Sampler(10**7, 4096, seed=2)[0])
    assert abs(first.mean() / 10**7 - 0.5) < 0.02
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.06


def test_sampler_refuses_nothing_to_deal():
    for count, batch in (0, 1), (1, 0):
        with pytest.raises(ValueError, match="at least 1"):
            Sampler(count, batch)


def test_an_error_names_the_file_that_it_is_about(tmp_path):
    for wrong, named in (tmp_path / "absent.txt", "absent.txt"), (None, "packed.h5"):
        with pytest.raises(OSError) as error, replacing(tmp_path / "packed.h5") as temporary:
            (wrong or temporary).read_bytes()
        assert str(error.value.filename) == str(tmp_path / named)
