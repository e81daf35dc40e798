"""``mpicoll bench`` and ``python -m mpicoll`` as commands, on the MPI that is installed."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpicoll.cli import bench, launches, results, script
from mpicoll.cli.values import NewFile

pytest.importorskip("mpi4py")
ROOT = Path(__file__).resolve().parents[2]


def run(*argv, **env):
    """A command in a process of its own."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", "from mpicoll.cli import main; main()", *map(str, argv)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path, **env}
    )


# -- results: pure ---------------------------------------------------------------------------------


def line(nbytes, **samples):
    labels = list(samples)
    return {
        "nbytes": nbytes,
        "count": nbytes // 4,
        "samples": {label.replace("_", "/"): values for label, values in samples.items()},
        "ran": {label.replace("_", "/"): "native" if label == "native" else "ring" for label in labels},
        "wrong": dict.fromkeys([label.replace("_", "/") for label in labels], 0),
        "trouble": {},
    }


@pytest.fixture
def result():
    """Two launches; the second ran twice as slow on both sides."""
    launches = [
        {
            "load": [0.5, 0, 0],
            "lines": [line(1 << 20, native=[300_000, 200_000, 100_000], auto=[100_000] * 3)],
        },
        {
            "load": [1.5, 0, 0],
            "lines": [line(1 << 20, native=[400_000] * 3, auto=[100_000, 100_000, 900_000])],
        },
    ]
    return {
        "format": results.FORMAT,
        "command": ["mpicoll", "bench", "allreduce"],
        "date": "2026-01-01 00:00 UTC",
        "spec": {
            "collective": "allreduce",
            "dtype": "float32",
            "op": "sum",
            "root": 0,
            "in_place": True,
            "call_overhead": False,
            "candidates": bench.candidates(["auto"], "ordinary"),
        },
        "machine": {"cpu": "a CPU", "cores": 2, "kernel": "6", "library": "An MPI", "hosts": 1, "ranks": 4},
        "versions": {"mpi4py": "4.1.2"},
        "launches": launches,
    }


def test_medians_of_launches_and_ratios_inside_them(result):
    native, auto = results.rows(result)
    assert (native.time, native.ratio) == (300, 1)
    assert auto.time == 100
    assert (auto.ratio, auto.lowest, auto.highest) == (3, 2, 4)
    assert native.algbw == pytest.approx((1 << 20) / 300e-6 / 1e9)
    assert native.busbw == pytest.approx(native.algbw * 1.5)


def test_bus_factors_are_those_of_nccl_tests():
    assert results.bus_factor("allreduce", 4) == 1.5
    assert {results.bus_factor(name, 4) for name in ("allgather", "reduce_scatter", "alltoall")} == {0.75}
    assert results.bus_factor("bcast", 4) == results.bus_factor("reduce", 4) == 1


def test_table_says_what_was_measured_and_where(result):
    text = results.as_nccl(result)
    assert (
        "a CPU, 2 cores" in text
        and "An MPI; mpi4py 4.1.2" in text
        and "load at the start: 0.50, 1.50" in text
    )
    row = next(row for row in text.splitlines() if " auto " in row)
    assert row.split() == [
        "1048576", "262144", "float32", "sum", "-1", "auto", "ring", "100.00", "10.486", "15.729", "0",
        "3.00", "(2.00..4.00)",
    ]  # fmt: skip
    assert "| 1 MiB | 300.0 | 3.00 (2.00..4.00), ring |" in results.as_markdown(result)


def test_kept_results_are_read_again(result, tmp_path):
    results.save(result, tmp_path / "kept.json")
    assert results.load(tmp_path / "kept.json") == result
    shown = CliRunner().invoke(bench.command, ["--show", str(tmp_path / "kept.json"), "--format", "markdown"])
    assert shown.exit_code == 0 and "1 MiB" in shown.output


