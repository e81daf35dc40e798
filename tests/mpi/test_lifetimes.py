"""Communicators made, derived, shared, freed and dropped; arrays that outlive them."""

import ctypes
import gc
import pickle
import weakref

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
LARGE = 20000  # elements: served by a plan


@pytest.fixture(scope="module")
def comm(world):
    comm = mpicoll.Intracomm(world.Dup())
    yield comm
    comm.Free()


def works(comm):
    """Whether a small and a large call of every form come out right."""
    size = comm.Get_size()
    for n in (10, LARGE):
        x = np.ones(n)
        comm.Allreduce(MPI.IN_PLACE, x)
        assert (x == size).all()
        comm.Iallreduce(MPI.IN_PLACE, x, algorithm="circulant").Wait()
        assert (x == size**2).all()
        request = comm.Allreduce_init(MPI.IN_PLACE, x)
        request.Start()
        request.Wait()
        request.Free()
        assert (x == size**3).all()
    return True


def evens(comm):
    return comm.Get_group().Incl(range(0, comm.Get_size(), 2))


def created_in_group(comm):
    return comm.Create_group(evens(comm)) if comm.Get_rank() % 2 == 0 else MPI.COMM_NULL


DERIVE = {
    "Dup": lambda comm: comm.Dup(),
    "Dup(info)": lambda comm: comm.Dup(MPI.INFO_NULL),
    "Dup_with_info": lambda comm: comm.Dup_with_info(MPI.INFO_NULL),
    "Clone": lambda comm: comm.Clone(),
    "Split": lambda comm: comm.Split(comm.Get_rank() % 2, -comm.Get_rank()),
    "Split(UNDEFINED)": lambda comm: comm.Split(MPI.UNDEFINED if comm.Get_rank() == 0 else 0),
    "Split_type": lambda comm: comm.Split_type(MPI.COMM_TYPE_SHARED),
    "Create": lambda comm: comm.Create(evens(comm)),
    "Create_group": created_in_group,
}


