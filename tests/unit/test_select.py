"""Which rule serves: first match, requirements, preferences, transports; the same from the same facts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicoll.plans.algorithms import COLLECTIVES, NATIVE, get
from mpicoll.select.selection import DEFAULTS, Rule, Selection, Setting, preferred

NODE4 = Setting(4, [[0, 1, 2, 3]], window=True)
NODE3 = Setting(3, [[0, 1, 2]], window=True)
PLAIN = Setting(4, [[0, 1, 2, 3]])
SPREAD = Setting(6, [[0, 1], [2, 3], [4, 5]])
MIB = 1 << 20


def choose(setting, collective, nbytes, environ=(), **facts):
    return Selection(setting, dict(environ)).choose(collective, nbytes, **facts)


def test_small_messages_go_to_the_mpi():
    for setting in (NODE4, PLAIN, SPREAD):
        for collective in COLLECTIVES:
            assert choose(setting, collective, 64).algorithm == NATIVE


def test_large_messages_use_the_window_of_a_node():
    for collective in ("allreduce", "allgather", "bcast", "alltoall", "reduce_scatter"):
        assert choose(NODE4, collective, 2 * MIB).transport == "window"
        assert choose(PLAIN, collective, 2 * MIB).transport == "mpi"
    assert choose(SPREAD, "allreduce", 16 * MIB).algorithm == "split_rail"


def test_what_the_mpi_refuses_is_served_by_plans():
    for collective in ("allreduce", "reduce", "reduce_scatter"):
        for nbytes in (2, 1000, MIB):
            for commutative in (True, False):
                choice = choose(PLAIN, collective, nbytes, native=False, commutative=commutative)
                assert choice.algorithm != NATIVE
                assert choice.entry.unmet(4, commutative=commutative, nodes=PLAIN.nodes) is None


@pytest.mark.parametrize("transport", ["", "mpi", "window"], ids="forced {}".format)
def test_preferences_serve_every_size(transport):
    environ = {"MPICOLL_ALLREDUCE": "ring", "MPICOLL_TRANSPORT": transport}
    for nbytes in (0, 8, 16 * MIB):
        choice = choose(NODE4, "allreduce", nbytes, environ.items())
        assert choice.algorithm == "ring" and choice.rule.why == "MPICOLL_ALLREDUCE"
        assert choice.transport == "mpi" or transport != "mpi"
        assert choice.transport == "window" or transport != "window"
    assert choose(NODE4, "bcast", 8, environ.items()).algorithm == NATIVE
    assert Selection(NODE4, environ).quick("allreduce") == 0


def test_preferences_that_cannot_serve_are_passed_over_and_told():
    environ = {"MPICOLL_ALLGATHER": "recursive_doubling"}
    choice = choose(NODE3, "allgather", 8, environ.items())
    assert choice.algorithm == NATIVE
    assert "needs a power of two, not 3" in str(choice)
    assert "MPICOLL_ALLGATHER" in choice.slight and "not 3" in str(choice)
    assert choose(NODE4, "allgather", 8, environ.items()).algorithm == "recursive_doubling"
    assert not choose(NODE4, "allgather", 8, environ.items()).slight


def test_what_is_asked_for_serves_or_raises():
    ring = get("allreduce", "ring")
    assert choose(NODE4, "allreduce", 8, algorithm=ring).transport == "mpi"
    assert choose(NODE4, "allreduce", MIB, algorithm=ring).transport == "window"
    assert choose(NODE4, "allreduce", MIB, {"MPICOLL_TRANSPORT": "mpi"}, algorithm=ring).transport == "mpi"
    with pytest.raises(ValueError, match="ring reorders its operands"):
        choose(NODE4, "allreduce", MIB, algorithm=ring, commutative=False)
    with pytest.raises(ValueError, match="the MPI's own does not take this type"):
        choose(NODE4, "allreduce", MIB, algorithm=get("allreduce", NATIVE), native=False)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {"MPICOLL_TRANSPORT": "carrier pigeon"},
            "MPICOLL_TRANSPORT=carrier pigeon: expected one of mpi, win",
        ),
        ({"MPICOLL_ALLREDUCE": "rign"}, "did you mean 'ring'"),
    ],
)
def test_wrong_preferences(environ, words):
    with pytest.raises(ValueError, match=words):
        preferred(environ)


def test_quick_is_below_every_rule_that_is_not_native():
    for setting in (NODE4, PLAIN, SPREAD):
        selection = Selection(setting, {})
        for collective in COLLECTIVES:
            quick = selection.quick(collective)
            for nbytes in (0, quick // 2, quick - 1):
                assert selection.choose(collective, min(nbytes, 1 << 40)).algorithm == NATIVE
    assert Selection(Setting(1, [[0]]), {}).quick("allreduce") > 1 << 60


@given(
    collective=st.sampled_from(COLLECTIVES),
    nbytes=st.integers(0, 1 << 32),
    setting=st.sampled_from([NODE4, NODE3, PLAIN, SPREAD, Setting(1, [[0]])]),
    commutative=st.booleans(),
)
def test_something_serves_everything(collective, nbytes, setting, commutative):
    choice = choose(setting, collective, nbytes, commutative=commutative)
    assert choice.segments >= 1 and choice.slices >= 1
    assert choice == choose(setting, collective, nbytes, commutative=commutative)
    assert collective in str(choice) and str(nbytes) in str(choice)


def test_defaults_name_registered_algorithms():
    for rule in DEFAULTS:
        assert isinstance(rule, Rule) and get(rule.collective, rule.algorithm)
