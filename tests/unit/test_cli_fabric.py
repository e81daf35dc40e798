"""InfiniBand, RoCE and Slingshot in `mpicoll doctor`, from a made-up sysfs."""

import pytest

from mpicoll.cli import fabric

ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"
LINK = "fe80:0000:0000:0000:0a00:27ff:fe00:0001"
TEN = "0000:0000:0000:0000:0000:ffff:0a01:0203"
SIX = "fd00:0000:0000:0000:0000:0000:0000:0007"


@pytest.fixture
def machine(tmp_path):
    """A machine whose sysfs can be written, and what the doctor says of it."""
    return Machine(tmp_path)


class Machine:
    def __init__(self, root):
        self.root = root

    def write(self, path, text=""):
        path = self.root / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def port(self, device="mlx5_0", state="4: ACTIVE", physical="5: LinkUp", layer="InfiniBand", gids=()):
        port = f"sys/class/infiniband/{device}/ports/1"
        values = {"state": state, "phys_state": physical, "rate": "200 Gb/sec (4X HDR)", "link_layer": layer}
        for name, text in values.items():
            self.write(f"{port}/{name}", text)
        for index, (kind, gid) in enumerate(gids):
            self.write(f"{port}/gids/{index}", gid)
            if kind is None:  # an empty entry: reading its type is an error
                (self.root / port / f"gid_attrs/types/{index}").mkdir(parents=True)
            else:
                self.write(f"{port}/gid_attrs/types/{index}", kind)
                self.write(f"{port}/gid_attrs/ndevs/{index}", "eth2")
        if layer == "Ethernet":
            self.write(f"sys/class/infiniband/{device}/device/net/eth2/mtu", "9000")
        number = device[-1]
        self.write(f"sys/class/infiniband_verbs/uverbs{number}/ibdev", device)
        self.write("sys/class/infiniband_verbs/abi_version", "6")
        self.write(f"dev/infiniband/uverbs{number}")

    def findings(self, memlock=None, **environ):
        facts = {**fabric.examine(self.root, environ), "memlock": memlock}
        return list(fabric.findings({"fabric": facts}))

    def trouble(self, **more):
        """The one trouble there is."""
        (found,) = [each for each in self.findings(**more) if each.level not in ("ok", "note")]
        assert found.level == "warning" and found.cause and found.remedy
        return found


def texts(findings):
    return [f"{found.level} {found.text}" for found in findings]


def test_nothing_is_one_calm_line(machine):
    assert texts(machine.findings(memlock=1 << 16)) == ["ok no InfiniBand, RoCE or Slingshot here"]


def test_slingshot(machine):
    machine.write("sys/class/cxi/cxi0/dev")
    assert texts(machine.findings(memlock=1 << 16)) == ["ok cxi0: Slingshot"]


def test_infiniband(machine):
    machine.port()
    assert texts(machine.findings()) == ["ok mlx5_0:1: InfiniBand, ACTIVE, 200 Gb/sec (4X HDR)"]


@pytest.mark.parametrize("state", ["2: INIT", "3: ARMED"])
def test_no_subnet_manager(machine, state):
    machine.port(state=state)
    found = machine.trouble()
    assert state[3:] in found.text and "subnet manager" in found.cause and "opensm" in found.remedy


def test_no_link(machine):
    machine.port(state="1: DOWN", physical="2: Polling")
    assert "DOWN" in machine.trouble().text and "Polling" in machine.trouble().text
    machine.port("mlx5_1")  # then it is a spare one
    assert [found.level for found in machine.findings()] == ["note", "ok"]


def test_a_roce_port_that_is_down_has_an_interface(machine):
    machine.port(state="1: DOWN", physical="3: Disabled", layer="Ethernet")
    assert "ip link set eth2 up" in machine.trouble().remedy


GIDS = [
    ("IB/RoCE v1", LINK), ("RoCE v2", LINK), ("IB/RoCE v1", SIX), ("RoCE v2", SIX), ("IB/RoCE v1", TEN),
    ("RoCE v2", TEN), (None, ZERO),
]  # fmt: skip


def test_the_gid_that_is_routed(machine):
    machine.port(layer="Ethernet", gids=GIDS)
    expected = [
        "ok mlx5_0:1: RoCE over eth2, ACTIVE, 200 Gb/sec (4X HDR)",
        "ok mlx5_0:1: RoCE v2 is 10.1.2.3 on eth2, UCX_IB_GID_INDEX=5",
    ]
    assert texts(machine.findings()) == texts(machine.findings(UCX_IB_GID_INDEX="3")) == expected
    found = machine.trouble(UCX_IB_GID_INDEX="4")
    assert "is not RoCE v2" in found.text and "1, 3, 5" in found.cause and "=5" in found.remedy


def test_ipv6_where_there_is_nothing_else(machine):
    machine.port(layer="Ethernet", gids=GIDS[:4])
    assert "fd00::7 on eth2, UCX_IB_GID_INDEX=3" in machine.findings()[1].text


@pytest.mark.parametrize("gids", [GIDS[:2], [("IB/RoCE v1", TEN)], []])
def test_no_address_to_route(machine, gids):
    machine.port(layer="Ethernet", gids=gids)
    assert "no RoCE v2 address" in machine.trouble().text


def test_devices_that_are_closed(machine):
    machine.port()
    (machine.root / "dev/infiniband/uverbs0").unlink()
    found = machine.trouble()
    assert "mlx5_0 (/dev/infiniband/uverbs0)" in found.text and "docker run --device" in found.remedy


@pytest.mark.parametrize(("limit", "ucx"), [(64 << 10, True), (1 << 30, False)])
def test_memory_that_may_not_be_locked(machine, limit, ucx):
    machine.port()
    found = machine.trouble(memlock=limit)
    assert f"{limit >> 10} KiB" in found.text and ("UCX" in found.cause) is ucx and "memlock" in found.remedy


def test_windows_off_the_network(machine):
    machine.port()
    assert "OMPI_MCA_osc" in machine.trouble(OMPI_MCA_osc="^ucx").text
