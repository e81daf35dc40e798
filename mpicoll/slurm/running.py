"""The part of a script that runs the program, and what follows its end."""

from __future__ import annotations

from collections.abc import Iterator

from mpicoll.slurm.options import combinations
from mpicoll.slurm.profile import Profile
from mpicoll.slurm.template import Template
from mpicoll.slurm.text import paragraph, words

PROGRAM = "The program, under -m mpi4py: an exception on one rank ends all of them, not only that one"


def program(template: Template, profile: Profile) -> Iterator[str]:
    """The program as the template runs it."""
    command = f'"${{launch[@]}}" python -m mpi4py {words(profile.program)}'
    if template.bench:
        yield from _bench(profile)
    elif template.ends:
        yield from _noticed(template, profile, command)
    elif template.sweep:
        cases = [f"  {index}) options=({words(options)}) ;;"
                 for index, options in enumerate(combinations(profile))]  # fmt: skip
        yield paragraph("What this task tries", "case $SLURM_ARRAY_TASK_ID in", *cases, "esac")
        yield paragraph(PROGRAM, f'{command} "${{options[@]}}"')
    else:
        yield paragraph(PROGRAM, command)


def _bench(profile: Profile) -> Iterator[str]:
    yield paragraph("What is being measured: into the output, with the numbers", "mpicoll doctor || true")
    yield paragraph(
        "The collectives against the MPI's own, several launches of each; all samples are kept",
        "for name in allreduce reduce_scatter allgather bcast; do",
        f'  mpicoll bench "$name" -n {profile.ranks} --keep "bench-$SLURM_JOB_ID-$name.json"',
        "done",
    )


def _noticed(template: Template, profile: Profile, command: str) -> Iterator[str]:
    """Run the program in the background, pass the notice on, and requeue where it asks for that."""
    files = {"MPICOLL_NOTICE": "$PWD/.notice-$SLURM_JOB_ID"}
    if template.ends == "requeue":
        files["MPICOLL_REQUEUE"] = "$PWD/.requeue-$SLURM_JOB_ID"
    yield paragraph(
        "Talk with the program through files: every launcher lets them pass, and no signal can hit a rank "
        "that is still starting or already ending. mpicoll.slurm.Notice is the program's side",
        *(f'export {name}="{path}"' for name, path in files.items()),
        "rm -f " + " ".join(f'"${name}"' for name in files),
    )
    trap = "trap 'noticed=1; touch \"$MPICOLL_NOTICE\"' USR1"
    yield paragraph("When Slurm's signal comes, tell the program", trap)
    yield paragraph(
        "The program, under -m mpi4py: an exception on one rank ends all of them. In the background, because "
        "bash runs a trap only between commands",
        f"{command} &",
        "program=$!",
    )
    yield paragraph(
        "Wait for its end, which `wait` does not when a signal comes: then wait again",
        "while :; do",
        "  noticed= code=0",
        '  wait "$program" || code=$?',
        '  [ -n "$noticed" ] || break',
        "done",
        'rm -f "$MPICOLL_NOTICE"',
    )
    if template.ends == "requeue":
        yield paragraph(
            "It has saved its state and wants to go on: back into the queue, with the same id, up to "
            f"{profile.requeues} times. The program must resume from its checkpoint when it starts",
            'if [ "$code" = 0 ] && [ -e "$MPICOLL_REQUEUE" ]; then',
            '  rm -f "$MPICOLL_REQUEUE"',
            f'  if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {profile.requeues} ]; then',
            f'    echo "requeued {profile.requeues} times: that is enough, the checkpoint stays" >&2',
            "    exit 1",
            "  fi",
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
        )
    yield paragraph("The job ends as the program did", 'exit "$code"')
