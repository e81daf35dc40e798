"""mpi4py's own tests with mpicoll's communicator, every algorithm preferred in turn.

    python tests/peers/run.py             every algorithm at 1, 2, 3 and 5 ranks (about an hour on 2 cores)
    python tests/peers/run.py --sample    for CI: every algorithm on 2 ranks, some on 3 and 5 (some 90 s)

The MPI is the one that this Python's mpi4py loads. Its tests come from the source distribution of the
installed version, which pip downloads once into build/peers. A run prefers one algorithm of every collective
(MPICOLL_ALLREDUCE=ring MPICOLL_BCAST=binomial ...), so there are as many runs as the collective with the most
algorithms has. A run fails when a test fails on any rank, and when an algorithm that was preferred and can
serve that number of ranks served no call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "peers"
sys.path.insert(0, str(ROOT))

from mpicoll.plans import algorithms  # noqa: E402

RUN = [sys.executable, "-c", "from mpicoll.cli import main; main()", "run", "--quiet"]
SIZES = (1, 2, 3, 5)
SHORT = ["test_cco_buf", "test_cco_nb_buf", "test_cco_pr_buf"]


def suite() -> Path:
    """mpi4py's test directory, of the version that is installed."""
    name = f"mpi4py-{version('mpi4py')}"
    found = BUILD / name / "test"
    if not found.is_dir():
        BUILD.mkdir(parents=True, exist_ok=True)
        wanted = name.replace("-", "==")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        if subprocess.run([*pip, "--no-binary", "mpi4py", wanted, "-d", str(BUILD)]).returncode:
            raise SystemExit(
                f"pip could not download the source distribution of {wanted}, which has the tests"
            )
        with tarfile.open(BUILD / f"{name}.tar.gz") as archive:
            archive.extractall(BUILD, filter="data")
    return found


@dataclass
class Case:
    """One launch: how many ranks, which algorithms are preferred, which of mpi4py's modules run."""

    size: int
    preferred: dict[str, str]
    transport: str
    modules: list[str] = field(default_factory=list)
    own: bool = True  # our class, or mpi4py's own

    def __str__(self) -> str:
        if not self.own:
            return "mpi4py's own class"
        names = " ".join(f"{collective}={name}" for collective, name in self.preferred.items())
        return f"{self.transport}: {names}" if names else "our selection"

    def environment(self) -> dict[str, str]:
        """The environment of the suite."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("MPICOLL_")}
        env["MPI4PY_TESTS"] = str(suite())
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
        if not self.own:
            return env
        env["COMM_CLASS"] = "mpicoll:Intracomm"
        if self.transport:
            env["MPICOLL_TRANSPORT"] = self.transport
        if not set(self.preferred.values()) - {"native"}:
            env["ALLOW_NATIVE"] = "1"
        return env | {f"MPICOLL_{collective.upper()}": name for collective, name in self.preferred.items()}

    def idle(self, served: dict[str, dict[str, int]]) -> list[str]:
        """Preferred algorithms that could have served a call here and did not."""
        nodes = [list(range(self.size))]
        return [
            f"{collective} {name}"
            for collective, name in self.preferred.items()
            if self.size > 1
            and not algorithms.get(collective, name).unmet(self.size, nodes=nodes)
            and not served.get(collective, {}).get(name)
        ]


def columns() -> list[dict[str, str]]:
    """Every algorithm of every collective in as few runs as can be, native first."""
    runs = zip_longest(*algorithms.registry.values())
    preferred = []
    for names in runs:
        pairs = zip(algorithms.registry, names, strict=True)
        preferred.append({collective: name for collective, name in pairs if name is not None})
    return preferred


def cases(sample: bool, sizes: list[int]) -> list[Case]:
    """What is run, in order."""
    runs = columns()
    if not sample:
        every = [({}, "")] + [(each, transport) for each in runs for transport in ("mpi", "window")]
        own = [Case(size, {}, "mpi", own=False) for size in sizes]
        return own + [Case(size, each, transport) for size in sizes for each, transport in every]
    chosen = [Case(2, {}, ""), Case(2, runs[1], "mpi"), Case(1, runs[1], "mpi", SHORT)]
    chosen += [Case(2, each, ("mpi", "window")[index % 2], SHORT) for index, each in enumerate(runs)]
    chosen += [Case(3, each, ("window", "mpi")[index % 2], SHORT) for index, each in enumerate(runs[1:4])]
    return [*chosen, Case(5, runs[2], "mpi", SHORT)]


def launch(case: Case, seconds: float) -> tuple[list[str], dict[str, object], str]:
    """Run one case: what went wrong, what the suite reported, and all it wrote."""
    argv = [
        *RUN,
        "-n",
        str(case.size),
        "--timeout",
        str(seconds + 10),
        str(HERE / "mpi4py_suite.py"),
        *case.modules,
    ]
    env = case.environment() | {"SUITE_SECONDS": str(seconds)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, errors="replace")
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"tests"')]
    if not lines:
        return [f"no report, exit code {done.returncode}"], {}, done.stdout + done.stderr
    report = json.loads(lines[-1])
    wrong = [f"{test}: {why}" for test, why in report["failures"].items()]
    wrong += [f"{algorithm} served no call" for algorithm in case.idle(report["served"]) if not case.modules]
    if done.returncode and not wrong:
        wrong = [f"exit code {done.returncode}; {report['planned']} calls served by plans"]
    return wrong, report, done.stdout + done.stderr


def main() -> int:
    """Run all cases and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", action="store_true", help="a part of them, for CI")
    parser.add_argument("-n", type=int, action="append", help="numbers of ranks instead of 1, 2, 3 and 5")
    parser.add_argument("-k", help="only runs whose description contains this, such as bcast=chain")
    parser.add_argument("--seconds", type=float, default=300, help="time for one run (300)")
    arguments = parser.parse_args()
    print(f"{'ranks':>5} {'tests':>6} {'skipped':>8} {'by plans':>9} {'failed':>7} {'s':>6}  run", flush=True)
    passed = failed = 0
    for case in cases(arguments.sample, arguments.n or list(SIZES)):
        if arguments.k and arguments.k not in str(case):
            continue
        start = time.monotonic()
        wrong, report, output = launch(case, arguments.seconds)
        took = time.monotonic() - start
        tests, skipped, planned = (report.get(key, "-") for key in ("tests", "skipped", "planned"))
        numbers = f"{case.size:>5} {tests:>6} {skipped:>8} {planned:>9} {len(wrong):>7} {took:>6.1f}"
        print(f"{numbers}  {case}", flush=True)
        for line in wrong[:5]:
            print(f"      {line}", flush=True)
        if wrong:
            path = BUILD / f"failed-{failed}.log"
            path.write_text(f"{case.size} ranks, {case}\n{output}")
            print(f"      everything it wrote: {path}", flush=True)
        passed, failed = passed + (not wrong), failed + bool(wrong)
    print(f"{passed} passed, {failed} failed")
    return int(bool(failed) or not passed)


if __name__ == "__main__":
    sys.exit(main())
