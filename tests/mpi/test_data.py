"""Data on several ranks: packed by any of them, read by all, dealt in the same global batches."""

import numpy as np
import pytest

from mpicoll.io.sampler import Sampler
from mpicoll.io.text import DataError, TextData, pack_text


def text(folder):
    path = folder / "text.txt"
    path.write_bytes(b"every rank reads this\n" * 100_000)
    return path


def test_one_packs_and_all_read(comm, folder):
    if comm.rank == 0:
        pack_text([text(folder)], folder / "text.h5")
    comm.Barrier()
    with TextData(folder / "text.h5") as data:
        assert len(set(comm.allgather(data.sha256))) == 1
        assert data[22:43].tobytes() == b"every rank reads this"


def test_all_may_pack_the_same_file_at_once(comm, folder):
    if comm.rank == 0:
        text(folder)
    comm.Barrier()
    for _ in range(3):
        pack_text([folder / "text.txt"], folder / "text.h5")
        with TextData(folder / "text.h5") as data:
            assert len(data) == 2_200_000
    comm.Barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["text.h5", "text.txt"]


def test_every_rank_refuses_a_damaged_file(comm, folder):
    if comm.rank == 0:
        pack_text([text(folder)], folder / "text.h5")
        content = (folder / "text.h5").read_bytes()
        (folder / "text.h5").write_bytes(content[: len(content) // 2])
    comm.Barrier()
    with pytest.raises(DataError, match=r"text\.h5: .*pack it again"):
        TextData(folder / "text.h5")


@pytest.mark.parametrize("batch", [1, 2, 12, 100])
def test_ranks_deal_one_global_batch(comm, batch):
    mine, whole = Sampler(1000, batch, seed=4, rank=comm.rank, size=comm.size), Sampler(1000, batch, seed=4)
    for k in (0, 3, 999, 10**6):
        assert np.array_equal(np.concatenate(comm.allgather(mine[k])), whole[k])
