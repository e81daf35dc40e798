"""``python -m mpicoll script.py``: run an mpi4py program as it is, with our collectives."""

import sys

from mpicoll.cli.script import main

if __name__ == "__main__":
    main(sys.argv[1:])
