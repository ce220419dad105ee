"""The recipes, DeepSpeed files and files for clusters that come with the package.

                                        in a checkout       in a wheel
    embedded.yaml, finetune/rte.yaml    launch/recipes      palm_ds/shipped/recipes
    cpu.json, zero1_bf16.json           ds_configs          palm_ds/shipped/ds_configs
    slurm/pretrain.sbatch               launch              palm_ds/shipped

A command that gets such a name instead of a file uses the shipped file.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from palm_ds.common.errors import UserError, suggest_path
from palm_ds.common.messages import first_sentence, only_warnings_shown
from palm_ds.runtime.processes.launch_env import rank_of_launcher

_PACKAGE = Path(__file__).resolve().parent.parent
_FOLDERS = {
    "recipes": (_PACKAGE / "shipped/recipes", _PACKAGE.parent / "launch/recipes"),
    "ds_configs": (_PACKAGE / "shipped/ds_configs", _PACKAGE.parent / "ds_configs"),
}
"""Where a wheel and a checkout have them."""
COLUMNS = 76
"""Of a short description, if it can be cut where it explains."""
_CUT = re.compile(r"[:;]\s|\s\(|,\s(?=[^()]*\))")
"""Before an explanation, or a part of what is in parentheses."""
_PREFIX = re.compile(r"^(?:launch/)?(?:recipes|ds_configs)/")


def recipes() -> dict[str, Path]:
    """The shipped recipes, by name."""
    return _files("recipes", ".yaml")


def ds_configs() -> dict[str, Path]:
    """The shipped DeepSpeed files, by name."""
    return _files("ds_configs", ".json")


def find_recipe(text: str) -> str:
    """An existing recipe file, or the shipped one with this name. Raises UserError."""
    return _find(text, recipes(), "recipe")


def find_ds_config(text: str) -> str:
    """An existing DeepSpeed file, or the shipped one with this name. Raises UserError."""
    return _find(text, ds_configs(), "DeepSpeed file")


def cluster_file(name: str) -> str:
    """The text of `slurm/pretrain.sbatch` or `k8s/pretrain.yaml`."""
    folders = (_PACKAGE / "shipped", _PACKAGE.parent / "launch")
    file = next(folder / name for folder in folders if (folder / name).is_file())
    return file.read_text(encoding="utf-8")


def description(path: Path, *, short: bool = False) -> str:
    """The first sentence of a shipped file's description, in one line; `short`: a long one ends
    before something that explains."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        about = str(json.loads(text).get("_about", ""))
    else:
        comment = re.match(r"(?:#.*\n)+", text)
        about = re.sub(r"\s*#\s*", " ", comment[0]).strip() if comment else ""
    sentence = first_sentence(about).removesuffix(".")
    return _shortened(sentence) if short and len(sentence) > COLUMNS else sentence


def _shortened(sentence: str) -> str:
    starts = [sentence[: match.start()] for match in _CUT.finditer(sentence)]
    closed = [text + ")" * (text.count("(") - text.count(")")) for text in starts]
    telling = [text for text in closed if len(text) >= COLUMNS / 2]
    fitting = [text for text in telling if len(text) <= COLUMNS]
    return (fitting[-1:] or telling[:1] or [sentence])[0]


def copy(name: str, destination: str) -> Path:
    """Copy a shipped file to a folder (an existing one, or `new/`) or to a new file. Raises
    UserError."""
    files = {**recipes(), **ds_configs()}
    file = _named(name, files)
    if file is None:
        raise UserError(f"{name}: no shipped file has this name{_near(name, files)}")
    into = destination.endswith("/") or Path(destination).is_dir()
    target = Path(destination) / file.name if into else Path(destination)
    if target.exists():
        raise UserError(f"{target}: already exists; give another name, or remove it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror or error}") from None
    return target


def _files(kind: str, suffix: str) -> dict[str, Path]:
    folders = [folder for folder in _FOLDERS[kind] if folder.is_dir()]
    if not folders:
        return {}
    paths = sorted(folders[0].rglob(f"*{suffix}"))
    return {path.relative_to(folders[0]).as_posix(): path for path in paths}


def _find(text: str, files: Mapping[str, Path], what: str) -> str:
    if os.path.exists(text):
        return text
    file = _named(text, files)
    if file is None:
        near = suggest_path(text) or _near(text, files)
        raise UserError(f"{text}: no such file, and no shipped {what} has this name{near}")
    if rank_of_launcher() == 0 and not only_warnings_shown():
        print(f"note: {text}: the shipped {what} of this name", file=sys.stderr, flush=True)
    return str(file)


def _named(text: str, files: Mapping[str, Path]) -> Path | None:
    """The file for a name: `finetune/rte.yaml`, `finetune/rte`, `rte.yaml` or `rte`, optionally
    after the checkout's folder."""
    name = _PREFIX.sub("", text.removeprefix("./"))
    for key, path in files.items():
        if name in (key, key.rpartition(".")[0], path.name, path.stem):
            return path
    return None


def _near(text: str, files: Mapping[str, Path]) -> str:
    stems = {path.stem: key for key, path in files.items()}
    near = difflib.get_close_matches(Path(text).stem, stems, n=1, cutoff=0.7)
    return f'; did you mean "{stems[near[0]]}"?' if near else "; `palm-ds recipes` lists them"
