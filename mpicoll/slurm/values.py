"""What a single value of a profile may look like, and the error where it does not.

A value reaches one of two readers. sbatch reads `#SBATCH` lines with quoting rules of its own, so what goes
there may only be made of harmless characters. bash reads the rest: the words of the program and the values of
the environment may hold anything printable, and are quoted where the script is written.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from mpicoll.slurm.network import INTERCONNECTS

NAME = (r"[A-Za-z0-9_][A-Za-z0-9_.,@+-]*", "letters, digits and _ . , @ + -")
FEATURES = (r"[A-Za-z0-9_\[(][A-Za-z0-9_.,:@+*&|()\[\]-]*", "letters, digits and _ . , : @ + * & | ( ) [ ] -")
FILE = (
    r"[A-Za-z0-9_%][A-Za-z0-9_.%+-]*",
    "a file name of letters, digits and _ . % + - (a folder might not exist)",
)
FOLDER = (r"/[A-Za-z0-9_./@+=:,-]*", "an absolute path of letters, digits and _ . / @ + = : , -")
MODULE = (r"[A-Za-z0-9_][A-Za-z0-9_./@+=-]*", "letters, digits and _ . / @ + = -")
DEVICES = (r"[A-Za-z0-9_][A-Za-z0-9_.:,-]*", "devices such as mlx5_0:1 or eth0, with commas between")
SIZE = (r"\d+[KMGT]?", "a size such as 64G, or 0 for all of a node's")
TIME = (r"(\d+-)?\d+(:\d+){0,2}", "a time such as 90 (minutes), 1:30:00 or 2-12:00:00")
PATTERNS = {
    "name": NAME, "account": NAME, "partition": NAME, "qos": NAME, "reservation": NAME, "gpu_type": NAME,
    "constraint": FEATURES, "output": FILE, "workdir": FOLDER, "venv": FOLDER, "image": FOLDER,
    "pmi_library": FOLDER, "modules": MODULE, "devices": DEVICES, "memory": SIZE, "time": TIME,
}  # fmt: skip
LEAST = {"nodes": 1, "tasks_per_node": 1, "cpus_per_task": 1, "notice": 60, "requeues": 1, "parallel": 1}
CHOICES = {
    "mpi": ("openmpi", "mpich", "mvapich", "cray", "intel"),
    "launcher": ("srun", "mpirun"),
    "interconnect": INTERCONNECTS,
}


class ProfileError(ValueError):
    """A profile that cannot be used: the message names the file, the key and what was expected."""


def check(key: str, kind: str, value: Any) -> None:
    """Refuse a value of the wrong kind, out of range, or with characters that have no business in it."""
    if value is None and kind.endswith("None"):
        return
    words: tuple[Any, ...] = (value,)
    if kind.startswith("int") or kind.startswith("bool"):
        wanted = bool if kind.startswith("bool") else int
        if type(value) is not wanted:
            raise ProfileError(
                f"{key}: expected {'true or false' if wanted is bool else 'a number'}, got {value!r}"
            )
        if wanted is int and value < LEAST.get(key, 0):
            raise ProfileError(f"{key}: expected at least {LEAST.get(key, 0)}, got {value}")
        return
    if kind.startswith("tuple"):
        if not isinstance(value, tuple):
            raise ProfileError(f"{key}: expected a list of words, got {value!r}")
        words = value
    elif kind.startswith("Mapping"):
        if not isinstance(value, Mapping):
            raise ProfileError(f"{key}: expected a table, got {value!r}")
        words = (*value, *_flat(value.values()))
        _check_names(key, value)
    for word in words:
        _check_word(key, word)


def _flat(values: Any) -> list[Any]:
    return [word for value in values for word in (value if isinstance(value, tuple) else (value,))]


def _check_names(key: str, table: Mapping[str, Any]) -> None:
    """Names of environment variables and of a program's options."""
    pattern = r"[A-Za-z_]\w*" if key == "env" else r"--?[A-Za-z][\w-]*"
    what = "a variable's name" if key == "env" else "an option such as --lr"
    for name in table:
        if not re.fullmatch(pattern, str(name), re.ASCII):
            raise ProfileError(f"{key}: {name!r} is not {what}")


def _check_word(key: str, word: Any) -> None:
    if not isinstance(word, str):
        raise ProfileError(f"{key}: expected text, got {word!r}")
    if not word.isprintable():
        raise ProfileError(f"{key}: {word!r} holds a line break or another control character")
    if key in CHOICES and word not in CHOICES[key]:
        near = difflib.get_close_matches(word, CHOICES[key], 1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(CHOICES[key])}"
        raise ProfileError(f"{key}: unknown {word!r}; {hint}")
    if key in PATTERNS and not re.fullmatch(PATTERNS[key][0], word, re.ASCII):
        raise ProfileError(f"{key}: {word!r} is not usable; expected {PATTERNS[key][1]}")
