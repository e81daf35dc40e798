"""SIGKILL at random instants, also while checkpoints are written: every resume ends as if nothing had been.

python -m pytest tests/chaos                    # 10 kills
python -m pytest tests/chaos --kills 100 --seed 7
"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer

import numpy as np
import pytest

from mpicoll.io.checkpoint.folder import kept, read_manifest

JOB = Path(__file__).with_name("job.py")
LAUNCH = [sys.executable, "-c", "from mpicoll.cli import main; main(prog_name='mpicoll')", "run"]
RANKS = 2
LIMIT = 120  # seconds a launch may take
STEPS = 12  # a run gets so far at most before it is killed


class Run:
    """A job that has resumed, and says step by step how far it is."""

    def __init__(self, process):
        self.process = process
        self.start, *self.pids = map(int, self.read("resumed"))
        self.step = self.start

    def read(self, *known):
        for line in self.process.stdout:
            word, *rest = line.split() or [""]
            if word in known:
                return rest
        pytest.fail(f"the job ended: {self.process.wait()}\n{self.process.stderr.read()}")

    def reach(self, step):
        while self.step < step:
            self.step = int(self.read("step")[0])


@contextmanager
def started(folder, steps, ranks=RANKS):
    """Launch the job; at the end it is gone, whatever happened."""
    command = [*LAUNCH, "-n", str(ranks), "--oversubscribe", "--", sys.executable, JOB, folder, steps]
    process = subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(JOB.parents[2]), os.environ.get("PYTHONPATH", "")]),
        },
    )
    limit = Timer(LIMIT, end, (os.killpg, process.pid))
    limit.start()
    pids = []
    try:
        run = Run(process)
        pids = run.pids
        yield run
    finally:
        limit.cancel()
        end(os.killpg, process.pid)
        for pid in pids:
            end(os.kill, pid)
        process.communicate()


def end(kill, pid):
    with suppress(ProcessLookupError):
        kill(pid, signal.SIGKILL)


def finish(folder, steps, ranks=RANKS):
    """Run to the end; return how far a resumed run had been, and the digest that all ranks share."""
    with started(folder, steps, ranks) as run:
        digests = run.read("done")
        assert run.process.wait(30) == 0
    assert len(digests) == ranks and len(set(digests)) == 1
    return run.start, digests[0]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Digests of runs that nobody disturbs, by number of steps."""
    known = {}

    def digest(steps):
        if steps not in known:
            known[steps] = finish(tmp_path_factory.mktemp("straight"), steps)[1]
        return known[steps]

    return digest


@pytest.mark.timeout(7200)  # a launch that hangs is ended sooner
def test_every_resume_ends_like_an_undisturbed_run(tmp_path, straight, pytestconfig):
    kills, seed = pytestconfig.getoption("kills"), pytestconfig.getoption("seed")
    random = np.random.default_rng(seed)
    steps = kills * STEPS
    reached, wasted, torn = 0, [], 0
    for kill in range(kills):
        with started(tmp_path, steps) as run:
            # Of the step before the kill, the checkpoint may not have been complete.
            assert reached - 4 <= run.start <= reached + 2, f"kill {kill}, seed {seed}"
            wasted.append(max(reached - run.start, 0))
            run.reach(run.start + int(random.integers(1, STEPS)))
            time.sleep(random.uniform(0, 0.04))
            victims = run.pids if random.random() < 0.5 else [run.pids[random.integers(RANKS)]]
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            for line in run.process.stdout:  # what it did before it died, perhaps in the midst of a line
                if told := re.fullmatch(r"step (\d+)\n", line):
                    run.step = int(told[1])
            reached = run.step
        torn += not all(one.complete for one in kept(tmp_path))
    start, digest = finish(tmp_path, steps)
    assert start >= reached - 4
    assert digest == straight(steps)
    left = [path.name for path in tmp_path.rglob("*")]
    assert len([name for name in left if "-step-" in name]) == 2
    assert not [name for name in left if name.startswith(".")], "temporary files are left"
    print(f"{kills} kills, seed {seed}: {torn} in the midst of a checkpoint; steps done again: {wasted}")


def test_another_number_of_ranks_goes_on_with_the_same_data(tmp_path):
    """Same batches in the same order: the losses differ by rounding only."""
    losses = []
    for ranks in (2, 2, 2), (2, 3, 1):
        folder = tmp_path / str(ranks)
        for steps, count in zip((8, 16, 24), ranks, strict=True):
            start, _ = finish(folder, steps, count)
            assert start == steps - 8
        losses.append(saved_losses(folder))
    np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=1e-5)
    assert [len(each) for each in losses] == [24, 24]


def saved_losses(folder):
    return read_manifest(kept(folder)[-1].path)["extra"]
