"""Batch scripts for Slurm: rendered from a site's profile, checked, submitted and watched.

Nothing here imports mpi4py: scripts are rendered on login nodes, where MPI may not even start.
"""

from mpicoll.slurm.notice import Notice
from mpicoll.slurm.profile import Profile, load
from mpicoll.slurm.queue import ScriptError, Step, lint, submit, watch
from mpicoll.slurm.script import render
from mpicoll.slurm.template import TEMPLATES
from mpicoll.slurm.values import ProfileError

__all__ = [
    "TEMPLATES",
    "Notice",
    "Profile",
    "ProfileError",
    "ScriptError",
    "Step",
    "lint",
    "load",
    "render",
    "submit",
    "watch",
]
