"""Tests that every rank runs together: one report, no hang.

    mpicoll run -n 3 -- python -m pytest --with-mpi tests/mpi

Rank 0 reports. After every test the ranks agree on its outcome over a communicator of their own, with the
MPI's own calls. Where ranks disagree (one failed, the others went on) later collectives could meet wrongly,
so the run ends there, with every failing rank's report. A test that takes too long, or a rank that waits in
vain for another, ends the job with every rank's Python stack on stderr, and what the kernel says of its
threads: a rank that waits in the kernel, or gets no core, answers no signal.
"""

import contextlib
import faulthandler
import importlib
import os
import pickle
import signal
import socket
import sys
import threading
import time
import zlib
from pathlib import Path

import mpi4py
import numpy as np
import pytest
from mpi4py import MPI

import mpicoll

LIMIT = float(os.environ.get("MPICOLL_TEST_LIMIT", 120))  # seconds a test may take
PATIENCE = 15  # seconds a rank that failed waits for the others to end the test too
JOBS = Path(__file__).parents[2] / "jobs"
OUTCOMES = ("passed", "skipped", "failed")

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()


class Referee:
    """What this rank knows of the others, apart from the communicators under test."""

    def __init__(self):
        # pytest captures descriptor 2 during tests; stacks and last words must reach the terminal
        self.stderr = os.fdopen(os.dup(2), "w", buffering=1)
        self.comm = WORLD.Dup()
        self.peers = WORLD.allgather((socket.gethostname(), os.getpid()))
        self.deadline, self.test = float("inf"), ""
        faulthandler.register(signal.SIGUSR1, file=self.stderr, all_threads=True)
        faulthandler.register(signal.SIGTERM, file=self.stderr, all_threads=True, chain=True)
        threading.Thread(target=self._watch, daemon=True, name="referee").start()

    def start(self, test):
        """Begin the time of a test. Ranks end a stuck job one after the other: one dump is enough."""
        self.test = test
        self.deadline = time.monotonic() + LIMIT + 3 * RANK
        # for a rank that holds the interpreter lock in a C call, where no thread of Python's can run
        faulthandler.dump_traceback_later(LIMIT + 60, exit=True, file=self.stderr)

    def stop(self):
        self.deadline = float("inf")
        faulthandler.cancel_dump_traceback_later()

    def _watch(self):
        while time.monotonic() < self.deadline:
            time.sleep(0.5)
        self.end_job(f"{self.test} took more than {LIMIT:g} s")

    def end_job(self, why):
        """Print every rank's stacks and end all ranks of this host; the launcher ends those of others."""
        self.stderr.write(f"\nrank {RANK}: {why}; the job ends. Python stacks follow.\n")
        here = socket.gethostname()
        for rank, (host, pid) in enumerate(self.peers):
            if host == here:
                self.stderr.write(f"\n-- rank {rank}\n")
                before = kernel_side(pid)
                with contextlib.suppress(ProcessLookupError):  # it is gone: the others must end all the same
                    os.kill(pid, signal.SIGUSR1)
                time.sleep(0.3)
                for thread, (ran, text) in kernel_side(pid).items():
                    lately = ran - before.get(thread, (0, ""))[0]
                    self.stderr.write(f"thread {thread}: ran {lately:.3f} of the last 0.3 s, {text}\n")
        for host, pid in self.peers:
            if host == here and pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        os._exit(1)

    def wait(self, request, seconds, last_words=""):
        """Wait without burning a core that a slower rank may need."""
        end, nap = time.monotonic() + seconds, 0.0
        while not request.Test():
            if time.monotonic() > end:
                self.stderr.write(last_words)
                self.end_job(f"{self.test}: no answer from the other ranks within {seconds:g} s")
            time.sleep(nap)
            nap = min(nap + 2e-5, 1e-3)

    def gather(self, value, seconds, last_words=""):
        """Everybody's `value`, by the MPI's own non-blocking calls."""
        mine = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
        counts = np.empty(SIZE, dtype=np.int64)
        self.wait(self.comm.Iallgather(np.array([mine.size]), counts), seconds, last_words)
        theirs = np.empty(counts.sum(), dtype=np.uint8)
        self.wait(self.comm.Iallgatherv(mine, [theirs, counts]), seconds, last_words)
        return [pickle.loads(part) for part in np.split(theirs, np.cumsum(counts)[:-1])]

    def agree(self, what, outcome, text=""):
        """All ranks' (what, outcome, text) where they differ or one failed; None where all is well."""
        code = OUTCOMES.index(outcome)
        mine = np.array([code, zlib.crc32(what.encode())], dtype=np.int64)
        mine, extremes = np.concatenate([mine, -mine]), np.empty(4, dtype=np.int64)
        seconds = PATIENCE if outcome == "failed" else 2 * LIMIT
        self.wait(self.comm.Iallreduce(mine, extremes, op=MPI.MAX), seconds, text)
        if extremes[0] < OUTCOMES.index("failed") and (extremes[:2] == -extremes[2:]).all():
            return None
        return self.gather((what, outcome, text), seconds, text)


