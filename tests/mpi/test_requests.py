"""Requests: ours among ordinary ones in every way to wait, many at once, restarted, left behind."""

import time

import numpy as np
import pytest
from forms import FORMS, perform
from mpi4py import MPI

import mpicoll
from mpicoll.memory.op import AVG

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
LEFT, RIGHT = (RANK - 1) % SIZE, (RANK + 1) % SIZE
THREADED = MPI.Query_thread() == MPI.THREAD_MULTIPLE
ALL = sum(range(1, SIZE + 1))
N = 1000

needs_threads = pytest.mark.skipif(not THREADED, reason="waits in C need the progress thread")


@pytest.fixture(scope="module")
def comm(world):
    comm = mpicoll.Intracomm(world.Dup())
    yield comm
    comm.Free()


class Mix:
    """Collectives of ours between an ordinary send and receive, and whether all of them are right."""

    def __init__(self, comm, world, algorithm="ring"):
        self.vectors = [np.full(N, RANK + 1.0 + i) for i in range(3)]
        self.token, self.given = np.zeros(1, int), np.array([RANK])
        a, b, c = self.vectors
        self.requests = [
            comm.Iallreduce(MPI.IN_PLACE, a, algorithm=algorithm),
            world.Irecv(self.token, LEFT, 7),
            comm.Iallreduce(MPI.IN_PLACE, b, algorithm=algorithm),
            world.Isend(self.given, RIGHT, 7),
            comm.Iallreduce(MPI.IN_PLACE, c),  # the MPI's own
        ]

    def check(self):
        for i, vector in enumerate(self.vectors):
            assert (vector == ALL + i * SIZE).all()
        assert self.token == LEFT


def wait_any(requests):
    seen = [MPI.Request.Waitany(requests) for _ in requests]
    assert sorted(seen) == list(range(len(requests)))
    assert MPI.Request.Waitany(requests) == MPI.UNDEFINED


def wait_some(requests):
    seen = []
    while len(seen) < len(requests):
        seen += MPI.Request.Waitsome(requests)
    assert sorted(seen) == list(range(len(requests)))


def poll_all(requests):
    until(lambda: MPI.Request.Testall(requests))


def poll_any(requests):
    seen = []
    while len(seen) < len(requests):
        index, ended = MPI.Request.Testany(requests)
        seen += [index] if ended else []
    assert sorted(seen) == list(range(len(requests)))


def poll_some(requests):
    seen = []
    while len(seen) < len(requests):
        seen += MPI.Request.Testsome(requests) or []
    assert sorted(seen) == list(range(len(requests)))


def get_status(requests):
    until(lambda: all(request.Get_status() for request in requests))
    MPI.Request.Waitall(requests)


def until(done):
    while not done():
        time.sleep(1e-4)


def one_by_one(requests):
    for request in reversed(requests):
        request.Wait()


def poll_each(requests):
    left = list(requests)
    while left:
        left = [request for request in left if not request.Test()]


def wait_all(requests):
    MPI.Request.Waitall(requests)


IN_C = [wait_all, wait_any, wait_some, poll_all, poll_any, poll_some, get_status]


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
@pytest.mark.parametrize("way", [*IN_C, one_by_one, poll_each], ids=lambda way: way.__name__)
def test_mixed_with_ordinary_requests(comm, world, way, algorithm):
    if way in IN_C and not THREADED:
        pytest.skip("waits in C need the progress thread")
    for _ in range(5):
        mix = Mix(comm, world, algorithm)
        way(mix.requests)
        mix.check()
        assert all(request == MPI.REQUEST_NULL for request in mix.requests)