@pytest.mark.parametrize("text", ["", "{}", "[1]", "\x00", '{"format": "other"}'])
def test_another_file_is_no_result(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    shown = CliRunner().invoke(bench.command, ["--show", str(tmp_path / "other.json")])
    assert shown.exit_code == 1 and "other.json is" in shown.output


def test_the_load_before_the_first_launch_tells_of_other_work(result):
    assert results.doubts(result) == []
    result["launches"][0]["load"][0] = 1.2
    assert "the machine was not idle (load 1.2)" in results.as_nccl(result)


def test_wrong_results_fail(result, tmp_path):
    result["launches"][0]["lines"][0]["wrong"]["auto"] = 3
    results.save(result, tmp_path / "kept.json")
    shown = CliRunner().invoke(bench.command, ["--show", str(tmp_path / "kept.json")])
    assert shown.exit_code == 1 and "Out of bounds values: 3 FAILED" in shown.output


def test_plot(result, tmp_path):
    pytest.importorskip("matplotlib")
    results.plot(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    shown = CliRunner().invoke(bench.command, ["allreduce", "--plot", str(tmp_path / "plot.doc")])
    assert shown.exit_code == 2 and "plot.doc: unknown kind of picture; known are" in shown.output


def test_what_is_no_file_is_written_to_and_stays_what_it_is(result, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit((tmp_path / "pipe").read_text)
        results.save(result, tmp_path / "pipe")
        assert json.loads(read.result(30)) == result
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_is_written_through_and_looking_leaves_it_alone(result, tmp_path):
    link, file = tmp_path / "link.json", tmp_path / "file.json"
    link.symlink_to(file)
    assert NewFile().convert(str(link), None, None) == link
    assert link.is_symlink() and not file.exists()
    results.save(result, link)
    assert link.is_symlink() and results.load(file) == result


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (8, "8 B"), (65536, "64 KiB"), (1500, "1.5 KiB")])
def test_readable(nbytes, text):
    assert results.readable(nbytes) == text


# -- bad input: refused before anything is launched ------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "which collective?"),
        (["allreduces"], "'allreduce'"),
        (["allreduce", "--algorithms", "rong"], "did you mean 'ring'"),
        (["allreduce", "--algorithm", "missing.py:mine"], "missing.py"),
        (["allgather", "-n", "3", "--algorithms", "recursive_doubling"], "power of two"),
        (["allreduce", "-b", "4X"], "is no size"),
        (["allreduce", "-b", "0"], "'0' is no size between 1 and 1024G"),
        (["allreduce", "-n", "9" * 20], "1<=x<=1000000"),
        (["allreduce", "-w", ""], "a directory"),
        (["allreduce", "-w", "same.svg", "--plot", "same.svg"], "--keep and --plot name one file"),
        (["allreduce", "-b", "4M", "-e", "1M"], "larger than"),
        (["allreduce", "-n", "0"], "-n"),
        (["bcast", "-r", "2"], "root 2 is no rank"),
        (["bcast", "--call-overhead"], "allreduce"),
        (["--show", "missing.json"], "missing.json"),
    ],
)
def test_bad_input(argv, told):
    shown = CliRunner().invoke(bench.command, argv)
    assert shown.exit_code == 2 and told in shown.output


@pytest.mark.parametrize(("text", "size"), [("8", 8), ("64K", 65536), ("4m", 1 << 22), ("1GiB", 1 << 30)])
def test_sizes_as_people_write_them(text, size):
    assert bench.Size().convert(text, None, None) == size


# -- measured on two ranks -------------------------------------------------------------------------


def test_bench_measures_and_checks(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from mpicoll.plan import Recv, Send\n"
        "def swap(rank, size):\n"
        "    yield [Send(1 - rank, (0, 1)), Recv(1 - rank, (0, 1), reduce=True)]\n"
    )
    argv = ["allreduce", "-b", "8", "-e", "32K", "-f", "64", "--launches", "2", "--iters", "4"]
    argv += ["--algorithms", "auto,ring", "--algorithm", f"{mine}:swap", "-w", tmp_path / "kept.json"]
    done = run("bench", *argv)
    assert done.returncode == 0, done.stderr
    assert "Out of bounds values: 0 OK" in done.stdout
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert [len(launch["lines"]) for launch in kept["launches"]] == [3, 3]
    labels = {"native", "auto", "auto/window", "ring", "ring/window", "swap", "swap/window"}
    for each in kept["launches"][1]["lines"]:
        assert set(each["samples"]) == labels and not each["trouble"]
        assert {len(samples) for samples in each["samples"].values()} == {4}
        assert each["ran"]["ring"] == "ring/mpi" and each["ran"]["swap/window"] == "swap/mpi"


