"""The kinds of batch scripts there are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Template:
    """What a script is for, and what it has that others do not."""

    title: str
    interconnect: str | None = None
    gpus: bool = False
    ends: str = ""  # what happens before the time limit: "requeue" or "chain"
    sweep: bool = False
    bench: bool = False
    container: bool = False


TEMPLATES = {
    "infiniband": Template("train on InfiniBand", interconnect="infiniband"),
    "roce": Template("train on RDMA over Ethernet (RoCE)", interconnect="roce"),
    "ethernet": Template("train on plain Ethernet", interconnect="ethernet"),
    "slingshot": Template("train on HPE Slingshot", interconnect="slingshot"),
    "gpu": Template("train on GPUs, one per rank, with a GPU-aware MPI or without", gpus=True),
    "requeue": Template("train past the time limit: checkpoint, requeue, resume", ends="requeue"),
    "array": Template("a sweep: one task for every combination of options", sweep=True),
    "chain": Template("train past the time limit in jobs that follow each other", ends="chain"),
    "bench": Template("measure this machine's collectives", bench=True),
    "container": Template("train in an Apptainer container", container=True),
}