@pytest.mark.parametrize("order", ["forwards", "backwards", "halves"])
@pytest.mark.parametrize("place", ["ordinary", "window"])
def test_many_in_flight(comm, place, order):
    """More than there are lanes, small and large, in memory of either kind, with blocking calls between."""
    make = np.empty if place == "ordinary" else comm.empty
    vectors = [make(n) for n in (10, 20000, 60000) * 7]
    for turn in range(3):
        requests = []
        for i, vector in enumerate(vectors):
            vector[:] = RANK + i + turn
            requests.append(comm.Iallreduce(MPI.IN_PLACE, vector, algorithm="circulant" if i % 2 else None))
            if i % 5 == 0:
                between = np.full(30000, 2.0)
                comm.Allreduce(MPI.IN_PLACE, between)
                assert (between == 2 * SIZE).all()
        if order == "halves":
            requests = requests[1::2] + requests[::2]
        for request in reversed(requests) if order == "backwards" else requests:
            request.Wait()
        for i, vector in enumerate(vectors):
            assert (vector == ALL + (i + turn - 1) * SIZE).all(), (i, turn)


def test_packed_buffers_on_some_ranks_only(comm):
    """Where one rank packs for the MPI's own and another does not, they still count calls alike."""
    grid, line = np.full((N, 2), RANK + 1.0), np.full(N, RANK + 1.0)
    x = grid[:, 0] if RANK == 0 else line
    for form in FORMS:
        x[:] = RANK + 1
        perform(comm, form, "Allreduce", MPI.IN_PLACE, x)
        assert (x == ALL).all()
        y = np.full(N, RANK + 1.0)
        perform(comm, form, "Allreduce", MPI.IN_PLACE, y, algorithm="ring")
        assert (y == ALL).all()
    assert (grid[:, 1] == RANK + 1).all()


def test_two_communicators(comm, world):
    other = mpicoll.Intracomm(world.Split(0, -RANK))
    for _ in range(10):
        a, b = np.full(N, RANK + 1.0), np.full(N, RANK + 2.0)
        pair = [comm.Iallreduce(MPI.IN_PLACE, a, algorithm="ring")]
        pair.append(other.Iallreduce(MPI.IN_PLACE, b, algorithm="ring"))
        for request in pair[:: -1 if RANK % 2 else 1]:
            request.Wait()
        assert (a == ALL).all() and (b == ALL + SIZE).all()
    other.Free()


@pytest.mark.skipif(SIZE < 3, reason="needs two sizes above 1")
def test_averages_of_one_buffer_over_two_communicators(comm):
    part = comm.Split(int(RANK == 0))
    x = np.ones(300_000, np.float16)
    whole, some = np.zeros_like(x), np.zeros_like(x)
    requests = [c.Iallreduce(x, y, AVG, algorithm="ring") for c, y in ((comm, whole), (part, some))]
    for request in requests:
        request.Wait()
    np.testing.assert_allclose(whole, 1, rtol=1e-2)
    np.testing.assert_allclose(some, 1, rtol=1e-2)
    part.Free()


def test_calls_are_local(comm, world):
    """The last rank comes late: the others must return from their I-calls, and send it on its way."""
    x = np.full(50000, 1.0)
    if SIZE > 1 and RANK == SIZE - 1:
        world.Recv(np.empty(1), 0, 9)
    requests = [comm.Iallreduce(MPI.IN_PLACE, x), comm.Ibarrier(algorithm="dissemination")]
    if SIZE > 1 and RANK == 0:
        world.Send(np.zeros(1), SIZE - 1, 9)
    for request in requests:
        request.Wait()
    assert (x == SIZE).all()


@pytest.mark.parametrize("algorithm", [None, "ring"])
def test_packed_copies_live_as_long_as_the_request(comm, algorithm):
    grid, got = np.full((N, 2), RANK + 1.0), np.empty(N)
    request = comm.Iallreduce(grid[:, 0], got, algorithm=algorithm)
    _ = [np.zeros(N) for _ in range(5)]  # would fall into freed memory
    request.Wait()
    assert (got == ALL).all()
    request = comm.Allreduce_init(grid[:, 0], got, algorithm=algorithm)
    for turn in range(3):  # packed anew for every start
        grid[:] = RANK + 1 + turn
        request.Start()
        _ = [np.zeros(N) for _ in range(5)]
        request.Wait()
        assert (got == ALL + SIZE * turn).all()
    request.Free()


def test_statuses_and_spent_requests(comm):
    x = np.ones(4)
    request = comm.Iallreduce(MPI.IN_PLACE, x, algorithm="ring")
    status = MPI.Status()
    assert request.Wait(status) is True and status.Get_error() == MPI.SUCCESS
    assert request == MPI.REQUEST_NULL and request.Test() and request.Wait()
    assert comm.Iallreduce(MPI.IN_PLACE, x, algorithm="ring").wait() is None


