"""InfiniBand, RoCE and Slingshot: what the kernel says of the ports, and what of it stands in a job's way."""

from __future__ import annotations

import ipaddress
import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mpicoll.cli.finding import Facts, Finding

DEVICES = "sys/class/infiniband"  # of InfiniBand and RoCE
ENOUGH = 512 << 20  # with less memory that may be locked, UCX leaves InfiniBand out


def examine(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Facts about the fast networks, from sysfs; `root` is another place in tests."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "ports": list(ports(root / DEVICES)),
        "closed": list(closed(root)),
        "memlock": None if limit == resource.RLIM_INFINITY else limit,
        "slingshot": names(root / "sys/class/cxi"),
        "gid": environ.get("UCX_IB_GID_INDEX"),
        "osc": environ.get("OMPI_MCA_osc"),
    }


def ports(folder: Path) -> Iterator[dict[str, Any]]:
    """Every port of every InfiniBand or RoCE device."""
    for device in names(folder):
        for number in names(folder / device / "ports"):
            port = folder / device / "ports" / number
            roce = read(port / "link_layer") == "Ethernet"
            yield {
                "name": f"{device}:{number}",
                "roce": roce,
                "state": read(port / "state").partition(": ")[2],  # "4: ACTIVE"
                "physical": read(port / "phys_state").partition(": ")[2],  # "5: LinkUp"
                "rate": read(port / "rate"),
                "interface": next(iter(names(folder / device / "device/net")), ""),
                "gids": list(gids(port)) if roce else [],
            }


def gids(port: Path) -> Iterator[tuple[int, str, str]]:
    """Index, address and interface of the entries of a port's GID table that are RoCE v2."""
    for index in sorted(map(int, names(port / "gid_attrs/types"))):
        text = read(port / f"gids/{index}")
        if text and read(port / f"gid_attrs/types/{index}") == "RoCE v2":
            gid = ipaddress.IPv6Address(text)
            yield index, str(gid.ipv4_mapped or gid), read(port / f"gid_attrs/ndevs/{index}")


def closed(root: Path) -> Iterator[str]:
    """Devices that this process must not open: their file is missing, as in containers, or forbidden."""
    for entry in names(root / "sys/class/infiniband_verbs"):
        file = root / "dev/infiniband" / entry
        if entry.startswith("uverbs") and not os.access(file, os.R_OK | os.W_OK):
            yield f"{read(root / 'sys/class/infiniband_verbs' / entry / 'ibdev')} (/dev/infiniband/{entry})"


def names(folder: Path) -> list[str]:
    """What is in a folder, if it is there."""
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def read(path: Path) -> str:
    """A line of sysfs; nothing where there is none: an empty entry of a GID table is an error to read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def findings(facts: Facts) -> Iterator[Finding]:
    """What is well with the networks and what is not."""
    fabric = facts["fabric"]
    for name in fabric["slingshot"]:
        yield Finding("ok", "network", f"{name}: Slingshot")
    if not fabric["ports"]:
        if not fabric["slingshot"]:
            yield Finding("ok", "network", "no InfiniBand, RoCE or Slingshot here")
        return
    spare = any(port["state"] == "ACTIVE" for port in fabric["ports"])
    for port in fabric["ports"]:
        yield _port(port, spare)
        if port["roce"] and port["state"] == "ACTIVE":
            yield from _gid(port, fabric["gid"])
    yield from _limits(fabric)
    if fabric["osc"] == "^ucx":
        yield Finding(
            "warning",
            "network",
            "OMPI_MCA_osc=^ucx is set on a machine with InfiniBand",
            "it takes one-sided communication off the fast network",
            "unset OMPI_MCA_osc here; it is for workstations only",
        )


def _port(port: Mapping[str, Any], spare: bool) -> Finding:
    kind = f"RoCE{' over ' * bool(port['interface'])}{port['interface']}" if port["roce"] else "InfiniBand"
    text = f"{port['name']}: {kind}, {port['state'] or 'state unknown'}, {port['rate']}".rstrip(", ")
    if port["state"] == "ACTIVE":
        return Finding("ok", "network", text)
    if port["state"] in ("INIT", "ARMED"):
        return Finding(
            "warning",
            "network",
            text,
            "the link is up, but no subnet manager has made the port part of the network",
            "start one, on a switch or on a node (opensm); sminfo shows whether one answers",
        )
    if spare:  # many cards have a second port that nobody uses
        return Finding("note", "network", text)
    up = f"ip link set {port['interface'] or 'INTERFACE'} up" if port["roce"] else "ibportstate enables it"
    return Finding(
        "warning",
        "network",
        f"{text}, {port['physical'] or 'link unknown'}",
        "no link: no cable, nothing that works at its other end, or the port is switched off",
        f"look at the cable and the switch; if the port is off, {up}",
    )


def _gid(port: Mapping[str, Any], chosen: str | None) -> Iterator[Finding]:
    """The entry of the GID table to use: RoCE v2 with an address that is routed, IPv4 before IPv6."""
    usable = [entry for entry in port["gids"] if not entry[1].startswith("fe80:")]
    usable.sort(key=lambda entry: ":" in entry[1])
    indices = [str(index) for index, _, _ in port["gids"]]
    if not usable:
        yield Finding(
            "warning",
            "network",
            f"{port['name']}: no RoCE v2 address",
            f"{port['interface'] or 'its interface'} has no IP address, or RoCE v2 is switched off",
            "give the interface an address (ip address add); show_gids shows the table",
        )
    elif chosen not in (None, "auto", *indices):
        yield Finding(
            "warning",
            "network",
            f"{port['name']}: UCX_IB_GID_INDEX={chosen} is not RoCE v2 here",
            f"this port's RoCE v2 entries are {', '.join(indices)}; the table may differ from node to node",
            f"UCX_IB_GID_INDEX={usable[0][0]} on this node, or unset it and let UCX choose",
        )
    else:
        index, address, interface = usable[0]
        where = f" on {interface}" if interface else ""
        yield Finding(
            "ok", "network", f"{port['name']}: RoCE v2 is {address}{where}, UCX_IB_GID_INDEX={index}"
        )


def _limits(fabric: Mapping[str, Any]) -> Iterator[Finding]:
    """What this process may not do with the devices."""
    if fabric["closed"]:
        yield Finding(
            "warning",
            "network",
            f"no access to {', '.join(fabric['closed'])}",
            "a container without the host's devices, or a file that is not open to all",
            "docker run --device=/dev/infiniband; outside containers chmod 666, by a udev rule of rdma-core",
        )
    limit = fabric["memlock"]
    if limit is not None:
        yield Finding(
            "warning",
            "network",
            f"at most {limit >> 10} KiB of memory may be locked (ulimit -l)",
            "RDMA locks the memory it sends from: registration fails"
            + (", and UCX leaves InfiniBand out" if limit < ENOUGH else " once more is in use"),
            "memlock unlimited in /etc/security/limits.conf, LimitMEMLOCK=infinity for slurmd, "
            "docker run --ulimit memlock=-1",
        )
