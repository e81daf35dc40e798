"""What a site and a job are like: the values that a batch script is rendered from."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mpicoll.slurm.network import SUPPORTED
from mpicoll.slurm.values import ProfileError, check

# What starts the ranks: srun, with a plugin by which this MPI's processes find each other, or the MPI's own.
PLUGINS = {
    "openmpi": r"pmix(_v\d+)?",
    "mpich": r"pmi2|pmix(_v\d+)?",
    "mvapich": r"pmi2|pmix(_v\d+)?",
    "cray": r"cray_shasta",
    "intel": r"pmi2|pmix(_v\d+)?",
}
DEFAULT_PLUGIN = {
    "openmpi": "pmix",
    "mpich": "pmi2",
    "mvapich": "pmi2",
    "cray": "cray_shasta",
    "intel": "pmi2",
}
TITLES = {
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "mvapich": "MVAPICH",
    "cray": "Cray MPICH",
    "intel": "Intel MPI",
}
OWN_LAUNCHER = {"openmpi": "mpirun", "mpich": "mpiexec", "intel": "mpirun"}


@dataclass(frozen=True)
class Profile:
    """A site and a job on it. Every value is checked on construction.

    Attributes
    ----------
    name, account, partition, qos, constraint, reservation
        The job's name, and what the site asks for; sbatch's options of the same names.
    nodes, tasks_per_node, cpus_per_task, memory, time, exclusive
        Size of the job: ranks are nodes x tasks_per_node; memory is per node.
    gpus_per_node, gpu_type, gpu_aware
        GPUs of each node, and whether the MPI takes arrays that lie on them.
    mpi, launcher, pmi, pmi_library
        MPI flavour; `srun` or `mpirun` (the MPI's own launcher); srun's plugin, where not the MPI's usual
        one; Intel MPI's `I_MPI_PMI_LIBRARY`.
    interconnect, devices, gid_index, traffic_class
        The network, its devices (`mlx5_0:1`, `eth0`), and for RoCE the GID and the traffic class of what
        must not be lost.
    modules, venv, image
        Where Python comes from: modules, a virtual environment, an Apptainer image.
    workdir, output, program
        Folder and log file of the job, and the words of the program: a script or `-m` MODULE with arguments.
        `{id}` in a word becomes the job's id, with the task's in an array.
    notice, requeues
        Seconds before the time limit at which the program is told; how often a job is put back at most.
    sweep, parallel
        Options and the values to try, all combinations; how many array tasks may run at once.
    env
        Environment variables to export.
    """

    name: str = "mpicoll"
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    nodes: int = 2
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    memory: str | None = None
    time: str = "1:00:00"
    exclusive: bool = False
    gpus_per_node: int = 0
    gpu_type: str | None = None
    gpu_aware: bool = False
    mpi: str = "openmpi"
    launcher: str = "srun"
    pmi: str | None = None
    pmi_library: str | None = None
    interconnect: str = "ethernet"
    devices: str | None = None
    gid_index: int | None = None
    traffic_class: int | None = None
    modules: tuple[str, ...] = ()
    venv: str | None = None
    image: str | None = None
    workdir: str | None = None
    output: str = "%x-%j.out"
    program: tuple[str, ...] = ("jobs/train_text.py",)
    notice: int = 300
    requeues: int = 50
    sweep: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    parallel: int = 4
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in fields(self):
            check(key.name, str(key.type), getattr(self, key.name))
        _contradictions(self)

    @property
    def ranks(self) -> int:
        """Ranks of the whole job."""
        return self.nodes * self.tasks_per_node

    @property
    def plugin(self) -> str:
        """The value of srun's ``--mpi``."""
        return self.pmi or DEFAULT_PLUGIN[self.mpi]


def load(path: Path | str, overrides: Mapping[str, Any] | None = None) -> Profile:
    """Read a profile from a TOML or JSON file; `overrides` replace what it says.

    Raises
    ------
    ProfileError
        Naming the file, the key, what it holds and what was expected.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        table = json.loads(text) if path.suffix == ".json" else _toml(text)
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise ProfileError(f"{path}: {problem}") from None
    if not isinstance(table, dict):
        raise ProfileError(f"{path}: expected a table of keys and values, got {table!r}")
    try:
        return parse({**table, **(overrides or {})})
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None


def _toml(text: str) -> Any:
    try:
        import tomllib
    except ModuleNotFoundError:
        raise ValueError(
            "TOML needs Python 3.11; write the profile as JSON, in a file ending in .json"
        ) from None
    return tomllib.loads(text)


def parse(table: Mapping[str, Any]) -> Profile:
    """Make a profile of the values of a TOML or JSON table."""
    known = {key.name: str(key.type) for key in fields(Profile)}
    values = {}
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ProfileError(f"unknown key {key!r}; {hint}")
        if known[key].startswith("tuple") and isinstance(value, list):
            value = tuple(value)
        elif key == "sweep" and isinstance(value, dict):
            value = {name: _values(name, choices) for name, choices in value.items()}
        values[key] = value
    return Profile(**values)


def override(text: str) -> tuple[str, Any]:
    """Key and value of `key=value` on a command line, the value as the key wants it."""
    key, equals, value = text.partition("=")
    kind = next((str(known.type) for known in fields(Profile) if known.name == key), "")
    if not equals or kind.startswith("Mapping"):
        raise ProfileError(f"{text!r}: expected key=value, where the key is not a table")
    if kind.startswith("bool"):
        return key, {"true": True, "false": False}.get(value, value)
    if kind.startswith("int"):
        return key, int(value) if value.isdecimal() else value
    if kind.startswith("tuple"):
        try:
            return key, tuple(shlex.split(value))
        except ValueError as error:
            raise ProfileError(f"{key}: {value!r}: {error}") from None
    return key, value


def _values(option: str, choices: Any) -> tuple[str, ...]:
    """Values of a sweep as words: numbers may be written as numbers."""
    if not isinstance(choices, list) or not choices:
        raise ProfileError(f"sweep: {option!r} needs a list of values, got {choices!r}")
    return tuple(repr(choice) if type(choice) in (int, float) else choice for choice in choices)


def _contradictions(profile: Profile) -> None:
    """Refuse values that are right one by one and cannot work together."""
    mpi = profile.mpi
    if profile.pmi and not re.fullmatch(PLUGINS[mpi], profile.pmi):
        raise ProfileError(
            f"pmi: {profile.pmi!r} does not start ranks of {mpi}: each would be rank 0 of 1; "
            f"leave it out for {DEFAULT_PLUGIN[mpi]}"
        )
    if profile.launcher == "mpirun" and mpi not in OWN_LAUNCHER:
        raise ProfileError(f"launcher: {mpi} has no launcher of its own here; use srun")
    if profile.launcher == "mpirun" and profile.pmi:
        raise ProfileError(
            "pmi: mpirun uses none of Slurm's plugins; leave pmi out, or use the launcher srun"
        )
    if profile.launcher == "srun" and mpi == "intel" and not profile.pmi_library:
        raise ProfileError(
            "pmi_library: under srun Intel MPI needs the path of Slurm's libpmi2.so; "
            "or use the launcher mpirun"
        )
    if mpi not in SUPPORTED[profile.interconnect]:
        known = ", ".join(sorted(SUPPORTED[profile.interconnect]))
        raise ProfileError(
            f"mpi: no settings are known for {mpi} on {profile.interconnect}; known are {known}"
        )
    if "," in (profile.devices or "") and profile.interconnect == "ethernet" and mpi != "openmpi":
        raise ProfileError(f"devices: {mpi} takes one Ethernet interface, got {profile.devices!r}")
    script = profile.program[1:] if profile.program[:1] == ("-m",) else profile.program
    if not script or not script[0] or script[0].startswith("-"):
        raise ProfileError(f"program: expected a script, or -m and a module, got {list(profile.program)}")
    if profile.gpu_type and not profile.gpus_per_node:
        raise ProfileError("gpu_type: the job asks for no GPUs; set gpus_per_node")
    if profile.image and profile.venv:
        raise ProfileError("image: the Python of the container or that of the venv? leave one of them out")


def seconds(time: str) -> int:
    """Seconds of a Slurm time: minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s."""
    days, _, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if days:
        parts = [int(days) * 24 + parts[0], *parts[1:]]
        hours, minutes, rest = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, rest = parts
    else:
        hours, minutes, rest = 0, *(*parts, 0)[:2]
    return hours * 3600 + minutes * 60 + rest
