"""Batch scripts: golden copies, what a profile may not say, and what scripts and jobs look like to us."""

import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpicoll import slurm
from mpicoll.cli import launcher, main, place, ready
from mpicoll.slurm import profile as profiles
from mpicoll.slurm.queue import parse, steps
from mpicoll.slurm.text import commands, word
from mpicoll.slurm.values import PATTERNS

SCRIPTS = Path(__file__).parents[2] / "slurm"
SITE = {"requeue": "long", "chain": "long", "bench": "long", "array": "sweep"}
PROFILE = {name: SCRIPTS / f"profiles/{SITE.get(name, name)}.toml" for name in slurm.TEMPLATES}


def example(name, **changes):
    tomllib = pytest.importorskip("tomllib", reason="TOML needs Python 3.11")
    return profiles.parse({**tomllib.loads(PROFILE[name].read_text()), **changes})


@pytest.mark.parametrize("name", list(slurm.TEMPLATES))
def test_golden_copies(name):
    path = SCRIPTS / f"{name}.sbatch"
    again = f"mpicoll slurm render {name} --profile {PROFILE[name].relative_to(SCRIPTS.parent)} -o {path}"
    assert path.read_text() == slurm.render(name, example(name)), f"if the change is meant: {again}"


@pytest.mark.parametrize("name", list(slurm.TEMPLATES))
def test_every_paragraph_says_what_it_is_for(name):
    text = (SCRIPTS / f"{name}.sbatch").read_text()
    header, *rest = text.rstrip("\n").split("\n\n")
    assert header.startswith("#!/bin/bash\n# ")
    assert all(re.match(r"# \S", part) and commands(part) for part in rest)
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("name", list(slurm.TEMPLATES))
def test_scripts_are_bash_and_pass_our_own_checks(name):
    path = SCRIPTS / f"{name}.sbatch"
    slurm.lint(path.read_text(), str(path))
    assert subprocess.run(["bash", "-n", path], capture_output=True, timeout=20).returncode == 0


def test_what_guards_against_the_traps():
    texts = {name: (SCRIPTS / f"{name}.sbatch").read_text() for name in slurm.TEMPLATES}
    for name, text in texts.items():
        assert "--ntasks-per-node=" in text and "SRUN_CPUS_PER_TASK=" in text and "set -eo pipefail" in text
        assert ("python -m mpi4py" in text and "mpicoll.cli.ready" in text) or name == "bench"
        assert "--kill-on-bad-exit=1" in text or "srun" not in "\n".join(commands(text))
    assert "--signal=B:USR1@600" in texts["requeue"] and "--open-mode=append" in texts["requeue"]
    assert "--kill-on-invalid-dep=yes" in texts["chain"] and "--array=0-5%3" in texts["array"]
    assert "UCX_IB_GID_INDEX=3" in texts["roce"] and "DSCP 26" in texts["roce"]
    assert "--gpus-per-node=a100:4" in texts["gpu"] and "--gpus-per-task" not in texts["gpu"]
    assert "module purge" not in texts["slingshot"]  # it would unload the network's library


EVIL = ['x"y', "x'y", "x\ny", "$(touch evil)", "`touch evil`", "x; touch evil", "x y", "x\\", "\u2028", "x#y"]


@pytest.mark.parametrize("value", EVIL)
@pytest.mark.parametrize("key", sorted(PATTERNS))
def test_values_with_no_business_in_them(key, value):
    given = f"/{value}" if key in ("workdir", "venv", "image", "pmi_library") else value
    with pytest.raises(slurm.ProfileError, match=f"^{key}: "):
        slurm.Profile(**{key: (given,) if key == "modules" else given})


