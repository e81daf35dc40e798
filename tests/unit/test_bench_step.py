"""``mpicoll bench-step`` as a command, on the MPI that is installed."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpicoll.cli import bench_step, results, results_step

pytest.importorskip("mpi4py")
ROOT = Path(__file__).resolve().parents[2]
MS = 1_000_000
KINDS = {"compute", "comm", "comm at once", "blocking", "overlapped"}


def run(*argv):
    """A command in a process of its own."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", "from mpicoll.cli import main; main()", "bench-step", *map(str, argv)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path}
    )


# -- results: pure ---------------------------------------------------------------------------------


def kept(spec, *lines):
    return {
        "format": results.STEP_FORMAT,
        "command": ["mpicoll", "bench-step", spec["what"]],
        "date": "2026-01-01 00:00 UTC",
        "spec": spec,
        "machine": {
            "cpu": "a CPU",
            "cores": 2,
            "kernel": "6",
            "library": "An MPI",
            "hosts": 2,
            "ranks": 2,
            "threads": "1",
        },
        "versions": {"mpi4py": "4.1.2"},
        "launches": [{"load": [0.5, 0, 0], "lines": [line]} for line in lines],
    }


def kinds(compute, comm, at_once, blocking, overlapped):
    samples = {
        "compute": compute,
        "comm": comm,
        "comm at once": at_once,
        "blocking": blocking,
        "overlapped": overlapped,
    }
    return {
        "seconds": 0.02,
        "samples": {kind: [5 * MS, value * MS, 999 * MS] for kind, value in samples.items()},
        "wrong": dict.fromkeys(samples, 0),
    }


@pytest.fixture
def overlap():
    """Launches with 160 ms of compute and 100, 120, 80 ms of communication: 75, 60, 80 ms are hidden."""
    spec = {
        "what": "overlap",
        "compute": "matmul",
        "seconds": 0.02,
        "buckets": 8,
        "bucket_mb": 1.0,
        "iters": 3,
    }
    return kept(
        spec, kinds(160, 100, 110, 260, 185), kinds(160, 130, 120, 290, 220), kinds(160, 80, 80, 240, 160)
    )


@pytest.fixture
def overhead():
    """Two launches; the median of the differences is not the difference of the medians."""
    lines = [
        {
            "samples": {
                "DistributedOptimizer": {
                    "without": [1 * MS, 5 * MS, 9 * MS],
                    "with": [7 * MS, 6 * MS, 10 * MS + late],
                }
            },
            "wrong": {"DistributedOptimizer": 0},
        }
        for late in (0, 2 * MS)
    ]
    return kept({"what": "overhead", "against": None, "iters": 3}, *lines)


def test_the_share_hidden_is_that_of_the_faster_communication(overlap):
    lines = [launch["lines"][0] for launch in overlap["launches"]]
    shares = [results_step.hidden(line, "overlapped") for line in lines]
    assert shares == pytest.approx([0.75, 0.5, 1])
    assert results_step.hidden(lines[0], "blocking") == 0


def test_the_share_hidden_is_that_of_the_shorter_half():
    assert results_step.hidden(kinds(50, 100, 100, 150, 110), "overlapped") == pytest.approx(0.8)


def test_overlap_is_shown_with_its_spread(overlap):
    text = results_step.as_table(overlap)
    assert (
        "overlap, 2 ranks on 2 hosts, BLAS threads: 1; 8 buckets of 1 MiB, 20 ms of matmul for each" in text
    )
    assert "a CPU, 2 cores" in text and "An MPI; mpi4py 4.1.2" in text and "Wrong values: 0 OK" in text
    row = next(row for row in text.splitlines() if " overlapped " in row)
    shown = "185.0 (160.0..220.0)", "0.75 (0.50..1.00)", "0.71 (0.67..0.76)"
    assert re.split(r"\s{2,}", row.strip()) == ["overlapped", *shown]
    assert "| compute | 160.0 (160.0..160.0) | - | - |" in results_step.as_markdown(overlap)


def test_overhead_is_the_median_difference_of_pairs(overhead):
    first, second = (launch["lines"][0] for launch in overhead["launches"])
    assert results_step.added(first, "DistributedOptimizer") == pytest.approx(1)
    assert results_step.added(second, "DistributedOptimizer") == pytest.approx(3)
    row = "| DistributedOptimizer | 5.00 (5.00..5.00) | 7.00 (7.00..7.00) | 2.00 (1.00..3.00) |"
    assert row in results_step.as_markdown(overhead)


