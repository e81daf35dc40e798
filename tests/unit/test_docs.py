"""The pages hold: programs print what the tutorial says, its profile renders, references are complete."""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from mpicoll import slurm
from mpicoll.slurm import profile as profiles
from mpicoll.slurm.network import SUPPORTED, device, network

ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs/tutorial.md").read_text()
HELLO, TRAIN, READY, JOB = re.findall(r"```python\n(.*?)```", TUTORIAL, re.DOTALL)
SESSIONS = "".join(re.findall(r"```console\n(.*?)```", TUTORIAL, re.DOTALL))
ROOMS = "buckets checkpoint data datasets nn optim optim.schedules parallel prefetch sampler slurm timeline"
HANDED_OUT = {"Column"}  # by ArrayData: nobody makes one


def run(folder, ranks, *words):
    """Run a program as the page does, or on one rank by itself; return the lines it prints."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI"))}
    call = [sys.executable]
    if ranks > 1:
        call += ["-c", "from mpicoll.cli import main; main(prog_name='mpicoll')", "run", "--quiet"]
        call += ["--timeout", "240", "-n", str(ranks)]
    env = {**inherited, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*call, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def printed(ranks, words):
    """Return what the page says that this prints."""
    command = re.escape(f"$ mpicoll run --quiet -n {ranks} {words}\n")
    return re.search(command + r"((?:[^$\n].*\n)+)", SESSIONS)[1].splitlines()


def alike(lines, page):
    """Compare the words, and numbers but for rounding: another processor adds up in another order."""
    number = re.compile(r"\d+\.\d+")
    assert [number.sub("#", line) for line in lines] == [number.sub("#", line) for line in page]
    values = [[float(value) for value in number.findall("\n".join(text))] for text in (lines, page)]
    assert values[0] == pytest.approx(values[1], abs=5e-4)


def test_the_first_collective_of_the_tutorial(tmp_path):
    (tmp_path / "hello.py").write_text(HELLO)
    assert sorted(run(tmp_path, 2, "hello.py")) == printed(2, "hello.py")


def test_the_training_of_the_tutorial_is_the_same_on_one_rank_and_on_two(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    one, two = (run(tmp_path, ranks, "train.py") for ranks in (1, 2))
    alike(one, two)
    alike(two, printed(2, "train.py"))
    assert printed(1, "train.py") == printed(2, "train.py")


def test_the_job_of_the_tutorial_resumes_on_another_number_of_ranks(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    alike(run(tmp_path, 1, "job.py", "1000"), printed(2, "job.py 2000")[:2])
    begin, *rest = run(tmp_path, 2, "job.py", "2000")
    assert begin == "begin at step 1000"
    alike(rest, printed(2, "job.py 2000")[2:])


def test_the_lines_about_overlap_are_those_of_the_job():
    lines = [line.strip() for line in READY.splitlines()]
    assert "\n".join(lines) in "\n".join(line.strip() for line in JOB.splitlines())
    assert [line for line in lines if "grad_ready" not in line] == [
        line.strip() for line in TRAIN.splitlines() if line.strip().startswith("optimizer.gradients")
    ]


def test_the_profile_of_the_tutorial_renders():
    tomllib = pytest.importorskip("tomllib", reason="TOML needs Python 3.11")
    (text,) = re.findall(r"```toml\n(.*?)```", TUTORIAL, re.DOTALL)
    assert len(text.splitlines()) == 5
    script = slurm.render("requeue", profiles.parse(tomllib.loads(text)))
    slurm.lint(script)
    assert "launch=(mpirun -n 2 --map-by ppr:1:node)" in script
    assert '"${launch[@]}" python -m mpi4py job.py 4000 &' in script


def referenced(room):
    """Yield the names of a room that the pages document."""
    directive = rf"^\.\. (?:auto|py:)(\w+):: mpicoll\.({room}\b\S*)((?:\n   :.*)*)"
    for page in (ROOT / "docs").rglob("*.md"):
        for kind, target, options in re.findall(directive, page.read_text(), re.MULTILINE):
            members = re.search(r":members:(.*)", options)
            if kind != "module":
                yield target.rpartition(".")[2]
            elif members:  # those listed, or all
                listed = members[1].replace(" ", "").split(",")
                yield from listed if listed[0] else import_module(f"mpicoll.{target}").__all__


@pytest.mark.parametrize("room", ROOMS.split())
def test_every_public_name_of_the_training_layers_is_in_a_reference(room):
    names = set(import_module(f"mpicoll.{room}").__all__) - HANDED_OUT
    assert sorted(names - set(referenced(room))) == []


def test_the_page_on_clusters_explains_what_the_batch_scripts_set():
    page = (ROOT / "docs/clusters.md").read_text()
    for interconnect, mpis in SUPPORTED.items():
        site = {"interconnect": interconnect, "devices": "x", "gid_index": 3, "traffic_class": 106}
        for mpi in mpis:
            job = profiles.Profile(mpi=mpi, launcher="srun", pmi_library="/lib", gpus_per_node=1, **site)
            for _, variables in network(job) + device(job):
                for name in variables:
                    assert f"`{name}" in page, f"{name}, for {mpi} on {interconnect}"


def test_every_page_is_in_the_contents():
    index = (ROOT / "docs/index.md").read_text()
    tree = re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL)
    for page in (ROOT / "docs").glob("*.md"):
        assert page.stem == "index" or any(page.stem in text.split() for text in tree), page.name
