"""Imports point down. A new module gets its place in LAYERS; one that needs something of its own
layer or above is in the wrong one."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

LAYERS = (
    ("common",),
    ("text", "model", "runtime"),
    ("corpus", "weights", "engine"),
    ("data",),
    ("pretrain", "tasks"),
    ("train",),
    ("inference",),
    ("api", "serve"),
    ("cli", "downloader", "__init__"),
    ("__main__",),
)
"""Bottom to top. A package has one place as a whole."""
PARTS = {
    "model": (
        ("config", "inputs", "pooling"),
        ("fgm", "ops"),
        ("attention",),
        ("kernels",),
        ("encoder",),
        ("generation", "heads"),
        ("distillation",),
        ("multi_task_model",),
        ("lora",),
    ),
    "runtime": (
        ("deepspeed", "optimizer", "schedulers"),
        ("device",),
        ("processes",),
        ("step", "supervisor", "zero"),
        ("checkpoint",),
    ),
    "data": (("reader",), ("sources",), ("tasks",), ("stream",)),
    "train": (
        ("plan", "report"),
        ("recipe",),
        ("evaluate",),
        ("setup",),
        ("export", "sweeps", "teachers"),
        ("loop", "startup_notes"),
        ("train",),
    ),
}
"""The same inside the packages that are large: their sub-packages and modules, bottom to top."""
LARGEST_FOLDER = 16
SHELVES = {"cli": 39, "common": 24, "corpus": 24, "pretrain": 24, "tasks": 24, "text": 24}
"""Modules side by side in a folder; more in those whose modules are alike (a command, a task)."""
APART = ("pretrain", "tasks")
"""Packages whose tasks never import one another; they share what is in their sub-packages."""
OWNERS = {
    "deepspeed": (
        "palm_ds/engine.py",
        "palm_ds/runtime/processes/processes.py",
        "palm_ds/runtime/deepspeed/deepspeed_import.py",
        "palm_ds/runtime/deepspeed/ds_config_check.py",
        "palm_ds/runtime/checkpoint/engine_state.py",
        "palm_ds/runtime/zero/swap_folder.py",
    ),
    "apex": ("palm_ds/model/kernels.py",),
    "mpi4py": ("palm_ds/corpus/",),
    "peft": ("palm_ds/model/lora.py",),
    "fastapi": ("palm_ds/serve/http/", "palm_ds/cli/serve.py"),
    "uvicorn": ("palm_ds/serve/http/", "palm_ds/cli/serve.py"),
    "prometheus_client": ("palm_ds/serve/metrics.py", "palm_ds/cli/serve.py"),
    "usearch": ("palm_ds/inference/search/graph.py",),
    "optuna": ("palm_ds/train/sweeps/search",),
    "wandb": ("palm_ds/train/report/trackers.py",),
    "mlflow": ("palm_ds/train/report/trackers.py",),
    "trackio": ("palm_ds/train/report/trackers.py",),
    "triton": (
        "palm_ds/model/attention/triton_kernels.py",
        "palm_ds/model/ops/fused_norm_triton_kernels.py",
        "palm_ds/runtime/optimizer/scaled_adam_triton_kernels.py",
    ),
}
"""Who may import what: everyone else goes through these."""

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = sorted((ROOT / "palm_ds").rglob("*.py"))
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}
HEIGHT["__init__"] = len(LAYERS)  # palm_ds itself hands out what others hold


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Dotted names of all modules that a file imports, wherever in the file, also those imported
    for annotations alone (`if TYPE_CHECKING`)."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def unit(path: Path) -> str:
    """The place in LAYERS that a file belongs to."""
    return path.relative_to(ROOT / "palm_ds").parts[0].removesuffix(".py")


NOT_MIRRORED = (
    "benchmarks",
    "distributed",
    "docs",
    "end_to_end",
    "golden",
    "helpers",
    "launch",
    "tools",
)
"""Folders of tests that belong to no single module."""


def test_every_test_file_names_a_module() -> None:
    modules = {path.relative_to(ROOT / "palm_ds") for path in PACKAGE}
    tests = (path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py"))
    strays = [
        str(path)
        for path in tests
        if len(path.parts) > 1
        and path.parts[0] not in NOT_MIRRORED
        and path.with_name(path.name.removeprefix("test_")) not in modules
    ]
    assert strays == []


def test_no_class_name_is_defined_in_two_modules() -> None:
    lines: dict[str, set[Path]] = {}
    for path in PACKAGE:
        for name in re.findall(r"^ *class (\w+)[(:]", path.read_text(), re.MULTILINE):
            lines.setdefault(name, set()).add(path)
    assert len(lines) > 500
    alike = {name: paths for name, paths in lines.items() if len(paths) > 1}  # or in examples
    twice = {name: found for name in alike if len(found := defined_in(name, alike[name])) > 1}
    assert twice == {}


def defined_in(name: str, paths: set[Path]) -> list[str]:
    """Those of these modules that define the class."""
    return [
        str(path.relative_to(ROOT))
        for path in sorted(paths)
        if any(isinstance(x, ast.ClassDef) and x.name == name for x in ast.walk(tree(path)))
    ]


def test_every_module_has_a_place() -> None:
    found = {unit(path) for path in PACKAGE} - {"__init__"}
    assert found - set(HEIGHT) == set(), "give these a place in LAYERS"


def test_imports_point_down() -> None:
    assert [said for path in PACKAGE for said in wrong_imports(path)] == []


def wrong_imports(path: Path) -> Iterator[str]:
    mine = unit(path)
    for name in imports(path):
        parts = name.split(".")
        said = f"{path.relative_to(ROOT)} imports {name}"
        if parts[0] in ("launch", "tools", "tests", "benchmarks"):
            yield said
        if parts[0] != "palm_ds" or len(parts) < 2 or mine in (parts[1], "__init__"):
            continue
        if parts[1] not in HEIGHT:
            yield f"{said}, which has no place"
        elif HEIGHT[parts[1]] >= HEIGHT[mine]:
            yield f"{said}, which is not below it"


@pytest.mark.parametrize("package", PARTS)
def test_imports_among_the_parts_of_a_package_point_down(package: str) -> None:
    height = {name: height for height, layer in enumerate(PARTS[package]) for name in layer}
    edges = imports_among_parts(package)
    assert {part for edge in edges for part in edge} - set(height) == set(), "give these a place"
    assert [(a, b) for a, b in edges if height[a] <= height[b]] == []


@pytest.mark.parametrize("package", sorted({unit(path) for path in PACKAGE} - set(PARTS)))
def test_the_parts_of_a_package_form_no_circle(package: str) -> None:
    graph: dict[str, set[str]] = {}
    for importer, imported in imports_among_parts(package):
        graph.setdefault(importer, set()).add(imported)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def imports_among_parts(package: str) -> set[tuple[str, str]]:
    """(importing part, imported part) of all imports between two parts of a package."""
    names = {p.name.removesuffix(".py") for p in (ROOT / "palm_ds" / package).glob("[!_]*")}
    edges = set()
    for path in (ROOT / "palm_ds" / package).rglob("*.py"):
        mine = path.relative_to(ROOT / "palm_ds" / package).parts[0].removesuffix(".py")
        for name in imports(path):
            parts = name.split(".")
            if parts[:2] == ["palm_ds", package] and len(parts) > 2 and parts[2] in names - {mine}:
                edges.add((mine, parts[2]))
    return {edge for edge in edges if edge[0] != "__init__"}


def test_no_folder_is_a_hall() -> None:
    sizes = Counter(path.parent for path in PACKAGE if path.stem != "__init__")
    allowed = {ROOT / "palm_ds" / name: size for name, size in SHELVES.items()}
    halls = {str(f): n for f, n in sizes.items() if n > allowed.get(f, LARGEST_FOLDER)}
    assert halls == {}


@pytest.mark.parametrize("package", APART)
def test_tasks_never_import_one_another(package: str) -> None:
    shelf = ROOT / "palm_ds" / package
    files = [path for path in PACKAGE if path.parent == shelf and path.stem != "__init__"]
    tasks = {f"palm_ds.{package}.{path.stem}" for path in files}
    for path in files:
        taken = {".".join(name.split(".")[:3]) for name in imports(path)}
        assert taken & tasks == set(), path


@pytest.mark.parametrize("package", OWNERS)
def test_each_large_dependency_has_one_door(package: str) -> None:
    files = [*PACKAGE, *(ROOT / "launch").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    naming = [path for path in files if package in path.read_text()]  # few: parsing takes long
    users = [p for p in naming if any(name.split(".")[0] == package for name in imports(p))]
    strangers = [
        name
        for name in (str(path.relative_to(ROOT)) for path in users)
        if not name.startswith(OWNERS[package])
    ]
    assert strangers == []


def test_nothing_is_done_at_import() -> None:
    assert [said for path in PACKAGE for said in done_at_import(path)] == []


def done_at_import(path: Path) -> Iterator[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    quiet = (ast.Import, ast.ImportFrom, *functions, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for node in tree(path).body:
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        main = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        program = main and unit(path) in ("cli", "__main__")
        if not (isinstance(node, quiet) or text or types or program):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


def test_importing_the_package_alone_is_cheap() -> None:
    code = "import sys, palm_ds; print(sorted({'torch', 'numpy', 'deepspeed'} & set(sys.modules)))"
    assert _python(code).stdout == "[]\n"


def test_importing_every_module_prints_nothing_and_starts_no_engine() -> None:
    """Modules of Triton kernels are imported where one is needed, since triton may be missing."""
    modules = [path for path in PACKAGE if not path.stem.endswith("triton_kernels")]
    names = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in modules]
    names = [name.removesuffix(".__init__") for name in names]
    slow = {"deepspeed", "pandas", "matplotlib", "torch._dynamo", "transformers"}
    code = f"import {', '.join(names)}, sys; print({slow} & set(sys.modules))"
    done = _python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "set()\n", "")


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
