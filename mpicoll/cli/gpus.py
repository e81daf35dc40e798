"""GPUs: which there are, whether CuPy can use them, and whether the MPI takes arrays that lie on them."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from mpicoll.cli import launcher, probe
from mpicoll.cli.fabric import names, read
from mpicoll.cli.finding import Facts, Finding

QUERY = "name,memory.total,driver_version,mig.mode.current"
SETTINGS = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "SLURM_JOB_ID",
    "SLURM_GPUS_ON_NODE",
    "MPICH_GPU_SUPPORT_ENABLED",
    "I_MPI_OFFLOAD",
)
# Run by children: a driver can hang, and CuPy or an MPI must not stay in this process.
CUDA = """
import ctypes
version = ctypes.c_int()
ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
print(version.value)
"""
CUPY = """
import cupy
assert int((cupy.arange(4) + 1).sum()) == 10
print(cupy.cuda.runtime.getDeviceCount())
"""
AWARE = """
import ctypes, json, sys
from mpi4py import MPI
library, found = ctypes.CDLL(sys.argv[1]), {}
for kind, number, names in (("cuda", 0, ["cuda"]), ("rocm", 2, ["rocm", "hip"])):
    for function in (getattr(library, f"MPIX_Query_{name}_support", None) for name in names):
        if function:
            found[kind] = found.get(kind, False) or function() == 1
    flag = ctypes.c_int(0)
    if hasattr(library, "MPIX_GPU_query_support"):
        library.MPIX_GPU_query_support(number, ctypes.byref(flag))
        found[kind] = found.get(kind, False) or flag.value == 1
print(json.dumps(found))
"""


def examine(
    libmpi: str | None, root: Path = Path("/"), environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Facts about GPUs, from the drivers' tools and files; `root` is another place in tests."""
    found, trouble = nvidia(root)
    cards = bool(found)
    found += amd(root / "sys/class/kfd/kfd/topology/nodes")
    installed = cupy() if found else {}
    return {
        "found": found,
        "trouble": trouble,
        "cuda": ask(CUDA) if cards else None,
        "cupy": installed,
        "tried": ask(CUPY, timeout=60) if installed else None,
        "aware": ask(AWARE, libmpi) if found and libmpi else None,
        "environ": {name: environ[name] for name in SETTINGS if name in environ},
    }


def ask(program: str, *words: str, timeout: float = 20) -> dict[str, Any]:
    """What a child program answers, as ``answer``, or the last line of its complaint, as ``error``."""
    code, out, err = probe.output(
        [sys.executable, "-c", program, *words], timeout=timeout, env=probe.unlaunched(os.environ)
    )
    last = next(iter((out if code == 0 else err).strip().splitlines()[-1:]), f"exit code {code}")
    try:
        return {"answer": json.loads(last)} if code == 0 else {"error": last}
    except json.JSONDecodeError:  # a library had the last word
        return {"error": last}


def nvidia(root: Path) -> tuple[list[dict[str, Any]], str]:
    """NVIDIA's GPUs by nvidia-smi; by the driver's files where it fails, with its complaint."""
    tool = ["nvidia-smi", "--format=csv,noheader,nounits"]
    code, out, err = probe.output([*tool, f"--query-gpu={QUERY}"])
    if code == 0:
        return [_card(line.split(", ")) for line in out.splitlines() if line.strip()], ""
    folder = root / "proc/driver/nvidia"
    version = re.search(r"Module.*?\s(\d+(?:\.\d+)+)\s", read(folder / "version"))
    found = []
    for card in names(folder / "gpus"):
        model = re.search(r"Model:\s*(.+)", read(folder / "gpus" / card / "information"))
        found.append(_card([model[1] if model else "GPU", "", version[1] if version else "", ""]))
    return found, next(iter((out + err).strip().splitlines()), "") if found else ""


def _card(words: list[str]) -> dict[str, Any]:
    name, memory, driver, mig = [*words, "", "", ""][:4]
    return {
        "vendor": "NVIDIA",
        "name": name.strip(),
        "memory": int(memory) if memory.strip().isdigit() else None,
        "driver": driver.strip(),
        "mig": mig.strip() == "Enabled",
    }


def amd(folder: Path) -> list[dict[str, Any]]:
    """AMD's GPUs: the nodes of the kernel's topology that compute in SIMD units."""
    found = []
    for node in names(folder):
        values = _numbers(folder / node / "properties")
        if values.get("simd_count", 0) == 0:
            continue
        version = values.get("gfx_target_version", 0)
        banks = (
            _numbers(folder / node / "mem_banks" / bank / "properties")
            for bank in names(folder / node / "mem_banks")
        )
        found.append({
            "vendor": "AMD",
            "name": f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}",
            "memory": sum(bank.get("size_in_bytes", 0) for bank in banks) >> 20,
            "driver": "",
            "mig": False,
        })  # fmt: skip
    return found


