"""The project's promises: everything that is documented, pinned and shipped exists."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.machinery import SourceFileLoader
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "launch/recipes").glob("*.yaml"))
FINETUNE = sorted((ROOT / "launch/recipes/finetune").glob("*.yaml"))
MACHINES = sorted((ROOT / "ds_configs").glob("*.json"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("launch/**/*.md")])
SCRIPTS = [ROOT / ".ci/run", *sorted((ROOT / "launch").rglob("*.sbatch"))]
ENTRIES = sorted((ROOT / "launch").glob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tracked() -> list[Path]:
    """Files under version control, those about to be added included."""
    if shutil.which("git") is None:
        pytest.skip("no git")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for line in done.stdout.splitlines() if (path := ROOT / line).is_file()]


def pins() -> dict[str, str]:
    """The pins of this Python and platform."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin in pinned
        if pin.marker is None or pin.marker.evaluate()
    }


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements() -> list[Requirement]:
    """Everything pyproject.toml asks for on this platform, optional parts included."""
    project = pyproject()
    groups = [
        project["project"]["dependencies"],
        *project["project"]["optional-dependencies"].values(),
        *project["dependency-groups"].values(),
    ]
    asked = [Requirement(text) for group in groups for text in group]
    return [
        requirement
        for requirement in asked
        if requirement.name != "palm_ds"
        and (requirement.marker is None or requirement.marker.evaluate())
    ]


# The two commands ------------------------------------------------------------------------------


def test_the_two_commands_are_on_the_first_screen_and_exist() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:30])
    makefile = (ROOT / "Makefile").read_text()
    for target in ("pretrain", "test"):
        assert f"make {target}" in first_screen
        assert re.search(rf"^{target}:", makefile, re.M)


def test_ci_runs_the_readmes_test_command_last() -> None:
    steps = re.findall(r"^make .*$", (ROOT / ".ci/run").read_text(), re.M)
    assert steps[-1] == "make --no-print-directory test"
    assert set(steps[:-1]) == {
        "make lint",
        "make --no-print-directory async_io",
        "make --no-print-directory resolve",
        "make --no-print-directory site",
    }
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_the_make_targets_named_in_the_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        named = set(re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(), re.M))
        assert named <= targets, name_of(page)


OLD_PYTHON = """#!/bin/sh
[ "$1" = -V ] && echo Python 3.10.13 || exit 1
"""
NEW_PYTHON = """#!/bin/sh
[ "$1" = -c ] || echo "$0 $*" >> "$STARTED"
"""


def pythons(folder: Path, **programs: str) -> dict[str, str]:
    """An environment whose only interpreters these are; in the folder, what `make` reads."""
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("constraints.txt", "pyproject.toml", "setup.py"):
        (folder / name).touch()
    for name in ("python3", "python3.14", "python3.13", "python3.12", "python3.11"):
        program = folder / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(programs.get(name.replace(".", "_"), OLD_PYTHON))
        program.chmod(0o755)
    path = f"{folder / 'bin'}:{os.defpath}"
    return {"PATH": path, "STARTED": str(folder / "started")}


@pytest.mark.skipif(shutil.which("make", path=os.defpath) is None, reason="needs make")
@pytest.mark.parametrize(
    ("programs", "chosen"),
    [
        ({"python3": NEW_PYTHON}, "python3"),
        ({"python3_12": NEW_PYTHON, "python3_11": NEW_PYTHON}, "python3.12"),
    ],
)
def test_make_takes_a_supported_python(
    tmp_path: Path, programs: dict[str, str], chosen: str
) -> None:
    env = pythons(tmp_path, **programs)
    subprocess.run(["make", ".venv/ready"], cwd=tmp_path, env=env, capture_output=True)
    started = (tmp_path / "started").read_text()
    assert started == f"{tmp_path}/bin/{chosen} -m venv .venv\n"


