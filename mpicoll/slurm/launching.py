"""The part of a script that prepares a launch: environment, network, devices, launcher, trial."""

from __future__ import annotations

from collections.abc import Iterator

from mpicoll.slurm import network
from mpicoll.slurm.profile import OWN_LAUNCHER, TITLES, Profile
from mpicoll.slurm.template import Template
from mpicoll.slurm.text import exports, paragraph

READY = 180  # seconds that the trial of the launch may take


def environment(template: Template, profile: Profile) -> Iterator[str]:
    """Where Python comes from, and what the site wants exported."""
    if profile.modules:
        load = "module load " + " ".join(profile.modules)
        if profile.mpi == "cray":
            yield paragraph("Modules, on top of the system's own: Slingshot's library is one of those", load)
        else:
            why = "Modules, from none: what happened to be loaded at submission must not decide"
            yield paragraph(why, "module purge", load)
    if profile.venv:
        yield paragraph("The Python environment", f". {profile.venv}/bin/activate")
    if profile.env:
        yield paragraph("Asked for by the profile", *exports(profile.env))
    if template.sweep:
        yield paragraph("An id for names of files: the array's and the task's",
                        "id=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}")  # fmt: skip
    elif any("{id}" in text for text in (*profile.program, *profile.env.values())):
        yield paragraph("An id for names of files", "id=$SLURM_JOB_ID")


def settings(profile: Profile) -> Iterator[str]:
    """Threads, network and devices."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "SRUN_CPUS_PER_TASK")
    yield paragraph(
        "BLAS threads: a rank's own cores, no more. And srun no longer takes its cores per rank from sbatch",
        *(f"export {name}=$SLURM_CPUS_PER_TASK" for name in names),
    )
    found = network.network(profile)
    if profile.gpus_per_node and profile.gpu_aware:
        found += network.device(profile)
    for why, variables in found:
        yield paragraph(why, *exports(variables))
    if profile.interconnect in ("infiniband", "roce"):
        yield paragraph(
            "RDMA needs memory that is never swapped out; a limit makes jobs fail later, and obscurely",
            'if [ "$(ulimit -l)" != unlimited ]; then',
            '  echo "locked memory: $(ulimit -l) KiB at most; ask the site for ulimit -l unlimited" >&2',
            "fi",
        )


def launch(template: Template, profile: Profile) -> Iterator[str]:
    """Define the array `launch`, which starts ranks, and try it."""
    yield from _srun(profile) if profile.launcher == "srun" else _mpirun(profile)
    if template.container:
        gpus = " --nv" if profile.gpus_per_node else ""
        yield paragraph(
            "Each rank inside the container, whose MPI must speak the same protocol with srun. The host's "
            "/dev, /tmp and home are there, and this folder"
            + (" and the GPUs' driver (--nv)" if gpus else ""),
            f'launch+=(apptainer exec --bind "$PWD" --pwd "$PWD"{gpus} {profile.image})',
        )
    if profile.gpus_per_node:
        yield paragraph(
            "Each rank's first visible GPU is its own: the node's list, rotated by the rank's place on the "
            "node. SLURM_LOCALID would not do: under mpirun it is the daemon's",
            "launch+=(python -m mpicoll.cli.place)",
        )
    yield _trial(profile)


def _srun(profile: Profile) -> Iterator[str]:
    if profile.pmi_library:
        why = "The library through which Intel MPI talks to srun"
        yield paragraph(why, f"export I_MPI_PMI_LIBRARY={profile.pmi_library}")
    options = [f"--mpi={profile.plugin}", "--kill-on-bad-exit=1", "--cpu-bind=cores"]
    why = (
        f"How ranks start: by the plugin that {TITLES[profile.mpi]} understands (with another one each would "
        "be rank 0 of 1, with exit code 0); all end when one fails; each keeps to its own cores"
    )
    yield paragraph(why, f"launch=(srun {' '.join(options)})")


def _mpirun(profile: Profile) -> Iterator[str]:
    own, local = OWN_LAUNCHER[profile.mpi], profile.tasks_per_node
    options, cores = "-launcher slurm -ppn {local}", ""
    if profile.mpi == "intel":
        options = "-bootstrap slurm -ppn {local}"
    elif profile.mpi == "openmpi":
        options = "--map-by ppr:{local}:node"
        if profile.cpus_per_task > 1:
            options += f":pe={profile.cpus_per_task}"
            cores = f" with {profile.cpus_per_task} cores each"
    yield paragraph(
        f"How ranks start: by {TITLES[profile.mpi]}'s own {own}, through Slurm, {local} on each node{cores}",
        f"launch=({own} -n {profile.ranks} {options.format(local=local)})",
    )


def _trial(profile: Profile) -> str:
    mpi, nodes = TITLES[profile.mpi], f"{profile.nodes} node{'s' * (profile.nodes > 1)}"
    return paragraph(
        f"Try it: {profile.ranks} ranks of {mpi} on {nodes} that reach each other, within {READY} s (a "
        "launcher whose daemons cannot connect would wait until the time limit)",
        "ready=0",
        f'timeout --kill-after=10 {READY} "${{launch[@]}}" '
        f"python -m mpicoll.cli.ready {profile.mpi} {profile.ranks} {profile.nodes} || ready=$?",
        'if [ "$ready" != 0 ]; then',
        f'  echo "this does not start {profile.ranks} ranks of {mpi} as one job (code $ready): '
        '${launch[*]}" >&2',
        "  exit 1",
        "fi",
    )
