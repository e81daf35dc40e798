"""What to set for a network and an MPI, and why. The reason is printed above the setting in every script."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpicoll.slurm.profile import Profile

Setting = tuple[str, dict[str, str]]

SUPPORTED = {
    "infiniband": {"openmpi", "mpich", "mvapich", "intel"},
    "roce": {"openmpi", "mpich", "mvapich", "intel"},
    "ethernet": {"openmpi", "mpich", "intel"},
    "slingshot": {"openmpi", "mpich", "cray"},
}
INTERCONNECTS = tuple(SUPPORTED)

# How each MPI is told to use UCX, or OFI, and nothing else: better no job than one that crawls.
UCX = {
    "openmpi": {"OMPI_MCA_pml": "ucx"},
    "mpich": {"MPIR_CVAR_CH4_NETMOD": "ucx", "UCX_TLS": "^tcp"},  # UCX itself would fall back
    "mvapich": {"MPIR_CVAR_CH4_NETMOD": "ucx", "UCX_TLS": "^tcp"},
    "intel": {"I_MPI_FABRICS": "shm:ofi", "FI_PROVIDER": "mlx"},
}
OFI = {
    "openmpi": {"OMPI_MCA_pml": "cm", "OMPI_MCA_mtl": "ofi"},
    "mpich": {"MPIR_CVAR_CH4_NETMOD": "ofi"},
    "cray": {},
}


def network(profile: Profile) -> list[Setting]:
    """Settings of the interconnect for the profile's MPI."""
    return {"infiniband": _infiniband, "roce": _roce, "ethernet": _ethernet, "slingshot": _slingshot}[
        profile.interconnect
    ](profile)


def _ucx(profile: Profile, network: str) -> list[Setting]:
    why = f"{network} through UCX or not at all: by itself the MPI might fall back to TCP without a word"
    if profile.mpi == "intel":
        why = f"{network} through OFI's provider mlx, which is UCX, or not at all"
    return [(why, UCX[profile.mpi])]


def _infiniband(profile: Profile) -> list[Setting]:
    settings = _ucx(profile, "InfiniBand")
    if profile.devices:
        why = "These devices and ports; without this UCX takes the fastest ones near the rank's cores"
        settings.append((why, {"UCX_NET_DEVICES": profile.devices}))
    return settings


def _roce(profile: Profile) -> list[Setting]:
    settings = _ucx(profile, "RoCE")
    if profile.devices:
        why = "The RoCE ports: a node has other Ethernet ports too, and they may not be lossless"
        settings.append((why, {"UCX_NET_DEVICES": profile.devices}))
    if profile.gid_index is not None:
        why = "The entry of the port's GID table that is RoCE v2 on the right address (show_gids lists them)"
        settings.append((why, {"UCX_IB_GID_INDEX": str(profile.gid_index)}))
    if profile.traffic_class is not None:
        why = (
            f"Traffic class: DSCP {profile.traffic_class >> 2}, which switches put into the class with PFC "
            "and ECN; unmarked packets are dropped under load"
        )
        settings.append((why, {"UCX_IB_TRAFFIC_CLASS": str(profile.traffic_class)}))
    return settings


def _ethernet(profile: Profile) -> list[Setting]:
    devices = profile.devices
    if profile.mpi == "openmpi":
        why = "TCP between nodes and shared memory within one, without a search for faster networks"
        settings = [(why, {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp"})]
        interface = {"OMPI_MCA_btl_tcp_if_include": devices}
    elif profile.mpi == "mpich":
        why = "TCP between nodes and shared memory within one, whether this MPICH uses OFI or UCX"
        settings = [(why, {"FI_PROVIDER": "tcp", "UCX_TLS": "self,sm,tcp"})]
        interface = {"FI_TCP_IFACE": devices, "UCX_NET_DEVICES": devices}
    else:
        why = "TCP between nodes and shared memory within one"
        settings = [(why, {"I_MPI_FABRICS": "shm:ofi", "FI_PROVIDER": "tcp"})]
        interface = {"FI_TCP_IFACE": devices}
    if devices:
        why = "This interface: others (management, containers, virtual bridges) may lead nowhere"
        settings.append((why, {name: devices for name in interface}))
    return settings


def _slingshot(profile: Profile) -> list[Setting]:
    why = "Slingshot is OFI's provider cxi; without it the job is to fail, not to run over TCP"
    settings = [(why, {**OFI[profile.mpi], "FI_PROVIDER": "cxi"})]
    why = "Match messages in software once the network card's match entries are used up, and do not fail then"
    settings.append((why, {"FI_CXI_RX_MATCH_MODE": "hybrid"}))
    if profile.mpi == "cray":
        policy, what = ("GPU", "GPU") if profile.gpus_per_node else ("NUMA", "cores")
        why = f"Each rank takes the network card nearest to its {what}"
        settings.append((why, {"MPICH_OFI_NIC_POLICY": policy}))
    return settings


def device(profile: Profile) -> list[Setting]:
    """Settings with which the MPI takes arrays that lie on a GPU."""
    settings: list[Setting] = []
    if profile.mpi == "cray":
        why = "Cray MPICH is GPU-aware only when told so (and if craype-accel-* was loaded to build mpi4py)"
        settings.append((why, {"MPICH_GPU_SUPPORT_ENABLED": "1"}))
    elif profile.mpi == "intel":
        settings.append(("Intel MPI is GPU-aware only when told so", {"I_MPI_OFFLOAD": "1"}))
    elif profile.interconnect in ("infiniband", "roce"):
        why = "Ask CUDA about every address: UCX misses what a static CUDA runtime, such as CuPy's, allocates"
        settings.append((why, {"UCX_MEMTYPE_CACHE": "n"}))
    return settings