@pytest.mark.parametrize(
    "collective", ["reduce", "bcast", "allgather", "reduce_scatter", "alltoall", "barrier"]
)
def test_bench_of_every_collective(collective):
    done = run(
        "bench", collective, "-b", "4K", "-e", "4K", "--launches", "1", "--iters", "2", "--format", "json"
    )
    assert done.returncode == 0, done.stderr
    (only,) = json.loads(done.stdout)["launches"][0]["lines"]
    assert set(only["wrong"].values()) == {0} and set(only["samples"]) == {"native", "auto", "auto/window"}


def test_call_overhead():
    done = run("bench", "allreduce", "--call-overhead", "--launches", "1")
    assert done.returncode == 0, done.stderr
    assert "added by an 8-byte call that goes native" in done.stdout


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise RuntimeError('too late')\n    yield", "too late"),
        ("yield [Send(1 - rank, (0, 1)), Recv(1 - rank, (0, 1))]", "chunk"),
        ("return 3 +", "broken.py"),
    ],
)
def test_a_broken_algorithm_is_refused(tmp_path, body, told):
    broken = tmp_path / "broken.py"
    broken.write_text(f"from mpicoll.plan import Recv, Send\ndef mine(rank, size):\n    {body}\n")
    shown = CliRunner().invoke(bench.command, ["allreduce", "--algorithm", f"{broken}:mine"])
    assert shown.exit_code == 2 and told in shown.output


def test_a_launch_that_fails_is_told(monkeypatch):
    monkeypatch.setattr(launches, "RUN", (sys.executable, "-c", "import sys; sys.exit(7)"))
    shown = CliRunner().invoke(bench.command, ["barrier"])
    assert shown.exit_code == 1 and "exit code 7" in shown.output


# -- python -m mpicoll -----------------------------------------------------------------------------

PROGRAM = """
import sys
from mpi4py import MPI
import numpy as np
comm = MPI.COMM_WORLD
x = np.full(1000, comm.rank + 1.0)
for _ in range(3):
    comm.Allreduce(MPI.IN_PLACE, x)
half = comm.Split(comm.rank % 2)
half.Bcast(x)
if comm.rank == 0:
    print(type(comm).__module__, __name__, sys.argv[1:])
if "die" in sys.argv and comm.rank == 1:
    raise RuntimeError("rank 1 has enough")
sys.exit(int(sys.argv[-1]))
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_an_unmodified_program_gets_a_table(program):
    done = run("run", "-n", 2, "--quiet", "-m", "mpicoll", program, "--flag", 0, MPICOLL_ALLREDUCE="ring")
    assert done.returncode == 0, done.stderr
    assert "mpicoll.comm.intracomm __main__ ['--flag', '0']" in done.stdout
    rows = [row.split() for row in done.stderr.splitlines()]
    assert any(row[:4] == ["allreduce", "ring", "3", "24000"] for row in rows), done.stderr
    assert any(row[:1] == ["bcast"] for row in rows)


def test_its_exit_code_is_the_programs(program):
    assert run("run", "-n", 2, "--quiet", "-m", "mpicoll", program, 3).returncode == 3


def test_an_exception_on_one_rank_ends_all(program):
    done = run("run", "-n", 2, "--quiet", "--timeout", 60, "-m", "mpicoll", program, "die", 0)
    assert done.returncode not in (0, 124) and "rank 1 has enough" in done.stderr


def test_without_arguments_it_says_what_there_is(capsys):
    with pytest.raises(SystemExit) as ending:
        script.main([])
    assert ending.value.code == 0 and "python -m mpicoll SCRIPT.py" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="missing"):
        script.main(["-m"])


def test_table_puts_the_longest_first():
    from mpicoll.runtime.record import Total

    text = script.table(
        {("bcast", "native"): Total(2, 80, 0.001), ("allreduce", "ring"): Total(4, 4000, 0.5)}
    )
    rows = [row.split() for row in text.splitlines()]
    assert rows[2] == ["allreduce", "ring", "4", "4000", "0.500", "125000.0"] and rows[3][0] == "bcast"
    assert "no collective" in script.table({})
