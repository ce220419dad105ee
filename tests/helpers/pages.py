"""The pages of the documentation: blocks of code, command lines, parts of recipes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from palm_ds.cli.main import find

LAUNCHERS = ("palm-ds", "deepspeed", "torchrun", "python", "mpirun")
INNER = re.compile(r"(?:launch/|palm_ds\.cli\.)(\w+)(?:\.py)?")
"""The program that a launcher starts: a script of launch/, or a module."""
PLACEHOLDER = re.compile(r" \[[^\]\"']*\.\.\.\]| \[options\]")
OPTIONAL = re.compile(r"\[(--[^\]]*)\]")


def blocks(path: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages; "": without one."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)
    return [text for language, text in fenced if language in languages]


def inline_code(path: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]


def fenced_commands(path: Path) -> Iterator[str]:
    """The command lines of a page, each on one line."""
    for block in blocks(path, "", "bash"):
        lines = iter(block.replace("\\\n", " ").splitlines())
        for line in lines:
            line = re.sub(r"\s#\s.*", "", line.removeprefix("$ "))
            if not line.startswith(LAUNCHERS):
                continue
            while line.count("'") % 2:  # a text over several lines
                line += " " + next(lines).strip()
            yield line


def words_of(line: str) -> list[str]:
    """The sub-command and its arguments; empty: not one of ours."""
    words = shlex.split(OPTIONAL.sub(r"\1", PLACEHOLDER.sub("", line)))
    if words[0] == "palm-ds":
        return words[1:]
    for at, word in enumerate(words):
        if inner := INNER.fullmatch(word):
            name = {"inspect_stream": "inspect"}.get(inner[1], inner[1])
            return [name.replace("_", "-"), *words[at + 1 :]]
    return []


def unknown_options(words: list[str]) -> list[str]:
    """The options that the sub-command does not have. Raises UserError if there is none of that
    name."""
    command, rest = find(words)
    if command.wraps and "--" in rest:
        rest = rest[: rest.index("--")]
    known = command.parser()._option_string_actions
    return [word for word in rest if word.startswith("--") and word not in known]


FILLED_IN = {"finetuning.md": ("classification", {"table": "rows.tsv"})}
"""What parts of recipes on a page are completed with: the kind of tasks, and their source."""


def completed(values: Mapping[str, object], page: str) -> dict[str, object]:
    """A part of a recipe as a whole one. Its encoder is a preset instead of that of `init_from`."""
    from palm_ds.data.stream.curriculum_spec import parse_stages
    from palm_ds.data.stream.stages import STAGE_SETTINGS, tasks_of
    from palm_ds.data.tasks.task import known_kinds

    kind, source = FILLED_IN.get(page, ("knowledge_masking", {"corpus": "corpus"}))
    whole = {"length": 128, "batch": "32 examples", **values}
    if not {"lora", "init_layers"} & whole.keys():
        whole.pop("init_from", None)
    whole.setdefault("backbone", {"preset": "tiny"})
    if "tasks" not in whole:
        names = {"any"}
        if "stages" in whole:
            words = re.findall(r"\w+", yaml.safe_dump(whole["stages"]))
            given = [word for word in words if word not in STAGE_SETTINGS]
            with_tasks = parse_stages(whole["stages"], given)
            names = {task for task_group in with_tasks.task_groups for task in tasks_of(task_group)}
        whole["tasks"] = {
            name: {"kind": name if name in known_kinds() else kind, "source": "filled"}
            for name in names
        }
    named = {task["source"] for task in whole["tasks"].values()}
    whole["sources"] = {name: source for name in named} | dict(whole.get("sources", {}))
    whole.setdefault("stages", {"joint": list(whole["tasks"]), "steps": 10})
    return whole