def _numbers(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def cupy() -> dict[str, str]:
    """CuPy's distributions in this environment, with their versions; there should be one."""
    found = {(each.metadata["Name"] or "").lower(): each.version for each in metadata.distributions()}
    return {name: version for name, version in found.items() if re.match(r"cupy(-|$)", name)}


def findings(facts: Facts) -> Iterator[Finding]:
    """What is well with the GPUs and what is not."""
    gpus = facts["gpus"]
    if not gpus["found"]:
        yield Finding("ok", "GPUs", "none")
        return
    for text, count in _listed(gpus["found"]).items():
        yield Finding("ok", "GPUs", f"{count} x {text}" if count > 1 else text)
    if gpus["trouble"]:
        yield Finding(
            "warning",
            "GPUs",
            f"nvidia-smi: {gpus['trouble']}",
            "the driver's tool is not there, or does not fit the driver that runs",
            "a container needs the host's (docker run --gpus all); after an update of the driver, restart",
        )
    if gpus["found"][0]["vendor"] == "NVIDIA":
        yield from _visible(gpus)
        yield from _cupy(gpus)
    yield from _aware(facts)


def _listed(found: list[dict[str, Any]]) -> dict[str, int]:
    """Each kind of GPU as people name it, and how many there are."""
    counts: dict[str, int] = {}
    for gpu in found:
        memory = f", {gpu['memory'] / 1024:.0f} GiB" if gpu["memory"] else ""
        driver = f", driver {gpu['driver']}" if gpu["driver"] else ""
        text = f"{gpu['vendor']} {gpu['name'].removeprefix('NVIDIA ')}{memory}{driver}{', MIG' * gpu['mig']}"
        counts[text] = counts.get(text, 0) + 1
    return counts


def _visible(gpus: Mapping[str, Any]) -> Iterator[Finding]:
    """What Slurm gave to the job, and what CUDA may see."""
    environ, count = gpus["environ"], len(gpus["found"])
    given, setting = environ.get("SLURM_GPUS_ON_NODE"), environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        if "SLURM_JOB_ID" in environ and not given:
            yield Finding(
                "warning",
                "GPUs",
                f"this Slurm job was given none of the {count} here",
                "it did not ask for any; others' jobs may use them",
                "salloc or sbatch --gpus-per-node=NUMBER",
            )
        return
    text = f"CUDA_VISIBLE_DEVICES={setting}"
    devices = [word for word in setting.split(",") if word]
    numbers = [int(word) for word in devices if word.isdigit()]
    remedy = "unset CUDA_VISIBLE_DEVICES; in a Slurm job leave it to Slurm"
    if not devices or devices[0] in ("-1", "NoDevFiles"):
        yield Finding("warning", "GPUs", text, "it hides every GPU from CUDA", remedy)
    elif numbers and max(numbers) >= count and not any(gpu["mig"] for gpu in gpus["found"]):
        cause = f"there are only 0 to {count - 1}: CUDA stops at the first number that it does not know"
        yield Finding("warning", "GPUs", text, cause, remedy)
    elif given and given.isdigit() and len(devices) > int(given):
        cause = f"Slurm gave this job {given} of this node's GPUs: the others may be another job's"
        yield Finding("warning", "GPUs", text, cause, remedy)
    else:
        yield Finding("ok", "GPUs", text)


def _cupy(gpus: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether there is one CuPy, for CUDA of this driver, that computes."""
    installed, driver = gpus["cupy"], gpus["cuda"].get("answer")
    text = ", ".join(f"{name} {version}" for name, version in installed.items())
    if driver is None:
        yield Finding(
            "warning",
            "CUDA",
            gpus["cuda"]["error"],
            "programs cannot reach the driver: without libcuda.so.1 neither CuPy nor an MPI uses a GPU",
            "in a container docker run --gpus all, with NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
        return
    major, minor = driver // 1000, driver % 1000 // 10
    install = f"pip install cupy-cuda{major}x"
    yield Finding("ok", "CUDA", f"the driver serves CUDA up to {major}.{minor}")
    wheels = {name: int(match[1]) for name in installed if (match := re.fullmatch(r"cupy-cuda(\d+)x", name))}
    newer = [name for name, wanted in wheels.items() if wanted > major]
    if not installed:
        yield Finding("warning", "CuPy", "not installed", "arrays on a GPU are CuPy's", install)
    elif len(installed) > 1:
        cause = "they overwrite each other's files"
        yield Finding("warning", "CuPy", text, cause, f"pip uninstall {' '.join(installed)}, then {install}")
    elif newer:
        cause = f"it is for CUDA {wheels[newer[0]]}, and the driver knows CUDA up to {major}.{minor}"
        remedy = f"pip uninstall {newer[0]}, then {install}; or a newer driver"
        yield Finding("warning", "CuPy", text, cause, remedy)
    elif "error" in gpus["tried"]:
        cause = f"it cannot compute here: {gpus['tried']['error']}"
        remedy = (
            "python -c 'import cupy; cupy.show_config()'; pip install 'NAME[ctk]' brings CUDA's own libraries"
        )
        yield Finding("warning", "CuPy", text, cause, remedy.replace("NAME", next(iter(installed))))
    else:
        count = gpus["tried"]["answer"]
        yield Finding("ok", "CuPy", f"{text} computes; it sees {count} GPU{'s' * (count != 1)}")


def _aware(facts: Facts) -> Iterator[Finding]:
    """Whether the MPI takes arrays that lie on a GPU, and what happens where it does not."""
    gpus = facts["gpus"]
    if gpus["aware"] is None or "error" in facts["loaded"]:
        return
    loaded = launcher.library(facts["loaded"]["library"])
    kind = "cuda" if gpus["found"][0]["vendor"] == "NVIDIA" else "rocm"
    answer = gpus["aware"].get("answer", {}).get(kind)
    if answer:
        yield Finding("ok", "GPU-aware MPI", f"{loaded} takes arrays that lie on a GPU")
        return
    switch = {
        "cray": "MPICH_GPU_SUPPORT_ENABLED=1, and mpi4py built with the site's accelerator module loaded",
        "intel": "I_MPI_OFFLOAD=1 switches it on",
    }.get(loaded.name, "an MPI that was built with it")
    yield Finding(
        "note" if answer is None else "warning",
        "GPU-aware MPI",
        f"{loaded} {'does not say whether it takes' if answer is None else 'does not take'} arrays on a GPU",
        "it was built without it, or it is switched off",
        "mpicoll's collectives copy such arrays through host memory; give mpi4py's own send and receive "
        f"copies on the host, for a GPU's memory would crash the MPI. Otherwise: {switch}",
    )
