"""`import mpicoll` initialises nothing: names are looked up when they are used."""

import subprocess
import sys

import pytest

import mpicoll


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "names",
    [
        "mpicoll",
        "mpicoll.Send",
        "mpicoll.verify.check",
        "mpicoll.draw",
        "mpicoll.algorithms.get",
        "dir(mpicoll)",
    ],
)
def test_pure_names_do_not_import_mpi(names):
    done = run(f"import sys, mpicoll; {names}; print('mpi4py.MPI' in sys.modules, 'numpy' in sys.modules)")
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_mpi_comes_with_the_communicator():
    done = run("import sys, mpicoll; mpicoll.Intracomm; print('mpi4py.MPI' in sys.modules)")
    assert done.stdout.split() == ["True"], done.stderr


def test_every_public_name_is_there():
    for name in mpicoll.__all__:
        assert getattr(mpicoll, name) is getattr(mpicoll, name)
        assert name in dir(mpicoll)
    with pytest.raises(AttributeError, match="'mpicoll' has no attribute 'Intercomm'"):
        mpicoll.Intercomm  # noqa: B018


def test_a_script_that_is_not_there_is_named():
    done = subprocess.run(
        [sys.executable, "-m", "mpicoll", "nope.py"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0 and "no such script: nope.py" in done.stderr
    assert "Traceback" not in done.stderr
