"""Process management: over which interface ranks are started here, and whether the MPI understands it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mpicoll.cli import launcher
from mpicoll.cli.finding import Facts, Finding

# Open MPI 5 speaks PMIx only. MPICH and its family speak PMI-1 or PMI-2 over the same descriptor.
SPEAKS = {"openmpi": "PMIx", "mpich": "PMI", "mvapich": "PMI", "intel": "PMI", "cray": "PMI"}
SIGNS = {"PMIx": "PMIX_RANK", "PMI": "PMI_RANK"}
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def examine(environ: Mapping[str, str]) -> dict[str, Any]:
    """What the environment says of how this process was started, as one of several ranks or not at all."""
    sizes = [environ[name] for name in SIZES if environ.get(name, "").isdigit()]
    size = int(sizes[0]) if sizes else 1
    interface = next((name for name, sign in SIGNS.items() if sign in environ), "none" if size > 1 else None)
    if interface is None:
        return {"interface": None}
    rank = environ.get(SIGNS.get(interface, "SLURM_PROCID"), "")
    srun = "SLURM_STEP_ID" in environ and not environ.keys() & {"OMPI_COMM_WORLD_SIZE", "HYDI_CONTROL_FD"}
    return {
        "interface": interface,
        "rank": int(rank) if rank.isdigit() else 0,
        "size": size,
        "starter": "srun" if srun else "mpirun" if interface == "PMIx" else "mpiexec",
        "plugin": environ.get("SLURM_MPI_TYPE") if srun else None,
    }


def findings(facts: Facts) -> Iterator[Finding]:
    """Who starts ranks, over which interface; what started this very process, where it is a rank."""
    if "error" in facts["loaded"]:
        return
    loaded, pmi = launcher.library(facts["loaded"]["library"]), facts["pmi"]
    needed = SPEAKS.get(loaded.name, "a PMI that is not known here")
    if facts["chosen"]:
        path, plugin = facts["chosen"]
        how = f"{path} --mpi={plugin}" if plugin else path
        yield Finding("ok", "PMI", f"{loaded} speaks {needed}; mpicoll run starts ranks with {how}")
    else:
        yield Finding("note", "PMI", f"{loaded} speaks {needed}")
    if pmi["interface"] is not None and pmi["size"] > 1:
        yield _started(pmi, loaded, needed)
    if facts["slurm"]:
        yield _slurm(facts["slurm"], loaded)


def _started(pmi: Mapping[str, Any], loaded: launcher.Mpi, needed: str) -> Finding:
    """Whether this rank can find the others."""
    how = f"{pmi['starter']} --mpi={pmi['plugin']}" if pmi["plugin"] else pmi["starter"]
    over = "without a PMI" if pmi["interface"] == "none" else f"over {pmi['interface']}"
    text = f"this process is rank {pmi['rank']} of {pmi['size']}, by {how} {over}"
    if pmi["interface"] == needed or loaded.name not in SPEAKS:
        return Finding("ok", "PMI", text)
    return Finding(
        "warning",
        "PMI",
        text,
        f"{loaded} speaks {needed}: each of {pmi['size']} processes would be rank 0 of 1, or end in MPI_Init",
        "in the job, without srun before it, mpicoll run; or srun with the plugin named above",
    )


def _slurm(slurm: Mapping[str, str], loaded: launcher.Mpi) -> Finding:
    """Whether srun has a plugin for this MPI, and whether it takes it by itself."""
    if not slurm["version"]:
        return Finding("note", "Slurm", "srun is installed, but no Slurm is configured")
    offered = sorted(set(re.findall(r"\b(pmix\w*|pmi2|cray_shasta)\b", slurm["plugins"])))
    plugin, default = launcher.slurm_plugin(loaded, slurm["plugins"]), slurm["default"]
    text = f"{slurm['version']}, srun --mpi= {' '.join(offered) or 'none'}"
    if plugin:
        usual = (
            "its default" if default.split("_v")[0] == plugin else f"its default is {default or 'unknown'}"
        )
        return Finding("ok", "Slurm", f"{text}; start ranks with srun --mpi={plugin} ({usual})")
    return Finding(
        "warning",
        "Slurm",
        text,
        f"srun has no plugin that {loaded} understands: it would start ranks that are each rank 0 of 1",
        "use the MPI's own mpirun inside the job (mpicoll run does), or ask for Slurm's PMIx plugin",
    )