@pytest.mark.parametrize("value", [value for value in EVIL if value.isprintable()])
def test_words_and_variables_reach_the_program_as_they_are(value, tmp_path):
    profile = slurm.Profile(program=("a.py", value, f"{value}-{{id}}"), env={"X": value})
    text = slurm.render("ethernet", profile)
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin/srun"
    fake.write_text('#!/bin/bash\nprintf "%s\\0" "$X" "$@" > "last"\n')
    fake.chmod(0o755)
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    env = {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"}
    done = subprocess.run(["bash", "-c", text], env=env, cwd=tmp_path, capture_output=True, timeout=20)
    assert done.returncode == 0, done.stderr
    exported, *words = (tmp_path / "last").read_text().split("\0")[:-1]
    assert exported == value and words[-3:] == ["a.py", value, f"{value}-7"]
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("value", ["x\ny", "x\0y", "\x1b[2J"])
def test_control_characters_are_refused_everywhere(value):
    for change in ({"program": ("a.py", value)}, {"env": {"X": value}}, {"sweep": {"--lr": (value,)}}):
        with pytest.raises(slurm.ProfileError, match="control character"):
            slurm.Profile(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 0}, "nodes: expected at least 1"),
        ({"nodes": True}, "nodes: expected a number"),
        ({"nodes": "2"}, "nodes: expected a number, got '2'"),
        ({"exclusive": 1}, "exclusive: expected true or false"),
        ({"name": 3}, "name: expected text"),
        ({"mpi": "openmp"}, "did you mean openmpi"),
        ({"interconnect": "infinband"}, "did you mean infiniband"),
        ({"modules": "gcc"}, "modules: expected a list"),
        ({"env": {"A B": "1"}}, "is not a variable's name"),
        ({"sweep": {"lr": ("1",)}}, "is not an option"),
        ({"pmi": "pmi2"}, "rank 0 of 1"),
        ({"mpi": "mpich", "pmi": "cray_shasta"}, "rank 0 of 1"),
        ({"mpi": "cray", "interconnect": "slingshot", "launcher": "mpirun"}, "no launcher of its own"),
        ({"launcher": "mpirun", "pmi": "pmix"}, "mpirun uses none"),
        ({"mpi": "intel"}, "pmi_library"),
        ({"mpi": "cray"}, "no settings are known for cray on ethernet"),
        ({"program": ()}, "program: expected a script"),
        ({"program": ("",)}, "program: expected a script"),
        ({"program": ("--steps", "9")}, "program: expected a script"),
        ({"program": ("-m",)}, "program: expected a script"),
        ({"program": ("-m", "-m")}, "program: expected a script"),
        ({"gpu_type": "a100"}, "asks for no GPUs"),
        ({"mpi": "mpich", "devices": "eth0,eth1"}, "mpich takes one Ethernet interface"),
        ({"image": "/a.sif", "venv": "/v"}, "leave one of them out"),
        ({"output": "logs/%j.out"}, "folder might not exist"),
        ({"time": "banana"}, "time: 'banana'"),
        ({"venv": "~/venv"}, "absolute path"),
    ],
)
def test_contradictions_and_wrong_kinds(change, message):
    with pytest.raises(slurm.ProfileError, match=re.escape(message)):
        slurm.Profile(**change)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gpu", {}, "gpus_per_node"),
        ("container", {}, "image"),
        ("container", {"image": "/a.sif", "launcher": "mpirun"}, "needs srun"),
        ("ethernet", {"image": "/a.sif"}, "use the template container"),
        ("array", {}, "sweep"),
        ("requeue", {"time": "5"}, "notice: 300 s before the end of a job of 300 s"),
        ("slingshot", {"mpi": "mvapich", "interconnect": "roce"}, "no settings are known for mvapich"),
    ],
)
def test_profiles_that_a_template_cannot_serve(name, change, message):
    with pytest.raises(slurm.ProfileError, match=message):
        slurm.render(name, slurm.Profile(**change))


@pytest.mark.parametrize("interconnect", ["infiniband", "roce", "ethernet", "slingshot"])
@pytest.mark.parametrize("mpi", list(profiles.PLUGINS))
@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
@pytest.mark.parametrize("gpus", [0, 2])
def test_every_combination_renders_to_bash_or_says_why_not(interconnect, mpi, launcher, gpus):
    try:
        profile = slurm.Profile(
            interconnect=interconnect, mpi=mpi, launcher=launcher, devices="eth0", cpus_per_task=2,
            gpus_per_node=gpus, gpu_aware=bool(gpus), pmi_library="/lib/libpmi2.so",
        )  # fmt: skip
    except slurm.ProfileError as error:
        assert "known" in str(error) or "launcher" in str(error)
        return
    text = slurm.render(interconnect, profile)
    assert subprocess.run(["bash", "-n", "-c", text], timeout=20).returncode == 0
    assert f"launch=({'srun --mpi' if launcher == 'srun' else 'mpi'}" in text
    assert ("mpicoll.cli.place" in text) == bool(gpus)


def test_times():
    for text, value in [("90", 5400), ("1:30", 90), ("1:30:00", 5400), ("2-12", 216000), ("1-0:1", 86460),
                        ("1-1:1:1", 90061)]:  # fmt: skip
        assert profiles.seconds(text) == value


def test_words():
    assert word("a{id}b") == 'a"$id"b' and word("{id}") == '"$id"' and word("") == "''"
    assert word("{id} $x") == "\"$id\"' $x'"


