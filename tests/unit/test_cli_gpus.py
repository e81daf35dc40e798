"""GPUs in `mpicoll doctor`: drivers' tools and files made up, findings from facts."""

import pytest

from mpicoll.cli import gpus

CSV = "NVIDIA H100 80GB HBM3, 81559, 550.54.15, Disabled\nNVIDIA H100 80GB HBM3, 81559, 550.54.15, Disabled\n"
H100 = {
    "vendor": "NVIDIA",
    "name": "NVIDIA H100 80GB HBM3",
    "memory": 81559,
    "driver": "550.54.15",
    "mig": False,
}
MI300 = {"vendor": "AMD", "name": "gfx942", "memory": 196592, "driver": "", "mig": False}
GOOD = {
    "found": [H100, H100],
    "trouble": "",
    "cuda": {"answer": 12040},
    "cupy": {"cupy-cuda12x": "14.2.0"},
    "tried": {"answer": 2},
    "aware": {"answer": {"cuda": True}},
    "environ": {},
}
LOADED = {"library": "Open MPI v5.0.11, package"}
CRAY = {"library": "MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)\n"}


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Put an nvidia-smi on the PATH, or none."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def put(text, code=0):
        write(tmp_path / "nvidia-smi", f"#!/bin/sh\nprintf '%s' '{text}'\nexit {code}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return put


def test_nvidia_smi(tool, tmp_path):
    tool(CSV)
    assert gpus.nvidia(tmp_path) == ([H100, H100], "")
    tool("NVIDIA A100-SXM4-40GB, 40960, 535.1, Enabled\nTesla M60, [N/A], 535.1, [N/A]\n")
    found, _ = gpus.nvidia(tmp_path)
    assert [(gpu["memory"], gpu["mig"]) for gpu in found] == [(40960, True), (None, False)]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build", "575.57.08"),
        ("", ""),
    ],
)
def test_the_drivers_files(tool, tmp_path, version, expected):
    write(tmp_path / "proc/driver/nvidia/version", version)
    write(tmp_path / "proc/driver/nvidia/gpus/0000:1a:00.0/information", "Model: \t\t Tesla V100\nIRQ:   1\n")
    card = {"vendor": "NVIDIA", "name": "Tesla V100", "memory": None, "driver": expected, "mig": False}
    assert gpus.nvidia(tmp_path) == ([card], "nvidia-smi: No such file or directory")
    tool("Failed to initialize NVML: Driver/library version mismatch\n", 18)
    assert gpus.nvidia(tmp_path)[1] == "Failed to initialize NVML: Driver/library version mismatch"


def test_a_login_node_with_the_tool_and_no_gpu(tool, tmp_path):
    tool("No devices were found\n", 6)
    assert gpus.nvidia(tmp_path) == ([], "")


def test_amd(tmp_path):
    write(tmp_path / "0/properties", "cpu_cores_count 96\nsimd_count 0\n")
    write(tmp_path / "1/properties", "cpu_cores_count 0\nsimd_count 1216\ngfx_target_version 90402\n")
    write(tmp_path / "1/mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {196592 << 20}\nflags 0\n")
    write(tmp_path / "2/properties", "simd_count 440\ngfx_target_version 90010\n")
    assert [gpu["name"] for gpu in gpus.amd(tmp_path)] == ["gfx942", "gfx90a"]
    assert gpus.amd(tmp_path)[0] == MI300


def test_this_machine_without_any(tool, tmp_path):
    facts = gpus.examine("/nowhere/libmpi.so", tmp_path, {"SLURM_JOB_ID": "1", "HOME": "/"})
    assert facts["found"] == [] and facts["cuda"] is facts["tried"] is facts["aware"] is None
    assert [found.text for found in gpus.findings({"gpus": facts, "loaded": LOADED})] == ["none"]


def test_what_children_answer():
    assert gpus.ask("print('noise'); print('{\"cuda\": true}')") == {"answer": {"cuda": True}}
    assert gpus.ask("import sys; sys.exit('no driver')") == {"error": "no driver"}
    assert gpus.ask("import os; os._exit(3)") == {"error": "exit code 3"}
    assert gpus.ask("print('{}'); print('a farewell')") == {"error": "a farewell"}


