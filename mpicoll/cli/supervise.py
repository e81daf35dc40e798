"""Run a launcher so that nothing of its job outlives us, whatever ends it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from mpicoll.cli import leftovers
from mpicoll.cli.relay import Relay

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TIMED_OUT = 124  # as timeout(1)


def supervise(
    argv: Sequence[str],
    env: Mapping[str, str],
    timeout: float | None = None,
    grace: float = 5,
    patience: float | None = None,
) -> int:
    """Run `argv` and return its exit code: 124 after `timeout` seconds, 128 + n where signal n ended us.

    With `patience` its stderr passes through here, and equal errors of several ranks that come within so many
    seconds of each other are folded.

    The launcher gets its own session, so that a Ctrl-C reaches it once, from here: Open MPI's and MPICH's
    launchers take a second one for an order to leave their ranks behind. Ranks that outlive it are killed.
    Where the job failed, the MPI's shared memory that nobody on this node uses any more is removed.
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *arguments: 0
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # ranks whose launcher died become our children, so we can find them
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in ENDING}
    passed, began = None, time.time()
    try:
        job = subprocess.Popen(
            argv,
            env=env,
            stderr=subprocess.PIPE if patience else None,
            start_new_session=True,
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        if job.stderr and patience:
            passed = Relay(job.stderr, patience)
            passed.start()
        end = time.monotonic() + timeout if timeout else float("inf")
        while job.poll() is None and not received and time.monotonic() < end:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(0.2)
        code = job.returncode
        if code is None:
            code = 128 + received[0] if received else TIMED_OUT
            stop(job, grace, received)
        kill_children()
        if code:
            leftovers.remove(began)
        if passed:
            passed.finish()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def stop(job: subprocess.Popen[bytes], grace: float, received: Sequence[int]) -> None:
    """Ask the launcher to end its ranks; after `grace` seconds, or at a second Ctrl-C, stop asking."""
    job.send_signal(signal.SIGTERM)
    asked, end = len(received), time.monotonic() + grace
    while job.poll() is None and time.monotonic() < end and len(received) == asked:
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(0.05)
    if job.poll() is None:
        job.kill()
        job.wait()


def kill_children() -> None:
    """Kill and reap whatever is left of the job; a killed process hands its own children to us."""
    for _ in range(100):
        children = _children()
        if not children:
            return
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    """Process ids of our children."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            # "pid (name) state parent ...", and a name may hold anything
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(stat.parent.name))
    return found