def test_profiles_are_read_and_errors_name_file_and_key(tmp_path):
    path = tmp_path / "site.json"
    path.write_text('{"nodes": 3, "sweep": {"--lr": [0.1, 1]}, "modules": ["gcc"]}')
    profile = slurm.load(path, {"nodes": 4})
    assert (profile.nodes, profile.ranks, profile.modules) == (4, 4, ("gcc",))
    assert profile.sweep == {"--lr": ("0.1", "1")}
    for text, message in [
        ('{"node": 3}', "unknown key 'node'; did you mean nodes?"),
        ('{"zzzzzz": 3}', "unknown key 'zzzzzz'; known are name"),
        ("[1]", "expected a table"),
        ("{", "Expecting"),
        ('{"sweep": {"--lr": 1}}', "needs a list"),
        ('{"sweep": {"--lr": [null]}}', "expected text"),
    ]:
        path.write_text(text)
        with pytest.raises(slurm.ProfileError, match=f"site.json: .*{re.escape(message)}"):
            slurm.load(path)
    with pytest.raises(slurm.ProfileError, match="none.json: No such file"):
        slurm.load(tmp_path / "none.json")


def test_the_documented_keys_are_the_keys():
    text = re.sub(r"\n {8}.*", "", slurm.Profile.__doc__.split("----------")[1])
    assert re.findall(r"\w+", text) and set(re.findall(r"\w+", text)) == {
        key.name for key in fields(slurm.Profile)
    }


def test_lint():
    for text, message in [
        ("#SBATCH --nodes=2\n", "s:1: expected #!/bin/bash"),
        ("#!/bin/bash\nx\r\n", "s:2: the line ends with a carriage return"),
        ("#!/bin/bash\n#SBATCH -N1\n\nhostname\n# but\n#SBATCH -N2\n", "s:6: '#SBATCH -N2' comes after"),
    ]:
        with pytest.raises(slurm.ScriptError, match=re.escape(message)):
            slurm.lint(text, "s")


LINE = (
    "JobId=12 JobName=x JobState={} Reason={} Dependency=(null) Restarts={} ExitCode={} NodeList=n[1-2] "
    "StdOut={}"
)