# -- persistent -------------------------------------------------------------------------------------------


def prepared(comm):
    """Messages, the window, and packed for the MPI's own (unpacked, MPICH 5.0 fails in Testall by itself)."""
    vectors = [np.zeros(N), comm.empty(30000), np.zeros((N, 2))[:, 1]]
    chosen = ["ring", None, None]
    return vectors, [
        comm.Allreduce_init(MPI.IN_PLACE, x, algorithm=a) for x, a in zip(vectors, chosen, strict=True)
    ]


def python_start(requests):
    for request in requests:
        request.Start()


def python_wait(requests):
    for request in reversed(requests):
        request.Wait()


STARTS = [python_start, MPI.Prequest.Startall]
WAITS = [python_wait, MPI.Request.Waitall, lambda requests: until(lambda: MPI.Request.Testall(requests))]


@needs_threads
def test_restarted_from_python_and_c(comm, world):
    vectors, requests = prepared(comm)
    token, given = np.zeros(1, int), np.array([RANK])
    ordinary = [world.Recv_init(token, LEFT, 3), world.Send_init(given, RIGHT, 3)]
    # alone, a rank has the MPI's own persistent collectives, and MPICH 5.0.2 fails in Testall on them
    waits = WAITS if SIZE > 1 else WAITS[:2]
    for turn in range(24):
        for x in vectors:
            x[:] = RANK + 1 + turn
        both = [*requests[:2], *ordinary, *requests[2:]]
        STARTS[turn % 2](both)
        waits[turn // 2 % len(waits)](both)
        for x in vectors:
            assert (x == ALL + SIZE * turn).all(), turn
        assert token == LEFT
    for request in (*requests, *ordinary):
        request.Free()
        assert request == MPI.REQUEST_NULL


def test_inactive_requests(comm):
    vectors, requests = prepared(comm)
    for request in requests:
        assert request.Wait() and request.Test()  # inactive: at once
    for request in requests[::2]:
        request.Free()
    for x, request in list(zip(vectors, requests, strict=True))[1::2]:
        for _ in range(2):
            x[:] = RANK + 1
            request.Start()
            until(request.Test)
            assert (x == ALL).all()
        request.Free()


def test_persistent_average(comm):
    x = np.zeros(N, "f4")
    request = comm.Allreduce_init(MPI.IN_PLACE, x, AVG)
    for turn in range(4):
        x[:] = RANK + 1 + turn
        request.Start()
        request.Wait()
        np.testing.assert_allclose(x, ALL / SIZE + turn, rtol=1e-6)
    request.Free()


def test_many_persistent_requests_outgrow_the_window(comm):
    """Staging slots run out; further requests use messages, on all ranks alike."""
    vectors = [comm.empty(20000) for _ in range(150)]
    requests = [comm.Allreduce_init(MPI.IN_PLACE, x) for x in vectors]
    for x in vectors:
        x[:] = RANK + 1
    for request in requests:
        request.Start()
    for request in requests:
        request.Wait()
    assert all((x == ALL).all() for x in vectors)
    for request in requests:
        request.Free()


# -- errors -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(SIZE == 1, reason="one rank agrees with itself")
@pytest.mark.parametrize("form", FORMS)
def test_errors_surface_in_the_wait(world, monkeypatch, form):
    monkeypatch.setenv("MPICOLL_TIMEOUT", "30")
    comm = mpicoll.Intracomm(world.Dup())
    x = np.zeros((10 + RANK) * SIZE)  # chunks of another length for every rank
    with pytest.raises(mpicoll.errors.MismatchError, match="MPICOLL_CHECK=1 tells"):
        perform(comm, form, "Allreduce", MPI.IN_PLACE, x, algorithm="direct")
    with pytest.raises(mpicoll.ArgumentError, match="cannot be used since an error in it: MismatchError"):
        comm.Allreduce(MPI.IN_PLACE, x, algorithm="direct")
    comm.Free()