@pytest.mark.parametrize("which", ["overlap", "overhead"])
def test_kept_results_are_read_again(which, request, tmp_path):
    result, path = request.getfixturevalue(which), tmp_path / "kept.json"
    results.save(result, path)
    assert results.load(path, results.STEP_FORMAT) == result
    for form, told in (("table", "# Wrong values: 0 OK"), ("markdown", "| ---: |"), ("json", '"spec"')):
        shown = CliRunner().invoke(bench_step.command, ["--show", str(path), "--format", form])
        assert shown.exit_code == 0 and told in shown.output


def test_the_other_commands_result_is_named(overlap, tmp_path):
    results.save(overlap, tmp_path / "kept.json")
    with pytest.raises(ValueError, match="show it with mpicoll bench-step"):
        results.load(tmp_path / "kept.json")


def test_wrong_values_fail(overlap, tmp_path):
    overlap["launches"][1]["lines"][0]["wrong"]["overlapped"] = 3
    results.save(overlap, tmp_path / "kept.json")
    shown = CliRunner().invoke(bench_step.command, ["--show", str(tmp_path / "kept.json")])
    assert shown.exit_code == 1 and "Wrong values: 3 FAILED" in shown.output


# -- bad input: refused before anything is launched ------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "overlap or overhead"),
        (["overlaps"], "'overlaps'"),
        (["overlap", "-n", "1"], "2<=x<=1000000"),
        (["overlap", "--seconds", "soon"], "'soon' is not a valid float"),
        (["overlap", "--seconds", "0"], "0<x<=60, nor comm"),
        (["overlap", "--seconds", "nan"], "'nan' is not a finite number, nor comm"),
        (["overlap", "--bucket-mb", "inf"], "inf is not in the range"),
        (["overlap", "--bucket-mb", "nan"], "'nan' is not a finite number"),
        (["overlap", "--against", "ddp"], "--against is no option of overlap"),
        (["overhead", "--bucket-mb", "2"], "--bucket-mb is no option of overhead"),
        (["--show", "missing.json"], "missing.json"),
        (["overlap", "-w", "missing/kept.json"], "missing: no such directory"),
        (["overlap", "-w", "/proc/kept.json"], "/proc/kept.json: no file can be made there"),
        (["overlap", "-w", "a" * 300], "no file can be made there (File name too long)"),
    ],
)
def test_bad_input(argv, told):
    shown = CliRunner().invoke(bench_step.command, argv)
    assert shown.exit_code == 2 and told in shown.output


def test_the_comparison_needs_torch(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    shown = CliRunner().invoke(bench_step.command, ["overhead", "--against", "ddp"])
    assert shown.exit_code == 1 and "pip install torch" in shown.output


# -- measured on two ranks -------------------------------------------------------------------------


@pytest.mark.parametrize("compute", [["--seconds", "0.001"], ["--compute", "sleep", "--seconds", "comm"]])
def test_overlap_is_measured_and_checked(compute, tmp_path):
    argv = ["overlap", "--buckets", 3, "--bucket-mb", "0.1", "--iters", 2, "--launches", 2]
    done = run(*argv, *compute, "-w", tmp_path / "kept.json")
    assert done.returncode == 0, done.stderr
    assert "Wrong values: 0 OK" in done.stdout
    for launch in json.loads((tmp_path / "kept.json").read_text())["launches"]:
        (line,) = launch["lines"]
        assert KINDS <= set(line["samples"]) <= {*KINDS, "default"} and line["seconds"] > 0
        assert all(len(samples) == 2 and min(samples) > 0 for samples in line["samples"].values())
        assert set(line["wrong"].values()) == {0}


def test_overhead_is_measured_and_checked():
    """Against PyTorch as well where it is installed."""
    torch = importlib.util.find_spec("torch") is not None
    against = ["--against", "ddp"] if torch else []
    done = run("overhead", "--iters", 5, "--launches", 1, "--format", "json", *against)
    assert done.returncode == 0, done.stderr
    (line,) = json.loads(done.stdout)["launches"][0]["lines"]
    labels = {"DistributedOptimizer", "DistributedDataParallel"} if torch else {"DistributedOptimizer"}
    assert set(line["samples"]) == set(line["wrong"]) == labels
    for pair in line["samples"].values():
        assert len(pair["without"]) == len(pair["with"]) == 5
    assert set(line["wrong"].values()) == {0}
