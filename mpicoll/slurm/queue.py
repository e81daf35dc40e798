"""Submitting scripts and watching jobs, by sbatch, scontrol and squeue: no accounting database is needed."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpicoll.slurm.text import commands

# States in which a job stays for good; one that is requeued goes back to PENDING.
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "TIMEOUT",
}  # fmt: skip


class ScriptError(ValueError):
    """A batch script, a job or a Slurm that does not do; the message says where and why."""


def lint(text: str, name: str = "script") -> None:
    """Refuse what sbatch would refuse without naming the line, or would silently ignore.

    Raises
    ------
    ScriptError
        Naming the file and the line.
    """
    lines = text.split("\n")
    if "\r" in text:
        number = next(index for index, line in enumerate(lines, 1) if "\r" in line)
        raise ScriptError(f"{name}:{number}: the line ends with a carriage return; convert it with dos2unix")
    if not lines[0].startswith("#!"):
        raise ScriptError(f"{name}:1: expected #!/bin/bash, got {lines[0]!r}")
    first = next((line for line in commands(text)[1:] if not line.startswith("#SBATCH")), None)
    seen = False
    for number, line in enumerate(lines, 1):
        seen = seen or line == first
        if seen and re.match(r"#SBATCH\s", line):
            raise ScriptError(
                f"{name}:{number}: {line!r} comes after the first command ({first!r}): sbatch would ignore it"
            )


def submit(
    script: Path | str, options: Sequence[str] = (), *, links: int = 1, after: str = "afterok"
) -> list[int]:
    """Submit a script once, or `links` times in a row, each waiting for the one before; return the ids.

    The script is checked, by us and by ``sbatch --test-only``, before anything is in the queue. Where a link
    cannot be submitted those before it are cancelled.

    Raises
    ------
    ScriptError
        What is wrong with the script, or what sbatch says.
    """
    path = Path(script)
    try:
        lint(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ScriptError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    _dependencies(options)
    _slurm("sbatch", "--test-only", *options, str(path))
    ids: list[int] = []
    for _ in range(links):
        # an id that Slurm does not know would count as done: these were given to us just now
        wait = [f"--dependency={after}:{ids[-1]}", "--kill-on-invalid-dep=yes"] if ids else []
        try:
            ids.append(int(_slurm("sbatch", "--parsable", *options, *wait, str(path)).split(";")[0]))
        except ScriptError:
            if ids:
                _slurm("scancel", *map(str, ids))
            raise
    return ids


def _dependencies(options: Sequence[str]) -> None:
    """Refuse to wait for a job that Slurm does not know: sbatch takes that for a job that is done."""
    text = " ".join(options)
    for number in re.findall(r":(\d+)", " ".join(re.findall(r"(?:-d|--dependency)[= ]?(\S+)", text))):
        _slurm("scontrol", "show", "job", number)


def _slurm(*argv: str) -> str:
    """Run a command of Slurm's and return what it prints; what it complains of is the error."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        raise ScriptError(f"{argv[0]}: not found; is this a login node of a cluster with Slurm?") from None
    except subprocess.TimeoutExpired:
        raise ScriptError(f"{argv[0]}: Slurm does not answer") from None
    if done.returncode:
        raise ScriptError(f"{' '.join(argv)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


@dataclass(frozen=True)
class Step:
    """What a job, or a task of an array, is doing."""

    job: str
    state: str
    reason: str
    nodes: str
    restarts: int
    code: int
    output: str

    def __str__(self) -> str:
        again = f", start {self.restarts + 1}" if self.restarts else ""
        if self.state == "PENDING":
            return f"{self.job} pending ({self.reason}){again}"
        if self.state == "RUNNING":
            return f"{self.job} running on {self.nodes}{again}"
        code = f" with code {self.code}" if self.code else ""
        return f"{self.job} {self.state.lower().replace('_', ' ')}{code}{again}"


def parse(line: str) -> Step:
    """Read one line of ``scontrol --oneliner show job``."""
    found = dict(re.findall(r"(\w+)=(\S*)", line))
    job = f"{found['ArrayJobId']}_{found['ArrayTaskId']}" if "ArrayTaskId" in found else found["JobId"]
    code, _, signal = found.get("ExitCode", "0:0").partition(":")
    return Step(
        job=job,
        state=found["JobState"],
        reason=found.get("Reason", ""),
        nodes=found.get("NodeList", ""),
        restarts=int(found.get("Restarts", 0)),
        code=int(code) or (128 + int(signal) if int(signal or 0) else 0),
        output=found.get("StdOut", ""),
    )


def steps(job: int) -> list[Step]:
    """Return the job, or every task of the array."""
    return [parse(line) for line in _slurm("scontrol", "--oneliner", "show", "job", str(job)).splitlines()]


def watch(
    job: int, say: Callable[[str], None], show: Callable[[str], None] | None = None, pause: float = 2.0
) -> int:
    """Tell of every change of a job until it has ended for good; return its exit code.

    Parameters
    ----------
    job : int
        Id of a job or of an array.
    say : callable
        Is told of every change, a line each.
    show : callable, optional
        Is given what a job that is no array writes to its output.
    pause : float
        Seconds between looks: Slurm serves many users.

    Returns
    -------
    int
        The job's code; 1 where it was cancelled or ran out of time, or where a task of an array failed.
    """
    seen: dict[str, Step] = {}
    output = Output()
    while True:
        try:
            now = steps(job)
        except ScriptError:
            if not seen:
                raise
            say(f"{job} is no longer known to Slurm")  # it forgets jobs some minutes after their end
            break
        for step in now:
            if str(seen.get(step.job)) != str(step):
                say(str(step))
            seen[step.job] = step
        ended = all(step.state in ENDED for step in now)
        if show and len(seen) == 1 and now[0].job.isdecimal():
            output.follow(now[0].output, show, ended)
        if ended:
            break
        time.sleep(pause)
    # tasks of an array wait as one step, "12_3-9", until they start
    codes = [step.code or int(step.state != "COMPLETED") for step in seen.values() if step.state != "PENDING"]
    return codes[0] if len(codes) == 1 else int(any(codes))


class Output:
    """A job's output so far: shown in whole lines, as they are written."""

    def __init__(self) -> None:
        self.position, self.rest = 0, b""

    def follow(self, path: str, show: Callable[[str], None], ended: bool = False) -> None:
        """Show the lines that are new, and the last one even unfinished where the job has ended."""
        try:
            with open(path, "rb") as file:
                file.seek(self.position)
                new = file.read()
        except OSError:  # it comes when the job starts, and may lie on a node's own disk
            return
        self.position += len(new)
        *lines, self.rest = (self.rest + new).split(b"\n")
        if ended and self.rest:
            lines.append(self.rest)
        if lines:
            show(b"\n".join(lines).decode(errors="replace"))
