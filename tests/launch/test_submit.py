"""`palm-ds submit` with programs in the place of sbatch, scontrol, scancel and kubectl that record
what they are given."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from palm_ds.cli import submit as command
from palm_ds.cli.command import Ended
from palm_ds.cli.main import main
from palm_ds.common.errors import UserError
from palm_ds.runtime.schedulers.job import ClusterJob, job_name
from palm_ds.runtime.schedulers.kubernetes import Kubernetes
from palm_ds.runtime.schedulers.slurm import Slurm

RECIPE = """\
length: 16
batch: 4 examples
backbone: {preset: tiny}
sources: {mood: {table: rows.tsv}}
tasks: {mood: {kind: classification, source: mood}}
stages: [{mood: 1 epochs}]
"""
PROGRAMS = {
    "sbatch": 'echo "$@" >> sbatch.called; cat > job.sbatch; echo "1234;cluster"',
    "scancel": 'echo "$@" >> scancel.called',
    "scontrol": """
        seen=$(cat seen 2> /dev/null || echo 0); echo $((seen + 1)) > seen
        printf 'line %s\\npart of' "$seen" >> log
        [ "$seen" -lt 2 ] && state=RUNNING code=0:0 || state=$(cat state) code=$(cat code)
        echo "JobId=$3 JobState=$state ExitCode=$code StdOut=$PWD/log"
    """,
    "kubectl": """
        echo "$@" >> kubectl.called
        case "$*" in
          *create*) cat > job.yaml ;;
          *"get job"*)
            seen=$(cat seen 2> /dev/null || echo 0); echo $((seen + 1)) > seen
            [ "$seen" -lt 2 ] && echo '{"status": {}}' || cat state ;;
          *"get pods"*) cat pods ;;
          *logs*) printf '2026-01-01T00:00:01.5Z log of %s\\n' "$2" ;;
        esac
    """,
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe and the programs, which is the current one."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "My mood.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(Slurm, "pause", 0.0)
    monkeypatch.setattr(Kubernetes, "pause", 0.0)
    return tmp_path


SLURM = ("--slurm", "My mood.yaml", "--deepspeed_config", "cpu.json", "--run_dir", "runs/my mood")
KUBERNETES = ("--kubernetes", *SLURM[1:], "--image", "me/palm:1")


def submit(*words: str) -> int:
    return main(["submit", *words])


def called(place: Path, program: str) -> list[str]:
    file = place / f"{program}.called"
    return file.read_text().splitlines() if file.exists() else []


def test_slurms_file_is_filled_in(place: Path, root: Path, capsys) -> None:
    sizes = ("--nodes", "3", "--gpus", "4", "--option", "partition=a b", "--option", "time=1:00:00")
    assert submit(*SLURM, *sizes, "--print", "optimizer.lr=1e-4") == 0
    text = capsys.readouterr().out
    shipped = (root / "launch/slurm/pretrain.sbatch").read_text().splitlines()
    changed = [line for line in text.splitlines() if line not in shipped]
    machine = root / "ds_configs/cpu.json"
    assert changed == [
        "#SBATCH --job-name=my-mood",
        "#SBATCH --nodes=3",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --time=1:00:00",
        "#SBATCH --partition='a b'",
        f"set -- '{place}/My mood.yaml' {machine} 'runs/my mood' optimizer.lr=1e-4",
        "PROGRAM='--module palm_ds.cli.finetune'",
    ]
    assert called(place, "sbatch") == []
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_an_option_does_not_replace_one_whose_name_goes_on(place: Path, capsys) -> None:
    assert submit(*SLURM, "--option", "gpus=4", "--option", "ntasks=2", "--print") == 0
    text = capsys.readouterr().out
    for line in ("gpus=4", "gpus-per-node 8", "ntasks=2", "ntasks-per-node 1"):
        assert f"\n#SBATCH --{line}\n" in text


def test_options_whose_value_sbatch_takes_only_after_a_sign(place: Path, capsys) -> None:
    """`#SBATCH --exclusive user` are an option and a word, which sbatch refuses."""
    options = ("exclusive=user", "nice=100", "contiguous=")
    assert submit(*SLURM, *(x for each in options for x in ("--option", each)), "--print") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "#SBATCH --exclusive" not in lines
    assert {"#SBATCH --exclusive=user", "#SBATCH --nice=100", "#SBATCH --contiguous"} <= {*lines}


@pytest.mark.parametrize("name", ["mem", "mem-per-cpu", "mem-per-gpu"])
def test_memory_is_asked_for_once(place: Path, capsys, name: str) -> None:
    assert submit(*SLURM, "--option", f"{name}=64G", "--print") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [x for x in lines if x.startswith("#SBATCH --mem")] == [f"#SBATCH --{name}=64G"]


def test_the_filled_in_file_starts_the_run(place: Path, capsys) -> None:
    """The job's own programs stand in for srun and the rest."""
    submit(*SLURM, "--print", "optimizer.lr=1e-4", "--nodes", "2")
    text = capsys.readouterr().out
    stand_ins = {
        "srun": 'while [ "$1" != bash ]; do shift; done; SLURM_NODEID=0 "$@"',
        "scontrol": 'printf "n1\\nn2\\n"',
        "palm-ds": 'printf "%s|" "$@" > started',
    }
    for name, body in stand_ins.items():
        (place / name).write_text(f"#!/bin/bash\n{body}\n")
        (place / name).chmod(0o755)
    env = {"PATH": os.environ["PATH"], "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}
    subprocess.run(["bash", "-s"], input=text, text=True, env=env, check=True)
    started = (place / "started").read_text().split("|")
    at = started.index("--module")
    assert started[at : at + 3] == ["--module", "palm_ds.cli.finetune", f"{place}/My mood.yaml"]
    assert started[at + 5 : at + 8] == ["--run_dir", "runs/my mood", "optimizer.lr=1e-4"]


@pytest.mark.parametrize(
    ("state", "code", "ended"),
    [("COMPLETED", "0:0", 0), ("FAILED", "3:0", 3), ("TIMEOUT", "0:0", 1)],
)
def test_a_slurm_job_is_followed_to_its_end(
    place: Path, state: str, code: str, ended: int, capsys
) -> None:
    (place / "state").write_text(state)
    (place / "code").write_text(code)
    assert submit(*SLURM) == ended
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["submitted as job 1234", "line 0"]
    assert said[2:5] == ["part ofline 1", "part ofline 2", "part of"]
    assert called(place, "sbatch") == ["--parsable"]
    assert "PROGRAM='--module palm_ds.cli.finetune'" in (place / "job.sbatch").read_text()


AWAY = {
    "scontrol": 'echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1',
    "kubectl": 'echo "The connection to the server was refused" >&2; exit 1',
}
UNKNOWN = {
    "scontrol": 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1',
    "kubectl": 'echo "Error from server (NotFound): jobs \\"1234\\" not found" >&2; exit 1',
}


def answers_later(place: Path, program: str, text: str, looks: range) -> None:
    """Put `text` in the place of the looks at a job with these numbers; others are as before."""
    own = PROGRAMS[program]
    count = "looks=$(cat looks 2> /dev/null || echo 0); echo $((looks + 1)) > looks"
    cases = "|".join(map(str, looks))
    script = f"#!/bin/bash\n{count}\ncase $looks in {cases}) {text} ;; esac\n{own}"
    (place / program).write_text(script)


@pytest.mark.parametrize("program", ["scontrol", "kubectl"])
def test_a_scheduler_that_does_not_answer_is_asked_again(place: Path, program, capsys) -> None:
    (place / "code").write_text("0:0")
    (place / "pods").write_text('{"items": []}')
    ended = {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    state = json.dumps(ended) if program == "kubectl" else "COMPLETED"
    (place / "state").write_text(state)
    answers_later(place, program, AWAY[program], range(2, 7))
    how = "--slurm" if program == "scontrol" else "--kubernetes"
    assert submit(how, "--follow", "1234") == 0
    said = capsys.readouterr().out
    assert said.count("asking again") == 1 and "note: " + program in said
    (place / "looks").write_text("2")
    with pytest.raises(SystemExit):  # the first look: a mistake of the user
        submit(how, "--follow", "1234")


@pytest.mark.parametrize("program", ["scontrol", "kubectl"])
def test_a_job_that_is_gone_is_not_waited_for(place: Path, program, monkeypatch, capsys) -> None:
    (place / "pods").write_text('{"items": []}')
    (place / "code").write_text("0:0")
    answers_later(place, program, UNKNOWN[program], range(2, 99))
    how = "--slurm" if program == "scontrol" else "--kubernetes"
    with pytest.raises(SystemExit):
        submit(how, "--follow", "1234")
    (place / "looks").write_text("0")
    (place / "seen").unlink()
    answers_later(place, program, AWAY[program], range(2, 99))
    monkeypatch.setattr(Slurm, "patience", 0.0)
    monkeypatch.setattr(Kubernetes, "patience", 0.0)
    with pytest.raises(SystemExit):
        submit(how, "--follow", "1234")
    assert program in capsys.readouterr().err


def test_jobs_are_cancelled(place: Path) -> None:
    assert submit("--slurm", "--cancel", "77") == 0
    assert submit("--kubernetes", "--cancel", "mine", "--option", "namespace=nlp") == 0
    assert called(place, "scancel") == ["77"]
    (line,) = called(place, "kubectl")
    assert line == "--namespace=nlp delete job,service,configmap mine --ignore-not-found"


def stopped_by(error: BaseException, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this stop a job that is followed, on a terminal whose user types the answer."""

    def stopped(*_: object) -> int:
        raise error

    class Terminal:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return f"{answer}\n"

    monkeypatch.setattr(Slurm, "follow", stopped)
    monkeypatch.setattr(command.sys, "stdin", Terminal())


@pytest.mark.parametrize("answer", ["y", "n"])
def test_an_interrupt_asks(place: Path, answer: str, monkeypatch, capsys) -> None:
    stopped_by(KeyboardInterrupt(), answer, monkeypatch)
    assert submit(*SLURM) == 130
    said = capsys.readouterr().err
    assert "cancel job 1234? [y/N]" in said
    assert called(place, "scancel") == (["1234"] if answer == "y" else [])
    assert ("palm-ds submit --slurm --follow 1234" in said) == (answer == "n")


def test_a_signal_that_ends_the_command_asks_nothing(place: Path, monkeypatch, capsys) -> None:
    """It waited for an answer, and was not ended."""
    stopped_by(Ended(signal.SIGTERM), "y", monkeypatch)
    with pytest.raises(Ended):
        submit(*SLURM)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == "job 1234 continues: palm-ds submit --slurm --follow 1234  (or --cancel 1234)"
    assert called(place, "scancel") == []


def documents(text: str) -> list[Any]:
    return list(yaml.safe_load_all(text))


def test_kubernetes_file_is_filled_in(place: Path, root: Path, capsys) -> None:
    sizes = ("--nodes", "3", "--gpus", "4", "--claim", "nlp-data", "--name", "Mine_2")
    assert submit(*KUBERNETES, *sizes, "--print", "optimizer.lr=1e-4") == 0
    text = capsys.readouterr().out
    service, files, work = documents(text)
    shipped = documents((root / "launch/k8s/pretrain.yaml").read_text())
    assert service["metadata"]["name"] == service["spec"]["selector"]["job-name"] == "mine-2"
    assert files["data"]["recipe.yaml"] == RECIPE
    assert json.loads(files["data"]["ds_config.json"])
    spec, before = work["spec"], shipped[1]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (3, 3, 60)
    assert spec["podFailurePolicy"] == before["podFailurePolicy"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    assert env == {
        **{"NODES": "3", "SLOTS": "4", "OMP_NUM_THREADS": "4", "RUN_DIR": "runs/my mood"},
        "RECIPE": "/palm_ds_job/recipe.yaml",
        "MACHINE": "/palm_ds_job/ds_config.json",
        **{"NAME": "mine-2", "PROGRAM": "--module palm_ds.cli.finetune"},
    }
    assert (container["image"], pod["subdomain"]) == ("me/palm:1", "mine-2")
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert container["args"][1:] == ["bash", "optimizer.lr=1e-4"]
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "nlp-data"}} in pod["volumes"]
    assert re.search(r"\n +set -euo pipefail\n", text), "the script stays readable"


def test_kubernetes_accepts_the_filled_in_file(place: Path, capsys) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    submit(*KUBERNETES, "--print", "optimizer.lr=1e-4")
    for document in documents(capsys.readouterr().out):
        validate.validate(document, validate.latest_version(), strict=True)


def test_the_filled_in_container_starts_the_run(place: Path, capsys) -> None:
    submit(*KUBERNETES, "--print", "--nodes", "2", "optimizer.lr=1e-4")
    (container,) = documents(capsys.readouterr().out)[2]["spec"]["template"]["spec"]["containers"]
    (place / "palm-ds").write_text('#!/bin/bash\nprintf "%s|" "$@" > started\n')
    (place / "palm-ds").chmod(0o755)
    env = {item["name"]: item["value"] for item in container["env"]}
    env |= {"PATH": os.environ["PATH"], "TMPDIR": str(place), "JOB_COMPLETION_INDEX": "1"}
    subprocess.run([*container["command"], *container["args"]], env=env, check=True)
    started = (place / "started").read_text().split("|")
    assert "my-mood-0.my-mood" in started and started[-2] == "optimizer.lr=1e-4"
    hosts = Path(started[started.index("--hostfile") + 1]).read_text()
    assert hosts == "my-mood-0.my-mood slots=8\nmy-mood-1.my-mood slots=8\n"


@pytest.mark.parametrize("ended", ["Complete", "Failed"])
def test_a_kubernetes_job_is_followed_over_evictions(place: Path, ended: str, capsys) -> None:
    pods = [("second", "Running", "2"), ("first", "Failed", "1"), ("third", "Pending", "3")]
    items = [
        {"metadata": {"name": name, "creationTimestamp": time}, "status": {"phase": phase}}
        for name, phase, time in pods
    ]
    (place / "pods").write_text(json.dumps({"items": items}))
    condition = {"type": ended, "status": "True"}
    (place / "state").write_text(json.dumps({"status": {"conditions": [condition]}}))
    assert submit(*KUBERNETES) == (0 if ended == "Complete" else 1)
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == ["submitted as job my-mood", "log of first", "log of second"]
    assert documents((place / "job.yaml").read_text())[2]["metadata"]["name"] == "my-mood"
    assert called(place, "kubectl")[0] == "create --filename -"


LOG = """
    case "$*" in *"--timestamps --since-time=2026-01-01T00:00:01.12Z"*) again=yes ;; esac
    echo '2026-01-01T00:00:01.1Z one'
    echo '2026-01-01T00:00:01.12Z two words'
    if [ "$again" ]; then
        echo '2026-01-01T00:00:01.1234Z three'
        echo '2026-01-01T00:00:01.1234Z four'
        echo '2026-01-01T00:00:11Z '
        echo 'of another kind'
    fi
    exit
"""


def test_a_log_whose_connection_was_lost_is_continued(place: Path, capsys) -> None:
    """Its lines are read again from the last one's second."""
    pod = {"metadata": {"name": "pod", "creationTimestamp": "1"}, "status": {"phase": "Running"}}
    (place / "pods").write_text(json.dumps({"items": [pod]}))
    ended = {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    (place / "state").write_text(json.dumps(ended))
    own = f"*logs*) {LOG} ;;"
    script = PROGRAMS["kubectl"].replace("*logs*)", f"{own}\n *never*)")
    (place / "kubectl").write_text(f"#!/bin/bash\n{script}")
    assert submit("--kubernetes", "--follow", "mine") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:6] == ["one", "two words", "three", "four", "", "of another kind"]


def test_a_recipe_whose_weights_are_elsewhere_is_submitted(place: Path, capsys) -> None:
    assert submit(*SLURM, "init_from=/data/ernie", "--detach") == 0
    said = capsys.readouterr()
    assert "note: init_from: /data/ernie is not here" in said.err
    assert said.out.splitlines() == ["submitted as job 1234"]


@pytest.mark.parametrize("sources", ["null", "[]", "{mood: null}"])
def test_a_recipe_that_the_job_checks_may_have_no_source(place: Path, capsys, sources: str) -> None:
    overrides = ("init_from=/data/ernie", f"sources={sources}")
    assert submit(*SLURM, *overrides, "--detach") == 0
    assert capsys.readouterr().out.splitlines() == ["submitted as job 1234"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (SLURM[:-2], "--run_dir: missing; name"),
        (("--slurm",), "RECIPE: missing; name"),
        (KUBERNETES[:-2], "--image: missing; name"),
        ((*SLURM, "--image", "x"), "--image: Slurm runs no containers"),
        ((*SLURM, "--option", "gpu"), "--option 'gpu': expected KEY=VALUE"),
        ((*SLURM, "--option", "a b\nrm -r x\n#=c"), "expected KEY=VALUE"),
        ((*SLURM, "--option", "comment=a\nrm -r x"), "has a line break or control character"),
        ((*SLURM, "optimiser.lr=1"), 'optimiser: unknown key; did you mean "optimizer"'),
        ((*SLURM, "--nodes", "0"), "--nodes: expected a number above 0, got 0"),
        ((*KUBERNETES, "--gpus", "0"), "--gpus: expected 1 or more, got 0"),
        ((*SLURM, "--name", "1"), "name '1': must begin with a letter"),
        ((*SLURM, "--follow", "7"), "--follow: the job is already submitted; remove My mood"),
        (("--slurm", "--follow", "7", "--detach"), "--follow: the job is already submitted; re"),
        (("--slurm", "--follow", "7", "--cancel", "7"), "submitted; remove --cancel"),
        (("--slurm", "--cancel", "7", "--print"), "submitted; remove --print"),
        (
            ("--kubernetes", "utf16", *KUBERNETES[2:]),
            "utf16: cannot be read as text: 'utf-8' codec",
        ),
    ],
)
def test_mistakes_are_told_before_a_job_waits(
    place: Path, words: tuple[str, ...], message: str, capsys
) -> None:
    (place / "utf16").write_text(RECIPE, encoding="utf-16")
    with pytest.raises(SystemExit) as ended:
        submit(*words)
    assert ended.value.code == 2 and message in capsys.readouterr().err
    assert called(place, "sbatch") == called(place, "kubectl") == []


def test_what_a_scheduler_says_is_told(place: Path) -> None:
    (place / "sbatch").write_text("#!/bin/bash\necho 'Batch job refused' >&2; exit 1\n")
    with pytest.raises(UserError, match="^sbatch: Batch job refused$"):
        Slurm(template="").submit("")
    (place / "scontrol").write_text("#!/bin/bash\necho nothing\n")
    with pytest.raises(UserError, match="scontrol: knows no job 5"):
        Slurm(template="").follow("5", print)


def test_a_missing_program_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(place / "none"))
    with pytest.raises(UserError, match="kubectl: no such program on PATH"):
        Kubernetes(template="").cancel("mine")


def test_names_are_those_of_hosts() -> None:
    assert job_name("ERNIE2.0_en--base" * 4) == "ernie2-0-en-baseernie2-0-en-baseernie2-0"
    job = ClusterJob(name="a", command="pretrain", recipe="r", ds_config="d", run_dir="o")
    assert job.program == "--module palm_ds.cli.pretrain"