def kernel_side(pid):
    """Of each thread of a process: the seconds it ran so far, and its state and place in the kernel."""
    threads = {}
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            name, stat = (task / "stat").read_text(errors="replace").partition("(")[2].rsplit(") ", 1)
            place = (task / "wchan").read_text()
            with contextlib.suppress(OSError):  # for root to read, and not in every kernel
                place = " < ".join(line.split()[-1] for line in (task / "stack").read_text().splitlines())
        except OSError:  # the thread has ended
            continue
        ran = sum(map(int, stat.split()[11:13])) / os.sysconf("SC_CLK_TCK")
        place = "not in the kernel" if place in ("", "0") else place
        threads[int(task.name)] = ran, f"{name}, state {stat[0]}: {place}"
    return threads


REFEREE = pytest.StashKey()
STATE = pytest.StashKey()


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    config.stash[REFEREE] = Referee()
    if RANK:
        reporter = config.pluginmanager.getplugin("terminalreporter")
        config.pluginmanager.unregister(reporter)
        silent = type(reporter)(config, open(os.devnull, "w"))
        config.pluginmanager.register(silent, "terminalreporter")


def pytest_report_header():
    library = MPI.Get_library_version().split(",")[0].split("\n")[0].strip("\0 ")
    return f"MPI: n = {SIZE}, {library}, mpi4py {mpi4py.__version__}"


def pytest_collectreport(report):
    if report.failed:
        COLLECTION_ERRORS.append(report.longreprtext)


COLLECTION_ERRORS: list[str] = []


def pytest_collection_finish(session):
    """Every rank must have found the same tests, in the same order."""
    what = "\n".join(item.nodeid for item in session.items)
    outcome = "failed" if COLLECTION_ERRORS else "passed"
    referee = session.config.stash[REFEREE]
    votes = referee.agree(what, outcome, "\n".join(COLLECTION_ERRORS))
    if votes is None:
        return
    if RANK == 0:
        for rank, (theirs, _, text) in enumerate(votes):
            sys.stderr.write(f"rank {rank}: {len(theirs.splitlines())} tests; {text or 'no error'}\n")
    if any(vote[1] != "failed" for vote in votes):
        pytest.exit("the ranks did not collect the same tests", returncode=pytest.ExitCode.INTERNAL_ERROR)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.config.stash[REFEREE].start(item.nodeid)
    try:
        return (yield)
    finally:
        item.config.stash[REFEREE].stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    state = item.stash.setdefault(STATE, {"outcome": "passed", "agreed": False})
    if report.outcome != "passed":
        state["outcome"] = report.outcome
    if not state["agreed"] and (report.failed or report.when == "teardown"):
        state["agreed"] = True
        text = report.longreprtext + "".join(f"\n-- {name}\n{body}" for name, body in report.sections)
        votes = item.config.stash[REFEREE].agree(item.nodeid, state["outcome"], text if report.failed else "")
        if votes is not None:
            tell_of_others(item.session, report, votes)
    return report


def tell_of_others(session, report, votes):
    """Put what other ranks report into this rank's report; end the session where the ranks differ."""
    for rank, (what, outcome, text) in enumerate(votes):
        if rank != RANK and (outcome == "failed" or what != votes[RANK][0]):
            report.sections.append((f"rank {rank}: {outcome} {what}", text))
    if len({vote[:2] for vote in votes}) > 1:
        told = ", ".join(f"rank {rank} {outcome}" for rank, (_, outcome, _) in enumerate(votes))
        if not report.failed:
            report.outcome, report.longrepr = "failed", f"the ranks disagree: {told}"
        session.shouldfail = f"the ranks disagree ({told}); later collectives could meet wrongly"


@pytest.fixture(scope="session")
def world():
    """The MPI's own communicator of all ranks."""
    return WORLD


@pytest.fixture(scope="session")
def comm():
    """Our communicator of all ranks, shared by all tests: leave it as you found it."""
    return mpicoll.Intracomm(WORLD)


@pytest.fixture
def alone():
    """Our communicator of this rank only."""
    comm = mpicoll.Intracomm(MPI.COMM_SELF.Dup())
    yield comm
    comm.Free()


@pytest.fixture
def folder(comm, tmp_path):
    """One folder for all ranks."""
    yield Path(comm.bcast(str(tmp_path)))
    comm.Barrier()


@pytest.fixture
def job(monkeypatch):
    """What imports a module of the jobs."""
    monkeypatch.syspath_prepend(str(JOBS))
    return importlib.import_module


@pytest.fixture
def run(job, monkeypatch):
    """What runs a job as its command line would, on the ranks of this test."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        job("train_text").start(job(name).main)

    return run


@pytest.fixture(scope="session")
def text():
    """A text to train on and one to hold out, of a language of 80 words."""
    random = np.random.default_rng(11)
    words = [bytes(random.integers(97, 123, random.integers(2, 8), np.uint8)) for _ in range(80)]
    spoken = b" ".join(words[k] for k in (80 * random.random(8000) ** 3).astype(int))
    spoken = np.frombuffer(spoken, np.uint8)
    return spoken[:20_000], spoken[20_000:24_000]