@pytest.mark.parametrize("how", DERIVE)
def test_derived_communicators_are_ours(comm, how):
    derived = DERIVE[how](comm)
    if derived == MPI.COMM_NULL:
        assert how in ("Split(UNDEFINED)", "Create", "Create_group")
        return
    assert type(derived) is mpicoll.Intracomm and works(derived)
    again = derived.Split(derived.Get_rank() // 2).Dup()
    assert type(again) is mpicoll.Intracomm and works(again) and works(derived)
    again.Free()
    derived.Free()
    assert derived == MPI.COMM_NULL


def test_idup(comm):
    derived, request = comm.Idup()
    request.Wait()
    assert type(derived) is mpicoll.Intracomm
    x = np.ones(10)
    derived.Iallreduce(MPI.IN_PLACE, x).Wait()  # nothing collective has been done for it yet
    assert (x == SIZE).all()
    assert works(derived)
    derived.Free()


def test_subclasses_derive_their_own(comm):
    class Mine(mpicoll.Intracomm):
        label = "mine"

        def total(self):
            return self.allreduce(1)

    mine = Mine(comm)
    derived = mine.Split(0)
    assert type(derived) is Mine and derived.total() == SIZE and works(derived)
    derived.Free()


def test_one_handle_has_one_state(comm):
    again = mpicoll.Intracomm(comm)
    assert again == comm and again._state is comm._state
    assert works(again) and works(comm)


@pytest.mark.parametrize("how", ["Dup", "Idup", "wrap"])
def test_made_and_freed_many_times(comm, world, how):
    """MPICH has 2,045 communicators in all: whatever is not freed runs out here."""
    for turn in range(2100 if how == "Dup" else 100):
        if how == "Idup":
            derived, request = comm.Idup()
            request.Wait()
        else:
            derived = comm.Dup() if how == "Dup" else mpicoll.Intracomm(world.Dup())
        if turn % 100 == 0:
            assert works(derived)
        derived.Free()


def test_disconnect(comm):
    derived = comm.Dup()
    assert works(derived)
    derived.Disconnect()
    assert derived == MPI.COMM_NULL


def test_use_after_free(comm):
    derived = comm.Dup()
    derived.Free()
    for n in (10, LARGE):
        with pytest.raises(MPI.Exception):
            derived.Allreduce(MPI.IN_PLACE, np.ones(n))
    assert isinstance(derived.empty(3), np.ndarray)


def test_free_completes_what_is_in_flight(comm):
    derived = comm.Dup()
    small, large = np.ones(10), np.ones(LARGE)
    requests = [
        derived.Iallreduce(MPI.IN_PLACE, small, algorithm="ring"),
        derived.Iallreduce(MPI.IN_PLACE, large),
    ]
    derived.Free()
    for request in requests:
        request.Wait()
    assert (small == SIZE).all() and (large == SIZE).all()


def test_dropped_without_free(comm):
    for _ in range(3):  # each keeps its staging slots
        derived = comm.Dup()
        assert works(derived)
        del derived
    gc.collect()
    assert works(comm)


def test_pickling_is_that_of_mpi4py(comm, world):
    again = pickle.loads(pickle.dumps(mpicoll.Intracomm(world)))
    assert again == world and works(again)
    with pytest.raises(ValueError, match="cannot serialize"):
        pickle.dumps(comm)


def test_c_libraries_take_the_handle(comm):
    derived = comm.Split(0, -RANK)
    as_int = MPI._sizeof(MPI.Comm) == ctypes.sizeof(ctypes.c_int)
    handle = (ctypes.c_int if as_int else ctypes.c_void_p).from_address(MPI._addressof(derived))
    library, found = ctypes.CDLL(None), ctypes.c_int(-1)
    for name in ("MPI_Comm_rank", "PMPI_Comm_rank"):
        if hasattr(library, name):
            break
    else:
        library = ctypes.CDLL(mpi_library())
    assert library.MPI_Comm_rank(handle, ctypes.byref(found)) == 0
    assert found.value == SIZE - 1 - RANK == derived.Get_rank()
    assert library.MPI_Barrier(handle) == 0
    assert works(derived)
    derived.Free()


def mpi_library():
    """The MPI that this process has loaded."""
    with open("/proc/self/maps") as maps:
        return next(line.split()[-1] for line in maps if "libmpi" in line.split()[-1])


# -- arrays in the window ----------------------------------------------------------------------


def arena_of(comm):
    near = comm._state.near
    if near is None:
        pytest.skip("no shared window")
    return near.arena


def room(arena):
    """Free bytes, from what the allocator hands out."""
    arena._collect()
    return sum(stop - start for start, stop in arena._free)


def test_arrays_outlive_their_communicator(comm):
    derived = comm.Dup()
    array = derived.empty((7, 100), "f4")
    view = array[3, 10:20]
    array[:] = RANK
    derived.Free()
    assert (view == RANK).all()
    comm.Allreduce(MPI.IN_PLACE, array, algorithm="direct")
    assert (view == sum(range(SIZE))).all()


def test_arrays_come_back_with_their_last_view(comm):
    arena = arena_of(comm)
    gc.collect()
    before = room(arena)
    array = comm.empty((1000, 300), "f4")
    assert arena.find(array.reshape(-1).view("u1")) is not None
    view = array[::2].T[5:]
    assert room(arena) <= before - array.nbytes
    del array
    assert room(arena) < before  # the view holds it
    del view
    gc.collect()
    assert room(arena) == before


def test_arrays_of_every_kind(comm):
    for shape, dtype in (((), "f8"), (0, "i4"), (3, bool), ((2, 0, 5), "c16"), (np.int64(4), "f2")):
        array = comm.empty(shape, dtype)
        assert array.shape == np.empty(shape).shape and array.dtype == np.dtype(dtype)
    for shape, dtype in ((-1, "f8"), (3, object)):
        with pytest.raises(ValueError, match="expected lengths of at least 0 and plain numbers"):
            comm.empty(shape, dtype)


def test_freeing_gives_staging_slots_back(comm):
    arena = arena_of(comm)
    gc.collect()
    before = room(arena)
    for _ in range(5):
        derived = comm.Dup()
        assert works(derived)
        derived.Free()
    gc.collect()
    assert room(arena) == before


def test_programs_do_not_keep_arrays_alive(comm):
    for place in (np.empty, comm.empty):
        x, y = place(LARGE), place(LARGE)
        x[:] = 1
        for algorithm in (None, "ring"):
            comm.Allreduce(x, y, algorithm=algorithm)
            comm.Iallreduce(x, y, algorithm=algorithm).Wait()
            comm.Reduce_scatter_block(MPI.IN_PLACE, x[: LARGE // SIZE * SIZE], algorithm=algorithm)
        watched = weakref.ref(x), weakref.ref(y)
        del x, y
        gc.collect()
        assert [watch() for watch in watched] == [None, None]
