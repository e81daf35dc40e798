"""The `#SBATCH` lines of a script, and the tasks of a sweep."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from mpicoll.slurm.profile import Profile
from mpicoll.slurm.template import Template
from mpicoll.slurm.text import paragraph


def options(template: Template, profile: Profile) -> Iterator[str]:
    """The `#SBATCH` lines; sbatch ignores those that come after the first command."""
    yield paragraph("The job's name", f"#SBATCH --job-name={profile.name}")
    keys = ("account", "partition", "qos", "constraint", "reservation")
    site = [f"#SBATCH --{key}={getattr(profile, key)}" for key in keys if getattr(profile, key)]
    if site:
        yield paragraph("Who pays, and where it runs", *site)
    yield paragraph(
        "Ranks. Always per node: for a total Slurm may place 3 and 1 on two nodes",
        f"#SBATCH --nodes={profile.nodes}",
        f"#SBATCH --ntasks-per-node={profile.tasks_per_node}",
    )
    yield paragraph("Cores of each rank", f"#SBATCH --cpus-per-task={profile.cpus_per_task}")
    if profile.gpus_per_node:
        kind = f"{profile.gpu_type}:" if profile.gpu_type else ""
        yield paragraph(
            "GPUs. Per node again: --gpus=8 may become 4, 2, 1 and 1. Not per task: a rank that sees only "
            "its own GPU cannot open its neighbours' memory, and GPUs of a node then talk through the host",
            f"#SBATCH --gpus-per-node={kind}{profile.gpus_per_node}",
        )
    if profile.memory:
        yield paragraph("Memory of each node; 0 is all of it", f"#SBATCH --mem={profile.memory}")
    if profile.exclusive or template.bench:
        why = "No other job on these nodes" + ": its traffic would be in our numbers" * template.bench
        yield paragraph(why, "#SBATCH --exclusive")
    yield paragraph("The time after which Slurm ends the job", f"#SBATCH --time={profile.time}")
    if profile.workdir:
        why = "The folder it runs in; without this it is the one it was submitted from"
        yield paragraph(why, f"#SBATCH --chdir={profile.workdir}")
    output, marks = profile.output, "%x is the job's name, %j its id"
    if template.sweep:
        output, marks = output.replace("%j", "%A_%a"), "%x is the job's name, %A its id, %a the task's"
    why = f"The output: {marks}. (A folder in front would have to exist, or the job fails without a word)"
    yield paragraph(why, f"#SBATCH --output={output}")
    yield from _life(template, profile)


def _life(template: Template, profile: Profile) -> Iterator[str]:
    """Options about ends, restarts and repetitions."""
    if template.ends:
        yield paragraph(
            f"Tell this script, and only it (B:), {profile.notice} s before the end. Slurm looks every 30 s "
            "and may be a minute early",
            f"#SBATCH --signal=B:USR1@{profile.notice}",
        )
    if template.ends == "requeue":
        yield paragraph(
            "Back in the queue, with the same id, when asked for below or when a node fails; the output is "
            "appended to",
            "#SBATCH --requeue",
            "#SBATCH --open-mode=append",
        )
    else:
        why = "Not again from the beginning when a node fails: nothing says that this program resumes"
        yield paragraph(why, "#SBATCH --no-requeue")
    if template.ends == "chain":
        why = "After a link that failed the next one is cancelled, not left waiting for ever"
        yield paragraph(why, "#SBATCH --kill-on-invalid-dep=yes")
    if template.sweep:
        count = len(combinations(profile))
        yield paragraph(
            f"{count} tasks, at most {profile.parallel} at a time: one for each case below",
            f"#SBATCH --array=0-{count - 1}%{profile.parallel}",
        )


def combinations(profile: Profile) -> list[tuple[str, ...]]:
    """Options of every task of a sweep: all combinations, the last option changing fastest."""
    choices = [[(option, value) for value in values] for option, values in profile.sweep.items()]
    return [tuple(itertools.chain(*pairs)) for pairs in itertools.product(*choices)]
