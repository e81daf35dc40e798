"""The lab: one for all tests of a run. It is described in lab/README.md."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HOSTS, CPUS, GPUS = 4, 64, 4  # so many as the example profiles in slurm/profiles ask for
os.environ.setdefault("VENV_MPICH", str(HERE.parents[1] / ".venv-mpich"))  # `make cluster` makes it
EXAMPLES = {"PARTITIONS": "compute gpu", "FEATURES": "cpu", "GPUTYPE": "a100"}


@pytest.fixture(scope="session")
def lab():
    """The environment in which the lab's commands work, while the lab is up."""
    folder = Path(tempfile.mkdtemp(prefix="mpicoll-lab"))
    folder.chmod(0o755)  # munge wants its socket's folders open to all, which pytest's are not
    mine = os.getpid() % 200  # two labs on one machine get different networks, names and ports
    network = {"BR": f"lab{mine}", "NETPFX": f"10.88.{mine}", "CTLPORT": f"{16800 + mine}"}
    settings = {**os.environ, **network, **EXAMPLES, "LAB": str(folder), "MODE": "net"}
    size = [str(HOSTS), str(CPUS), str(GPUS)]
    try:
        subprocess.run([HERE / "lab/up.sh", *size], env=settings, check=True, timeout=300)
        text = (folder / "env.sh").read_text()
        yield {**os.environ, **dict(re.findall(r"^export (\w+)=(\S+)$", text, re.MULTILINE))}
    finally:
        subprocess.run([HERE / "lab/down.sh"], env=settings, check=True, timeout=120)
        shutil.rmtree(folder)
