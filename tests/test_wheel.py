"""A wheel built from this checkout has all of it, and does everything from an empty folder, without
the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.launchers import ABSENT
from tests.helpers.warm_python import free_port

SHIPPED = {"launch/recipes": "*.yaml", "ds_configs": "*.json"}
"""Folders of the checkout that are in palm_ds/shipped of the wheel, and their files."""
CLUSTERS = {"launch/slurm": "*.sbatch", "launch/k8s": "*.yaml"}
"""More of them, which `palm-ds recipes` does not list."""
SOURCES = ("palm_ds", *SHIPPED, *CLUSTERS, "setup.py", "pyproject.toml", "README.md")
SHORT = ("stages.steps=4", "evaluate.examples=20", "batch=1024 tokens", "schedule.kind=constant")
SHORT += ("schedule.decay=0", "export_onnx=[]")
RECIPE = """
init_from: runs/one
length: 32
batch: 4 examples
optimizer: {lr: 1.0e-3}
sources: {mood: {table: rows.tsv, validation: rows.tsv}}
tasks: {mood: {kind: classification, source: mood}}
stages: [{mood: 1 epochs}]
export_onnx: []
"""

Run = Callable[..., str]


def clean() -> dict[str, str]:
    """This environment without the checkout."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}


def quietly(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def build(root: Path, folder: Path) -> Path:
    """The wheel of a copy of the sources: a build writes next to them."""
    for name in (*SOURCES, "LICENSE"):
        source, target = root / name, folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder / "dist")]
    command = [sys.executable, "-m", "pip", "wheel", "-q", *options, "."]
    quietly(command, folder / "source", clean())
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """An environment with the wheel, and of this Python's own only what the wheel requires."""
    environment = folder / "environment"
    quietly([sys.executable, "-m", "venv", "--without-pip", str(environment)], folder, clean())
    python = environment / "bin/python"
    install = ["install", "-q", "--no-deps", "--no-index", str(wheel)]
    quietly([sys.executable, "-m", "pip", "--python", str(python), *install], folder, clean())
    # A folder in a .pth file is searched, but .pth files in it are not read: an editable palm_ds
    # among the dependencies stays unseen.
    (found,) = environment.glob("lib/python*/site-packages")
    (found / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for module in ABSENT.glob("*.py"):  # of what only extras require
        shutil.copy(module, found)
    script = environment / "bin/deepspeed"
    script.write_text(
        f"#!{python}\nfrom deepspeed.launcher.runner import main\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    script.chmod(0o755)
    return environment


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(root, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def run(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """run("palm-ds", argument, ...): its output, in an empty folder, without this checkout."""
    folder = tmp_path_factory.mktemp("installed")
    bin_ = install(wheel, folder) / "bin"
    empty = folder / "empty"
    empty.mkdir()
    environment = clean() | {
        "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}",
        "DS_ACCELERATOR": "cpu",
    }

    def run(program: str, *arguments: str) -> str:
        return quietly([str(bin_ / program), *arguments], empty, environment)

    (empty / "mine.yaml").write_text(RECIPE)
    rows = ["a good film\tyes", "a bad film\tno", "very good\tyes", "an awful thing\tno"] * 10
    (empty / "rows.tsv").write_text("\n".join(["text_a\tlabel", *rows]) + "\n")
    return run


def test_a_wheel_holds_all_that_the_package_reads(wheel: Path, root: Path, tmp_path: Path) -> None:
    """And its command lists the recipes that it holds, from an empty folder."""
    sources = {path: path.relative_to(root) for path in (root / "palm_ds").rglob("*.*")}
    wanted = {
        str(name): path.read_bytes()
        for path, name in sources.items()
        if path.is_file() and "__pycache__" not in name.parts
    }
    for folder, files in {**SHIPPED, **CLUSTERS}.items():
        top = root / folder
        for path in top.rglob(files):
            name = f"palm_ds/shipped/{top.name}/{path.relative_to(top)}"
            wanted[name] = path.read_bytes()
    with zipfile.ZipFile(wheel) as packed:
        found = {name: packed.read(name) for name in packed.namelist()}
        packed.extractall(tmp_path / "unpacked")
    assert len(wanted) > 500 and wanted.keys() - found.keys() == set()
    assert [name for name, content in wanted.items() if found[name] != content] == []
    (about,) = (name for name in found if name.endswith(".dist-info/entry_points.txt"))
    assert "palm-ds = palm_ds.__main__:start" in found[about].decode()
    (tmp_path / "empty").mkdir()
    environment = clean() | {"PYTHONPATH": str(tmp_path / "unpacked")}
    command = [sys.executable, "-m", "palm_ds", "recipes", "--paths"]
    listed = quietly(command, tmp_path / "empty", environment)
    check_recipes(listed, root)
    assert f"{tmp_path}/unpacked/palm_ds/shipped/recipes/" in listed


def check_recipes(listed: str, root: Path) -> None:
    files = [path for folder, name in SHIPPED.items() for path in (root / folder).rglob(name)]
    assert files and all(f"/{file.name}\n" in listed for file in files)
    assert "/palm_ds/shipped/recipes/" in listed and str(root / "launch") not in listed


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.distributed
def test_a_wheel_works_from_an_empty_folder(run: Run, root: Path) -> None:
    where = run("python", "-c", "import palm_ds; print(palm_ds.__file__)")
    assert Path(where.strip()).parents[1].name == "site-packages"
    check_recipes(run("palm-ds", "recipes", "--paths"), root)
    assert run("palm-ds", "recipes", "copy", "embedded", "own.yaml") == "own.yaml\n"
    train = ("--train", "wordpiece", "--vocab_size", "500", "--lower")
    run("palm-ds", "prepare", "runs/demo/corpus", "embedded", *train)
    assert "runs/demo/corpus" in run("palm-ds", "corpus", "inspect", "runs/demo/corpus")

    given = ("--deepspeed_config", "cpu.json")
    pretrained = run("palm-ds", "pretrain", "own.yaml", *given, "--run_dir", "runs/one", *SHORT)
    assert "report: runs/one/report.html" in pretrained
    assert "[MASK]" in run("palm-ds", "fill-mask", "runs/one", "The [MASK] of a list.")
    launched = ("--num_gpus", "2", "--master_port", str(free_port()), "--module")
    two = (*given, "--run_dir", "runs/two", *SHORT)
    output = run("deepspeed", *launched, "palm_ds.cli.pretrain", "embedded.yaml", *two)
    assert "step 12/12" in output and "2 x 1 x 4 rows" in output

    finetuned = run("palm-ds", "finetune", "mine.yaml", *given, "--run_dir", "runs/mood")
    assert "weights: runs/mood/weights" in finetuned
    run("palm-ds", "predict", "runs/mood", "--input", "rows.tsv", "--output", "out")
    scored = ("--kind", "classification", "--gold", "rows.tsv")
    predictions = "out/mood.predictions.json"
    assert "accuracy" in run("palm-ds", "evaluate", *scored, "--predictions", predictions)
    unchecked = ("--to", "huggingface", "--onnx", "none", "--unchecked")  # as `verify` is next
    converted = run("palm-ds", "convert", "runs/one", "hf", *unchecked)
    assert "palm_ds weights -> huggingface: hf" in converted
    assert "the same" in run("palm-ds", "verify", "runs/one", "hf")
    assert "BertForMaskedLM" in run("palm-ds", "show", "hf")
