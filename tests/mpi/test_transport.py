"""Messages and the shared window: the same results whatever lies where, and whatever fills up."""

import gc
import os
import warnings

import numpy as np
import pytest
from forms import FORMS, perform
from mpi4py import MPI

import mpicoll
from mpicoll.comm.context import KEPT
from mpicoll.runtime.transport import arena as arenas

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
N = 12000 * SIZE  # a multiple of the size, above every threshold of the window
ALL = sum(range(1, SIZE + 1))


@pytest.fixture(scope="module")
def comms(world):
    """One communicator for each transport."""
    found = {}
    for transport in ("mpi", "window"):
        os.environ["MPICOLL_TRANSPORT"] = transport
        found[transport] = mpicoll.Intracomm(world.Dup())
    del os.environ["MPICOLL_TRANSPORT"]
    yield found
    for comm in found.values():
        comm.Free()


@pytest.fixture(autouse=True)
def read_in_place(comms, monkeypatch):
    """What lies in the window is read there at every size, not only where that is faster."""
    near = comms["window"]._state.near
    if near is not None:
        monkeypatch.setattr(near.arena, "in_place_nbytes", 0)


@pytest.fixture
def comm(comms):
    return comms["window"]


def data(n=N, rank=RANK, kind="f4"):
    return np.random.default_rng(rank).standard_normal(n).astype(kind)


PLACES = {  # what lies in the window
    "all": lambda comm: (comm.empty, comm.empty),
    "none": lambda comm: (np.empty, np.empty),
    "some ranks": lambda comm: (comm.empty, comm.empty) if RANK % 2 else (np.empty, np.empty),
    "send": lambda comm: (comm.empty, np.empty),
    "receive on some ranks": lambda comm: (np.empty, comm.empty if RANK % 2 else np.empty),
}


@pytest.mark.parametrize("form", FORMS)
def test_where_buffers_lie_does_not_matter(comms, form):
    """Every rank and every place gives the same bits; cold, warm, and on either transport the right ones."""
    for transport, comm in comms.items():
        assert comm.explain("allreduce", nbytes=4 * N, algorithm="direct").transport == (
            transport if comm._state.near else "mpi"
        )
        bits = set()
        for places in PLACES.values():
            first, second = (make(N, "f4") for make in places(comm))
            for _ in range(3):
                first[:], second[:] = data(), 0
                perform(comm, form, "Allreduce", first, second, algorithm="direct")
                assert (first == data()).all()
                bits.add(second.tobytes())
        np.testing.assert_allclose(second, sum(data(rank=r) for r in range(SIZE)), rtol=1e-4, atol=1e-5)
        assert len(bits) == 1 and len(set(comm.allgather(bits.pop()))) == 1


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("offset", [0, 1, 3, 4, 61, 64, 4096])
def test_views_at_odd_offsets(comm, places, offset):
    pools = [make(N + 5000, "u1") for make in PLACES[places](comm)]
    send, recv = (pool[offset : offset + N] for pool in pools)
    pools[1][:], send[:] = 7, np.arange(N) % 251
    comm.Alltoall(send, recv, algorithm="direct")
    block = N // SIZE
    assert (recv.reshape(SIZE, -1) == send[RANK * block :][:block]).all()
    recv[:] = 0
    comm.Bcast(send if RANK == SIZE - 1 else recv, root=SIZE - 1, algorithm="direct")
    assert (recv == np.arange(N) % 251).all() or RANK == SIZE - 1
    assert (pools[1][:offset] == 7).all() and (pools[1][offset + N :] == 7).all()


