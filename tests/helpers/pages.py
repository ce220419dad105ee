"""The pages of the documentation: blocks of code, command lines, parts of recipes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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


KINDS = {"finetuning.md": "classification"}
"""The kind of tasks that parts of recipes on a page only name, if not masked words of a corpus."""


def completed(values: Mapping[str, object], page: str) -> dict[str, object]:
    """A part of a recipe as a whole one. Its encoder is a preset instead of that of `init_from`."""
    whole = {"length": 128, "batch": "32 examples", **values}
    if not {"lora", "init_layers"} & whole.keys():
        whole.pop("init_from", None)
    whole.setdefault("backbone", {"preset": "tiny"})
    given = whole.get("tasks") or dict.fromkeys(_names_in(whole.get("stages")), {})
    whole["tasks"] = {name: _with_source(name, task, page) for name, task in given.items()}
    whole["sources"] = _sources(whole["tasks"]) | dict(whole.get("sources", {}))
    whole.setdefault("stages", {"joint": list(whole["tasks"]), "steps": 10})
    return whole


def _names_in(stages: object) -> set[str]:
    """The tasks that `stages` names."""
    from palm_ds.data.stream.curriculum_spec import parse_stages
    from palm_ds.data.stream.stages import STAGE_SETTINGS, tasks_of

    if stages is None:
        return {"any"}
    words = re.findall(r"\w+", yaml.safe_dump(stages))
    parsed = parse_stages(stages, [word for word in words if word not in STAGE_SETTINGS])
    return {task for task_group in parsed.task_groups for task in tasks_of(task_group)}


def _with_source(name: str, task: Mapping[str, Any], page: str) -> Mapping[str, Any]:
    from palm_ds.data.tasks.task import known_kinds

    if "source" in task:
        return task
    kind = name if name in known_kinds() else KINDS.get(page, "knowledge_masking")
    source = "rows" if _reads_tables(kind) else "text"
    return {"kind": kind, "source": source, **task}


def _sources(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A table or a corpus for each source that tasks name."""
    kinds = {task["source"]: task.get("kind", name) for name, task in tasks.items()}
    return {
        name: {"table": "rows.tsv"} if _reads_tables(kind) else {"corpus": "corpus"}
        for name, kind in kinds.items()
    }


def _reads_tables(kind: str) -> bool:
    from palm_ds.data.tasks.task import fine_tuning_kinds

    return kind in fine_tuning_kinds()


def same_but_numbers(text: str) -> list[str]:
    """Lines whose numbers and spaces may differ between a page and a run."""
    lines = (re.sub(r"-?\d[\d.,]*(e-\d+)?", "#", " ".join(x.split())) for x in text.splitlines())
    return [line for line in lines if line]
