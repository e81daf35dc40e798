"""``python -m mpicoll script.py``: an unmodified mpi4py program with our collectives, and what they took.

``MPI.COMM_WORLD`` is replaced before the program starts, so communicators made from it are ours too. An
exception on one rank ends all of them, as under ``python -m mpi4py``. When the program ends, rank 0 prints on
stderr what its calls took: collective, algorithm, calls, bytes, time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

USAGE = """usage: python -m mpicoll SCRIPT.py [ARGUMENTS]...
       python -m mpicoll -m MODULE [ARGUMENTS]...
       python -m mpicoll -c COMMAND [ARGUMENTS]...

Runs an mpi4py program with MPI.COMM_WORLD replaced by mpicoll.Intracomm(MPI.COMM_WORLD) and ends with a
table of its collective calls. Start it with a launcher, as any MPI program:

    mpirun -n 4 python -m mpicoll SCRIPT.py
    mpicoll run -n 4 -m mpicoll SCRIPT.py

The mpicoll command:
"""


def main(argv: list[str]) -> None:
    """Run the program that the arguments name; without any, say what there is."""
    if not argv or argv[0] in ("-h", "--help"):
        from mpicoll.cli import main as group

        print(USAGE)
        group.main(["--help"], prog_name="mpicoll")
    if argv[0] in ("-m", "-c") and len(argv) < 2:
        raise SystemExit(f"python -m mpicoll {argv[0]}: what to run is missing")
    if not argv[0].startswith("-") and not os.path.exists(argv[0]):
        raise SystemExit(f"python -m mpicoll: no such script: {argv[0]}")
    run(argv)


def run(argv: list[str]) -> None:
    """Run a program on this rank, then print the table."""
    from mpi4py import MPI
    from mpi4py import run as program

    import mpicoll
    from mpicoll.runtime import record

    rank = MPI.COMM_WORLD.Get_rank()
    MPI.COMM_WORLD = mpicoll.Intracomm(MPI.COMM_WORLD)
    record.timing(True)
    ending = None
    try:
        program.run_command_line(argv)
    except SystemExit as exc:
        program.set_abort_status(exc)
        ending = exc
    except BaseException as exc:
        program.set_abort_status(exc if isinstance(exc, KeyboardInterrupt) else 1)
        raise
    if rank == 0:
        print(table(record.totals()), file=sys.stderr)
    if ending is not None:
        raise ending


def table(totals: Mapping[tuple[str, str], Any]) -> str:
    """What the calls took, one line per collective and algorithm, the longest time first."""
    head = ["collective", "algorithm", "calls", "bytes", "time (s)", "us/call"]
    if not totals:
        return "mpicoll: the program called no collective of MPI.COMM_WORLD or of a communicator made from it"
    found = sorted(totals.items(), key=lambda item: -item[1].seconds)
    cells = [head]
    for (collective, algorithm), total in found:
        each = total.seconds / total.calls * 1e6
        numbers = [str(total.calls), str(total.nbytes), f"{total.seconds:.3f}", f"{each:.1f}"]
        cells.append([collective, algorithm, *numbers])
    whole = sum(total.seconds for total in totals.values())
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([f"mpicoll: collectives of rank 0, {whole:.3f} s together", *lines])