@pytest.mark.skipif(shutil.which("make", path=os.defpath) is None, reason="needs make")
@pytest.mark.parametrize("given", [(), ("PYTHON=python3.11",)])
def test_make_says_which_python_it_found(tmp_path: Path, given: tuple[str, ...]) -> None:
    command = ["make", ".venv/ready", *given]
    env = pythons(tmp_path)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    name = given[0].partition("=")[2] if given else "python3"
    first = f"error: palm_ds needs Python 3.11 to 3.14, but {name} is: Python 3.10.13. Install one"
    assert done.returncode != 0 and done.stderr.splitlines()[0].startswith(first), done.stderr
    assert "make PYTHON=" in done.stderr


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_shell_scripts_are_valid(path: Path) -> None:
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_script_in_the_kubernetes_file_is_valid() -> None:
    _, job = yaml.safe_load_all((ROOT / "launch/k8s/pretrain.yaml").read_text())
    script, *_ = job["spec"]["template"]["spec"]["containers"][0]["args"]
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("path", ENTRIES, ids=name_of)
def test_every_command_describes_itself(path: Path) -> None:
    done = subprocess.run([sys.executable, str(path), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("usage: ") and f"launch/{path.name}" in done.stdout


# What is installed -----------------------------------------------------------------------------


def test_every_requirement_is_pinned_to_a_version_that_it_allows() -> None:
    pinned = pins()
    for requirement in requirements():
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not in constraints.txt"
        assert requirement.specifier.contains(version), f"{requirement} does not allow {version}"


def test_every_imported_package_is_required() -> None:
    asked = {canonicalize_name(requirement.name) for requirement in requirements()}
    asked |= {"palm-ds", "benchmarks", *(path.stem for path in (ROOT / "benchmarks").glob("*.py"))}
    owners = packages_distributions()
    optional = {
        "IPython",
        "apex",
        "flash_attn",
        "liger_kernel",
        "sentence_transformers",
    }  # from elsewhere; used where they are there
    benchmarks = (ROOT / "benchmarks").glob("*.py")
    for path in [*(ROOT / "palm_ds").rglob("*.py"), *ENTRIES, *benchmarks]:
        for name in imported(path) - set(sys.stdlib_module_names) - optional:
            owning = {canonicalize_name(owner) for owner in owners.get(name, [name])}
            assert owning & asked, f"{name_of(path)} imports {name}: not in pyproject.toml"


def imported(path: Path) -> set[str]:
    """Top names of the modules that a file imports, wherever in it, and of what these import only
    when they are used."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
            trainer = any(alias.name == "Trainer" for alias in node.names)
            names |= {"accelerate"} if trainer and node.module == "transformers" else set()
    return names


def test_what_the_requirements_require_is_pinned_too() -> None:
    pinned, missing, seen = pins(), set(), set()
    todo = [(requirement.name, requirement.extras) for requirement in requirements()]
    while todo:
        name, extras = todo.pop()
        if (name, frozenset(extras)) in seen or re.match("nvidia-|cuda-|triton", name):
            continue  # torch for CUDA pins those itself
        seen.add((name, frozenset(extras)))
        if canonicalize_name(name) not in pinned:
            missing.add(name)
        try:
            needed = [Requirement(text) for text in distribution(name).requires or []]
        except PackageNotFoundError:
            continue  # an optional part that is not installed here
        for requirement in needed:
            wanted = [{"extra": extra} for extra in extras] or [{"extra": ""}]
            marker = requirement.marker
            if marker is None or any(marker.evaluate(values) for values in wanted):
                todo.append((requirement.name, requirement.extras))
    assert missing == set()


@pytest.fixture(scope="module")
def resolve() -> Any:
    """The program `.ci/resolve.py`, where a package index answers."""
    loader = SourceFileLoader("resolve", str(ROOT / ".ci/resolve.py"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("resolve", loader))
    loader.exec_module(module)
    if importlib.util.find_spec("uv") is None:
        pytest.skip("needs uv: make lint installs it")
    if why := module.unreachable():
        pytest.skip(f"no package index answers: {why}")
    return module


def test_all_that_readme_and_make_install_is_resolved(resolve: Any) -> None:
    found = {" ".join(installation) for installation in resolve.installations()}
    for part in ("torch", ".", "--no-build-isolation -e .", "--no-build-isolation -e .[test]"):
        assert f"-c constraints.txt {part}" in found


@pytest.mark.parametrize(("pin", "resolves"), [("triton==3.7.1", True), ("triton==3.8.0", False)])
def test_a_pin_that_torch_does_not_allow_is_noticed(
    resolve: Any, pin: str, resolves: bool, tmp_path: Path
) -> None:
    """3.8.0 was the pin while only a local wheel of torch, which asks for no triton, was tried."""
    constraints = tmp_path / "constraints.txt"
    text = (ROOT / "constraints.txt").read_text()
    constraints.write_text(re.sub(r"^triton==\S+", pin, text, flags=re.M))
    done = resolve.resolved(("-c", "constraints.txt", "torch"), "3.12", str(constraints))
    assert (done.returncode == 0) == resolves, done.stderr
    assert resolves or ("triton" in done.stderr and "unsatisfiable" in done.stderr)


# What is shipped -------------------------------------------------------------------------------


def test_nothing_names_a_package_index_or_a_folder_of_one_machine() -> None:
    hosts = [("pypi", "org"), ("files.pythonhosted", "org"), ("download.pytorch", "org")]
    patterns = [re.escape(".".join(host)) for host in [*hosts, ("registry.npmjs", "org")]]
    patterns += [rf"(?<![\w.])/{folder}/" for folder in ("work", "root", "home", "Users", "opt")]
    wrong = re.compile("|".join(patterns))
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if not wrong.search(text):
            continue
        lines = text.splitlines()
        places = [f"{name_of(path)}:{n}: {line}" for n, line in enumerate(lines, 1)]
        found += [place for place, line in zip(places, lines, strict=True) if wrong.search(line)]
    assert found == []


def test_no_large_file_is_tracked() -> None:
    assert [name_of(path) for path in tracked() if path.stat().st_size > 500_000] == []


def test_the_embedded_recipe_is_shipped() -> None:
    assert "launch/recipes/embedded.yaml" in map(name_of, RECIPES)
    assert "ds_configs/cpu.json" in map(name_of, MACHINES)


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_recipes_are_valid_and_say_what_they_need_and_reach(path: Path) -> None:
    from palm_ds.train.recipe.recipe import read_recipe

    assert read_recipe(path).curriculum.steps > 0
    comment = re.match(r"(?:#.*\n)+", path.read_text())
    assert comment is not None and len(comment[0].split()) > 20


def test_chinese_recipes_train_the_chinese_encoder(root: Path) -> None:
    from palm_ds.train.recipe.recipe import read_recipe

    base = read_recipe(root / "launch/recipes/ernie2_zh_base.yaml").backbone_config
    large = read_recipe(root / "launch/recipes/ernie2_zh_large.yaml").backbone_config
    assert (base.activation, base.max_positions, base.num_layers) == ("relu", 513, 12)
    assert (large.activation, large.max_positions, large.num_layers) == ("relu", 512, 24)


@pytest.mark.parametrize("path", FINETUNE, ids=name_of)
def test_fine_tuning_recipes_are_valid_and_say_what_they_need_and_reach(path: Path) -> None:
    from palm_ds.train.recipe.recipe import make_recipe, read_values

    presets = {"gen": "ernie-gen-base", "gram": "ernie-gram-base"}
    presets |= {"m": "ernie-m-base", "unimo": "unimo-base-en", "doc": "ernie-doc-base-en"}
    presets |= {"vil": "ernie-vil-base-en"}
    preset = presets.get(path.stem.partition("_")[0], "ernie-2.0-base")
    values = read_values(path)
    types = {x: y for x, y in values.get("backbone", {}).items() if x == "token_types"}
    recipe = make_recipe({**values, "backbone": {"preset": preset, **types}}, str(path))
    for size in yaml.safe_load(path.read_text()).get("sizes", {}):
        other = read_values(path, [f"size={size}"])
        assert other != values
        own = {"preset": preset, **other.get("backbone", {})}
        assert (
            make_recipe({**other, "backbone": own}, str(path)).tasks.keys() == recipe.tasks.keys()
        )
    # As ERNIE's distillation is, and what ERNIE-ViL published; the others in epochs.
    in_steps = path.stem in {"chnsenticorp_bow", "vil_flickr", "vil_vcr", "vil_vqa"}
    assert recipe.examples or recipe.documents_read
    assert recipe.curriculum_spec.needs_corpus != in_steps
    comment = re.match(r"(?:#.*\n)+", path.read_text())
    assert comment is not None and len(comment[0].split()) > 20


@pytest.mark.parametrize("path", MACHINES, ids=name_of)
def test_deepspeed_files_are_valid_and_say_what_they_are_for(path: Path) -> None:
    from palm_ds.runtime.deepspeed.ds_config import read_ds_config

    assert read_ds_config(path).stage in range(4)
    assert '"_about": "' in path.read_text()


# What is documented ----------------------------------------------------------------------------


def test_the_pages_made_from_the_source_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = generate  # dataclasses look their module up
    spec.loader.exec_module(generate)
    for page, make in generate.PAGES.items():
        assert (ROOT / "docs" / page).read_text() == make(), f"docs/{page}: run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_have_targets(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)  # code apart
    links = re.findall(r"\]\(([^)#\s]+)", prose)
    inside = [link for link in links if "://" not in link]
    assert [link for link in inside if not (page.parent / link).exists()] == []