def test_the_mpi_is_asked():
    from mpicoll.cli import probe

    answer = gpus.ask(gpus.AWARE, probe.loaded()["libmpi"][0])["answer"]
    assert set(answer.values()) <= {True, False} and "cuda" in answer


def findings(loaded=LOADED, **changed):
    return list(gpus.findings({"gpus": {**GOOD, **changed}, "loaded": loaded}))


def test_all_is_well():
    assert [(found.level, found.text) for found in findings()] == [
        ("ok", "2 x NVIDIA H100 80GB HBM3, 80 GiB, driver 550.54.15"),
        ("ok", "the driver serves CUDA up to 12.4"),
        ("ok", "cupy-cuda12x 14.2.0 computes; it sees 2 GPUs"),
        ("ok", "Open MPI 5.0.11 takes arrays that lie on a GPU"),
    ]


def test_amds_gpus_are_named():
    found = findings(found=[MI300], aware={"answer": {"rocm": True}}, cupy={}, tried=None, cuda=None)
    assert [each.level for each in found] == ["ok", "ok"] and "AMD gfx942, 192 GiB" in found[0].text


NO = {"answer": {"cuda": False}}


@pytest.mark.parametrize(
    ("changed", "text", "remedy"),
    [
        ({"trouble": "Driver/library version mismatch"}, "version mismatch", "restart"),
        ({"cuda": {"error": "OSError: libcuda.so.1: cannot open"}}, "libcuda", "docker run --gpus all"),
        ({"cupy": {}, "tried": None}, "not installed", "pip install cupy-cuda12x"),
        ({"cupy": {}, "tried": None, "cuda": {"answer": 13000}}, "not installed", "pip install cupy-cuda13x"),
        ({"cupy": {"cupy-cuda13x": "14.2.0"}, "tried": {"error": "no"}}, "14.2.0", "uninstall cupy-cuda13x"),
        (
            {"cupy": {"cupy": "14", "cupy-cuda12x": "14"}},
            "cupy 14, cupy-cuda12x 14",
            "pip uninstall cupy cupy-",
        ),
        ({"tried": {"error": "RuntimeError: no libnvrtc.so"}}, "14.2.0", "cupy-cuda12x[ctk]"),
        ({"aware": NO}, "Open MPI 5.0.11 does not take", "through host memory"),
        ({"aware": NO, "loaded": CRAY}, "does not take", "MPICH_GPU_SUPPORT_ENABLED=1"),
        ({"environ": {"SLURM_JOB_ID": "7"}}, "given none of the 2", "--gpus-per-node"),
        ({"environ": {"CUDA_VISIBLE_DEVICES": ""}}, "CUDA_VISIBLE_DEVICES=", "unset"),
        ({"environ": {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}}, "NoDevFiles", "unset"),
        ({"environ": {"CUDA_VISIBLE_DEVICES": "0,2"}}, "0,2", "unset"),
        ({"environ": {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "1"}}, "0,1", "leave it to Slurm"),
    ],
)
def test_each_trouble_has_a_cause_and_a_remedy(changed, text, remedy):
    (found,) = [each for each in findings(**changed) if each.level != "ok"]
    assert found.level == "warning" and text in found.text and found.cause and remedy in found.remedy


@pytest.mark.parametrize(
    "environ",
    [
        {"CUDA_VISIBLE_DEVICES": "1,0", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "2"},
        {"CUDA_VISIBLE_DEVICES": "MIG-6d2a", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "1"},
        {"CUDA_VISIBLE_DEVICES": "0"},
    ],
)
def test_devices_that_may_be_used(environ):
    assert {found.level for found in findings(environ=environ)} == {"ok"}


def test_an_mpi_that_does_not_say():
    for aware in ({"answer": {}}, {"error": "signal 11"}):
        assert [found.level for found in findings(aware=aware)][-1] == "note"
