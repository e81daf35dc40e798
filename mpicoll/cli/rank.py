"""What `mpicoll run` starts as each rank: ``python -m mpi4py``, its error told so that it can be folded.

    python -m mpicoll.cli.rank script.py

Without MPICOLL_FOLD, which `mpicoll run` sets, it is ``python -m mpi4py`` and no more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import runpy
import sys
import termios
import time
import traceback
from pathlib import Path
from types import TracebackType

from mpi4py import run as program

from mpicoll import settings
from mpicoll.cli import fold
from mpicoll.cli.ready import RANKS
from mpicoll.cli.relay import show

HERE = Path(__file__).parent
OURS = {__file__, str(HERE / "script.py"), str(HERE.with_name("__main__.py"))}
STARTERS = {*OURS, program.__file__, runpy.__file__, "<frozen runpy>"}  # no part of the program


def main() -> None:
    """Run the program; an error ends all ranks, as mpi4py arranges."""
    if settings.number("MPICOLL_FOLD", 0.0) and rank() is not None:
        sys.excepthook = told
    try:
        program.main()
    except SystemExit as exc:
        if sys.excepthook is not told or exc.code is None or exc.code == 0:
            raise
        if isinstance(exc.code, int):  # of one rank nothing is told, but that it has: launchers say more
            code = exc.code & 255 or 1  # which the system would make of it; but 0 were success
            tell(f"left with exit code {code}\n" if settings.number("MPICOLL_RANKS", 1) > 1 else "")
            raise SystemExit(code) from None
        tell(f"{exc.code}\n")  # as Python would print it
        raise SystemExit(1) from None


def rank() -> int | None:
    """Our rank, by what the launcher says: MPI may not have started, or be at its end."""
    text = next((os.environ[name] for name in (*RANKS, "SLURM_PROCID") if name in os.environ), "")
    return int(text) if text.isdigit() else None


def told(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
    """Tell of an error that nobody caught, from the program's own first line on."""
    while trace is not None and trace.tb_frame.f_code.co_filename in STARTERS:
        trace = trace.tb_next
    tell("".join(traceback.format_exception(kind, exc, trace)))


def tell(text: str) -> None:
    """Write records, and give those of other ranks a moment before this one ends them all."""
    errors = sys.stderr
    if errors is not None:
        errors.flush()
        if errors is not sys.__stderr__:  # the program has its own place for them
            errors.write(text)
            return
    with contextlib.suppress(OSError):  # nobody reads it any more
        settle()
        for line in fold.records(rank() or 0, settings.number("MPICOLL_RANKS", 1), text):
            show(line)
    time.sleep(settings.number("MPICOLL_FOLD", 0.0))


def settle() -> None:
    """Wait until the launcher has taken what this rank wrote, so that it takes a record in one piece."""
    end = time.monotonic() + 0.5
    with contextlib.suppress(OSError):  # not every kind of file can be asked
        while time.monotonic() < end and any(fcntl.ioctl(2, termios.FIONREAD, bytes(4))):
            time.sleep(0.002)


if __name__ == "__main__":
    main()