def test_every_rank_at_another_offset(comm):
    pool = comm.empty(N + 100)
    x = pool[7 * RANK : 7 * RANK + N]
    x[:] = np.arange(N) * (RANK + 1)
    comm.Allreduce(MPI.IN_PLACE, x)
    assert (x == np.arange(N) * ALL).all()
    part = pool[: N // SIZE]
    send = np.arange(N) * (RANK + 1.0)
    comm.Reduce_scatter_block(send, part)
    assert (part == np.arange(N)[RANK * part.size :][: part.size] * ALL).all()


@pytest.mark.parametrize("counts", ["one has all", "nothing for some", "growing"])
def test_very_uneven_parts(comms, counts):
    """A rank that stages nearly the whole vector must still fit its slot."""
    sizes = {
        "one has all": [600000] + [0] * (SIZE - 1),
        "nothing for some": [300001 * (r % 2) for r in range(SIZE)],
        "growing": [r * 100003 for r in range(SIZE)],
    }[counts]
    for comm in comms.values():
        for algorithm in (None, "direct", "circulant", "pat", "ordered"):
            got = np.zeros(sizes[RANK])
            comm.Reduce_scatter(np.arange(sum(sizes)) * (RANK + 1.0), got, sizes, algorithm=algorithm)
            first = sum(sizes[:RANK])
            assert (got == np.arange(first, first + got.size) * ALL).all(), algorithm


@pytest.mark.parametrize("transport", ["mpi", "window"])
def test_many_buffers_evict_programs(comms, transport):
    comm = comms[transport]
    keep = [np.empty(2 * SIZE) for _ in range(2 * KEPT)]
    for turn in range(3):
        for i, x in enumerate(keep):
            x[:] = RANK + i + turn
            comm.Allreduce(MPI.IN_PLACE, x, algorithm="ring" if i % 2 else "direct")
            assert (x == ALL + (i + turn - 1) * SIZE).all()
    assert len(comm._state.programs) <= KEPT


@pytest.mark.parametrize("transport", ["mpi", "window"])
def test_more_calls_in_flight_than_programs_are_kept(comms, world, transport):
    """The program of a new call must not be evicted, even where all others are in use."""
    data = [np.full(2 * SIZE, RANK + 1.0 + i) for i in range(KEPT + 10)]
    if RANK:
        world.Barrier()  # rank 0 has made all its calls by then, and none of them could end
    requests = [comms[transport].Iallreduce(MPI.IN_PLACE, x, algorithm="ring") for x in data]
    if not RANK:
        world.Barrier()
    MPI.Request.Waitall(requests)
    assert [x[0] for x in data] == [x[-1] for x in data] == [ALL + i * SIZE for i in range(len(data))]


def test_warm_and_cold_ranks(comms):
    """Rank 0 passes a fresh buffer every time, the others the same."""
    for comm in comms.values():
        for algorithm in ("ring", "direct", "recursive_doubling"):
            same, kept = np.empty(N // 8), []
            for turn in range(6):
                x = np.empty(N // 8) if RANK == 0 else same
                kept.append(x)
                x[:] = RANK + 1 + turn
                comm.Allreduce(MPI.IN_PLACE, x, algorithm=algorithm)
                assert (x == ALL + turn * SIZE).all(), (algorithm, turn)


def test_full_window(world, monkeypatch):
    """Arrays take what there is; later ones are ordinary, and collectives go on, new ones too."""
    monkeypatch.setenv("MPICOLL_ARENA", str(64 << 20))
    monkeypatch.setattr(arenas, "_made", [])
    comm = mpicoll.Intracomm(world.Dup())
    if comm._state.near is None:
        pytest.skip("no shared window")
    arena = comm._state.near.arena

    def inside(array):
        return arena.find(array.reshape(-1).view("u1")) is not None

    taken, sizes = [], [1 << 24, 1 << 20, 1 << 16, 1 << 12]
    while sizes and RANK == 0:  # on one rank only
        taken.append(comm.empty(sizes[0], "u1"))
        if not inside(taken[-1]):
            taken.pop()
            sizes.pop(0)
    x = comm.empty(N)
    assert inside(x) == (RANK != 0)
    for i in range(20):
        y = np.full(N + i, RANK + 1.0)
        comm.Allreduce(MPI.IN_PLACE, y)
        assert (y == ALL).all()
    derived = comm.Dup()  # gets no slots, on any rank
    y = np.full(N, RANK + 1.0)
    derived.Allreduce(MPI.IN_PLACE, y)
    assert (y == ALL).all() and derived._state.near is None
    derived.Free()
    taken.clear()
    gc.collect()
    assert inside(comm.empty(N))
    comm.Free()


@pytest.mark.parametrize("nbytes", ["0", str(1 << 16)])
def test_no_window(world, monkeypatch, nbytes):
    monkeypatch.setenv("MPICOLL_ARENA", nbytes)
    monkeypatch.setattr(arenas, "_made", [])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm = mpicoll.Intracomm(world.Dup())
        derived = comm.Dup()
    assert len(caught) == 2 * (nbytes != "0" and RANK == 0 and SIZE > 1)
    assert all("too little room" in str(each.message) for each in caught)
    x = comm.empty(N)
    x[:] = RANK + 1
    comm.Allreduce(MPI.IN_PLACE, x)
    assert (x == ALL).all()
    assert comm.explain("allreduce", nbytes=1 << 24, algorithm="direct").transport == "mpi"
    derived.Allreduce(MPI.IN_PLACE, x)
    derived.Free()
    comm.Free()


def test_small_arena(world, monkeypatch):
    monkeypatch.setenv("MPICOLL_ARENA", str(16 << 20))
    monkeypatch.setattr(arenas, "_made", [])
    comm = mpicoll.Intracomm(world.Dup())
    if comm._state.near is None and SIZE > 1:
        pytest.skip("too little shared memory")
    vectors = [np.full(N + i, RANK + 1.0) for i in range(12)]
    for form in FORMS:
        for x in vectors:
            x[:] = RANK + 1
            perform(comm, form, "Allreduce", MPI.IN_PLACE, x)
            assert (x == ALL).all()
    requests = [comm.Iallreduce(MPI.IN_PLACE, x) for x in vectors]
    for request in requests:
        request.Wait()
    assert all((x == ALL * SIZE).all() for x in vectors)
    comm.Free()


def test_communicators_share_one_arena(world, monkeypatch):
    monkeypatch.setenv("MPICOLL_ARENA", str(64 << 20))
    monkeypatch.setattr(arenas, "_made", [])
    one, other = (mpicoll.Intracomm(world.Split(0, key)) for key in (RANK, -RANK))
    if one._state.near is None:
        pytest.skip("no shared window")
    assert one._state.near.arena is other._state.near.arena
    x = one.empty(N)
    x[:] = RANK + 1
    other.Allreduce(MPI.IN_PLACE, x)
    assert (x == ALL).all()
    for comm in (one, other):
        comm.Free()


@pytest.mark.parametrize("collective", ["Allgather", "Alltoall", "Bcast", "Reduce"])
def test_message_of_many_slices(comms, collective):
    """More than a slot holds at once, in the window and without."""
    n = (3 << 20) // SIZE * SIZE
    block = n // SIZE
    x = [np.arange(n, dtype="i4") + 5 * rank for rank in range(SIZE)]
    want = {
        "Allgather": lambda: np.concatenate([each[:block] for each in x]),
        "Alltoall": lambda: np.concatenate([each[RANK * block :][:block] for each in x]),
        "Bcast": lambda: x[0],
        "Reduce": lambda: sum(x),
    }[collective]()
    for comm in comms.values():
        y = x[0].copy() if collective == "Bcast" and RANK == 0 else np.zeros(n, "i4")
        if collective == "Bcast":
            comm.Bcast(y, algorithm="direct")
        elif collective == "Reduce":
            comm.Reduce(x[RANK], y if RANK == 0 else None, algorithm="direct")
        else:
            send = x[RANK][: block if collective == "Allgather" else n]
            getattr(comm, collective)(send, y, algorithm="direct")
        assert (collective == "Reduce" and RANK) or (y == want).all()