def test_jobs_as_scontrol_shows_them():
    assert str(parse(LINE.format("PENDING", "Priority", 0, "0:0", "o"))) == "12 pending (Priority)"
    assert str(parse(LINE.format("RUNNING", "None", 1, "0:0", "o"))) == "12 running on n[1-2], start 2"
    failed = parse(LINE.format("FAILED", "None", 0, "0:9", "o"))
    assert failed.code == 137 and str(failed) == "12 failed with code 137"
    assert parse("JobId=9 ArrayJobId=7 ArrayTaskId=3 JobState=COMPLETED").job == "7_3"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Let scontrol say one thing after the other."""

    def says(*answers):
        answer = tmp_path / "answer"
        for old in tmp_path.glob("answer?"):
            old.unlink()
        for number, text in enumerate(answers):
            (tmp_path / f"answer{number}").write_text(text)
        answer.write_text("0")
        program = tmp_path / "scontrol"
        program.write_text(
            f"#!/bin/bash\nn=$(cat {answer}); echo $((n + 1)) > {answer}\n"
            f'[ -e {answer}$n ] && cat {answer}$n || {{ echo "Invalid job id specified" >&2; exit 1; }}\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return says


def test_watch_follows_a_job_through_a_requeue(fake, tmp_path):
    log = tmp_path / "log"
    log.write_text("one\ntwo")
    fake(
        LINE.format("RUNNING", "None", 0, "0:0", log),
        LINE.format("RUNNING", "None", 0, "0:0", log),
        LINE.format("PENDING", "BeginTime", 1, "0:0", log),
        LINE.format("FAILED", "NonZeroExitCode", 1, "3:0", log),
    )
    said, shown = [], []
    assert slurm.watch(12, said.append, shown.append, pause=0) == 3
    assert shown == ["one", "two"]
    assert said == [
        "12 running on n[1-2]",
        "12 pending (BeginTime), start 2",
        "12 failed with code 3, start 2",
    ]


def test_watch_an_array_and_a_job_that_slurm_forgets(fake):
    task = "JobId=1{0} ArrayJobId=10 ArrayTaskId={0} JobState={1} ExitCode={2}:0\n"
    fake(
        "JobId=10 ArrayJobId=10 ArrayTaskId=0-1%1 JobState=PENDING Reason=Resources\n",
        task.format(0, "FAILED", 1) + task.format(1, "RUNNING", 0),
        task.format(1, "COMPLETED", 0),
    )
    assert slurm.watch(10, lambda line: None, pause=0) == 1
    fake(LINE.format("RUNNING", "None", 0, "0:0", "o"))
    said = []
    assert slurm.watch(12, said.append, pause=0) == 1 and "no longer known" in said[-1]
    with pytest.raises(slurm.ScriptError, match="Invalid job id"):
        slurm.watch(12, said.append)


def test_no_slurm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(slurm.ScriptError, match="scontrol: not found"):
        steps(1)


def cli(*words):
    return CliRunner().invoke(main, ["slurm", *map(str, words)])


def test_render_on_the_command_line(tmp_path):
    site = tmp_path / "site.json"
    site.write_text('{"nodes": 3}')
    changes = ("program=a.py 'b c'", "exclusive=true", "nodes=5")
    done = cli(
        "render", "ethernet", "--profile", site, *(word for change in changes for word in ("--set", change))
    )
    assert done.exit_code == 0 and "--nodes=5\n" in done.output and "#SBATCH --exclusive\n" in done.output
    assert shlex.split(done.output.splitlines()[-1])[-2:] == ["a.py", "b c"]
    assert cli("render", "ethernet", "--profile", site, "-o", tmp_path / "out").output == ""
    assert "--nodes=3\n" in (tmp_path / "out").read_text()
    for change, message in [
        ("nodes", "expected key=value"), ("nodes=x", "got 'x'"), ("node=1", "did you mean"),
        ("env=1", "not a table"), ("program='", "No closing quotation"),
    ]:  # fmt: skip
        done = cli("render", "ethernet", "--profile", site, "--set", change)
        assert done.exit_code == 1 and message in done.output, done.output
    assert cli("render", "ethernett", "--profile", site).exit_code == 2


def test_submit_names_the_file(tmp_path):
    done = cli("submit", tmp_path / "none.sbatch")
    assert done.exit_code == 1 and "none.sbatch: No such file" in done.output


def test_places():
    both = {"CUDA_VISIBLE_DEVICES": "2,5,7", "SLURM_LOCALID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert place.place(both) == {"CUDA_VISIBLE_DEVICES": "5,7,2"}
    assert place.place({"ROCR_VISIBLE_DEVICES": "0,1", "MPI_LOCALRANKID": "3"}) == {
        "ROCR_VISIBLE_DEVICES": "1,0"
    }
    assert place.place({"CUDA_VISIBLE_DEVICES": "4", "SLURM_LOCALID": "0"}) == {"CUDA_VISIBLE_DEVICES": "4"}
    with pytest.raises(ValueError, match="no GPU is visible"):
        place.place({"SLURM_LOCALID": "0"})
    with pytest.raises(ValueError, match="nothing tells"):
        place.place({"CUDA_VISIBLE_DEVICES": "0"})


def test_a_node_without_gpus_says_so_once():
    call = [sys.executable, "-m", "mpicoll.cli.place", "echo", "ran"]
    said = []
    for local in "01":
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SCRIPTS.parent), "SLURM_LOCALID": local}
        done = subprocess.run(call, env=env, capture_output=True, text=True, timeout=20)
        assert done.returncode == 1 and done.stdout == ""
        said.append("no GPU is visible" in done.stderr)
    assert said == [True, False]
    done = subprocess.run(call, env={**env, "CUDA_VISIBLE_DEVICES": "0"}, capture_output=True, timeout=20)
    assert done.stdout == b"ran\n"


class Alone:
    """A communicator of one rank."""

    def Get_rank(self):
        return 0

    def Allreduce(self, mine, everyone):
        everyone[:] = mine


def test_notice(tmp_path, monkeypatch):
    monkeypatch.setenv("MPICOLL_NOTICE", str(tmp_path / "notice"))
    monkeypatch.setenv("MPICOLL_REQUEUE", str(tmp_path / "requeue"))
    before = signal.getsignal(signal.SIGTERM)
    notice = slurm.Notice(Alone())
    assert not notice.agreed()
    (tmp_path / "notice").touch()
    assert notice.agreed() and not (tmp_path / "requeue").exists()
    notice.requeue()
    assert (tmp_path / "requeue").exists()
    notice.close()
    assert signal.getsignal(signal.SIGTERM) == before


def test_notice_by_a_signal_and_without_a_script(monkeypatch):
    monkeypatch.delenv("MPICOLL_NOTICE", raising=False)
    monkeypatch.delenv("MPICOLL_REQUEUE", raising=False)
    notice = slurm.Notice(Alone())
    assert not notice.agreed()
    os.kill(os.getpid(), signal.SIGTERM)
    assert notice.agreed()
    notice.requeue()
    notice.close()


def test_ready():
    loaded = launcher.Mpi("mpich", "5.0.2")
    assert ready.unlike("mpich", loaded) is None
    assert "loads MPICH 5.0.2, and this script is for Open MPI" in ready.unlike("openmpi", loaded)
    assert ready.apart(8, 4, 8, 4, loaded) is None
    assert "each of 8 processes is rank 0 of 1" in ready.apart(8, 4, 1, 1, loaded)
    assert "4 ranks were started, expected 8" in ready.apart(8, 4, 4, 2, loaded)
    assert "on 1 nodes, expected 4" in ready.apart(8, 4, 8, 1, loaded)
    assert ready.first({}) and ready.first({"PMIX_RANK": "0", "SLURM_PROCID": "3"})
    assert not ready.first({"SLURM_PROCID": "3"})
