"""A batch script from a profile: paragraphs, each with its reason above it. Pure: text in, text out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mpicoll.slurm.launching import environment, launch, settings
from mpicoll.slurm.options import options
from mpicoll.slurm.profile import Profile, seconds
from mpicoll.slurm.running import program
from mpicoll.slurm.template import TEMPLATES, Template
from mpicoll.slurm.text import paragraph
from mpicoll.slurm.values import ProfileError


def render(name: str, profile: Profile) -> str:
    """Return the batch script of a template for a profile.

    Raises
    ------
    ProfileError
        Where the profile lacks what the template needs, or contradicts it.
    """
    template = TEMPLATES[name]
    if template.interconnect and template.interconnect != profile.interconnect:
        profile = replace(profile, interconnect=template.interconnect)
    _fits(name, template, profile)
    return "\n\n".join(_paragraphs(name, template, profile)) + "\n"


def _fits(name: str, template: Template, profile: Profile) -> None:
    """Refuse a profile that this template cannot serve."""
    if template.gpus and not profile.gpus_per_node:
        raise ProfileError(f"gpus_per_node: template {name} needs GPUs, the profile has none")
    if template.container and not profile.image:
        raise ProfileError(f"image: template {name} needs the path of an Apptainer image")
    if template.container and profile.launcher != "srun":
        raise ProfileError(f"launcher: template {name} needs srun: an MPI inside cannot start ranks outside")
    if profile.image and not template.container:
        raise ProfileError(f"image: template {name} runs no container; use the template container")
    if template.sweep and not profile.sweep:
        raise ProfileError(f"sweep: template {name} needs options and their values")
    if template.ends and profile.notice >= seconds(profile.time):
        raise ProfileError(
            f"notice: {profile.notice} s before the end of a job of {seconds(profile.time)} s "
            f"(time {profile.time}) is before its start"
        )


def _paragraphs(name: str, template: Template, profile: Profile) -> Iterator[str]:
    header = [
        "#!/bin/bash",
        f"# {name}.sbatch: {template.title}.  Submit: mpicoll slurm submit {name}.sbatch",
        f"# Made by `mpicoll slurm render {name}` from a site's profile: change that, and render again.",
    ]
    yield "\n".join(header)
    yield from options(template, profile)
    yield paragraph("End at the first command that fails, also within a pipe", "set -eo pipefail")
    yield from environment(template, profile)
    yield from settings(profile)
    if not template.bench:  # it starts its ranks by `mpicoll run`
        yield from launch(template, profile)
    yield from program(template, profile)
