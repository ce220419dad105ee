"""The pages of docs/howto, with all their commands, recipes and examples in order, on little data
with a small encoder; and the commands of docs/tour.md, with few steps."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import BertConfig, BertForMaskedLM

from palm_ds.cli.main import main
from palm_ds.train.recipe.stage_settings import StageSettings
from tests.helpers.pages import same_but_numbers
from tests.helpers.saved_model import write_rows
from tests.helpers.terminal import Terminal
from tests.helpers.warm_python import python, run

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs/howto").glob("*.md"))
MODEL = "models/encoder"
SHORT = {"steps": 4, "warmup": 1, "decay": 1, "every": 2, "keep_every": 4, "max_length": 32}
"""Numbers of a recipe."""
OURS = {
    "deepspeed --num_gpus 8 --module palm_ds.cli.": "palm-ds ",
    "run -- palm-ds ": "run -- python -m palm_ds ",
    "--deepspeed_config zero1_bf16.json": "--deepspeed_config cpu",
    "--workers 16": "",
    "--vocab_size 30522": "--vocab_size 300",
    "--out runs/field": "--out runs/field --steps 4",
}
"""What differs on a machine without GPUs."""
STAGE = {field.name for field in fields(StageSettings)}
"""Keys of a stage that are no task group."""
TEXT = "the a film book is was very quite good bad long short and but so we saw read it once"
WORDS = TEXT.split()


def sentence(number: int) -> str:
    """Of 9 to 13 words."""
    words = [WORDS[(number * 7 + 5 * at + at * at) % len(WORDS)] for at in range(9 + number % 5)]
    end = (" by Alan Turing", " about machine learning", "")[number % 3]
    return f"{' '.join(words).capitalize()}{end}."


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with what the pages start from."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS]
    config = BertConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
    )
    BertForMaskedLM(config).save_pretrained(tmp_path / MODEL)
    (tmp_path / MODEL / "vocab.txt").write_text("\n".join(tokens))
    (tmp_path / "texts").mkdir()
    documents = (" ".join(sentence(n * 31 + m) for m in range(8)) for n in range(120))
    (tmp_path / "texts/all.txt").write_text("\n\n".join(documents))
    (tmp_path / "texts.txt").write_text("\n".join(map(sentence, range(20))))
    (tmp_path / "words.txt").write_text("filmbook\nonceread\n")
    for name, numbers in (("", range(32)), ("dev_", range(32, 48))):
        rows = [{"text": sentence(n), "label": ("art", "sport")[n % 2]} for n in numbers]
        pairs = [{"anchor": row["text"][:20], "positive": row["text"]} for row in rows]
        write_rows(tmp_path / f"{name}pairs.jsonl", pairs)
        write_rows(tmp_path / f"{name.removesuffix('_') or 'train'}.jsonl", rows)
    return tmp_path


def parts(page: Path) -> Iterator[tuple[str, str]]:
    """Fenced blocks with their languages."""
    return iter(re.findall(r"^```(\w*)\n(.*?)^```", page.read_text("utf-8"), re.M | re.S))


def shortened(value: Any) -> Any:
    """A recipe with few steps."""
    if isinstance(value, dict):
        return {key: SHORT.get(key, shortened(each)) for key, each in value.items()}
    return [shortened(each) for each in value] if isinstance(value, list) else value


def small(text: str) -> dict[str, Any]:
    """The recipe of a page for this test."""
    values = shortened(yaml.safe_load(text)) | {"length": 64, "export_onnx": []}
    values["batch"] = "512 tokens" if "tokens" in values["batch"] else "8 examples"
    if isinstance(values["stages"], list):
        values["stages"] = [
            {key: value if key in STAGE else 4 for key, value in stage.items()}
            for stage in values["stages"]
        ]
    if "held_out" in values:
        values["held_out"] = 0.1
    if "init_from" not in values:
        values["backbone"] = {"preset": "tiny", "max_positions": 64}
    return values


def carry_out(line: str, place: Path) -> str:
    """Run a command of a page; returns its output."""
    for text, ours in OURS.items():
        line = line.replace(text, ours)
    words = ["-m", "palm_ds", *shlex.split(line.replace("-- python ", f"-- {python()} "))[1:]]
    if words[2] == "serve":
        terminal = Terminal([*words, "--port", "0"], cwd=place)
        terminal.wait_for("serving on")
        terminal.press("\x03")
        assert terminal.end()[0] == 0
        return ""
    if words[2] == "convert":  # the exporter is imported here already, which takes seconds
        assert main(words[2:]) == 0
        return ""
    done = run(words, cwd=place)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def follow(text: str, place: Path) -> int:
    """Run `$ commands`, each followed by lines of its output (`...`: some are left out); returns
    their number."""
    commands = re.findall(r"^\$ (palm-ds .*)\n((?:[^$].*\n)*)", text, re.M)
    for command, shown in commands:
        printed = same_but_numbers(carry_out(command, place))
        for line in same_but_numbers(shown):
            assert line in [*printed, "..."], f"{command}: prints no such line: {line}"
    return len(commands)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(x, marks=pytest.mark.exhaustive if x.stem == "compress_a_model" else [])
        for x in PAGES
    ],
    ids=lambda page: page.stem,
)
def test_a_page_can_be_followed(page: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fastapi", "onnxruntime", "sentence_transformers"):
        pytest.importorskip(name)
    monkeypatch.chdir(place)
    found = 0
    for language, text in parts(page):
        if language == "yaml":
            name = re.match(r"# (\S+\.yaml)\n", text)
            assert name, "its first line names the file"
            (place / name[1]).write_text(yaml.safe_dump(small(text)))
        elif language == "python":
            exec(compile(text, str(page), "exec"), {})
        elif language == "console":
            found += follow(text, place)
        else:
            for line in text.replace("\\\n", " ").splitlines():
                if line.startswith(("palm-ds", "deepspeed")):
                    carry_out(line, place)
                    found += 1
    assert found >= 2


TOUR = PAGES[0].parent.parent / "tour.md"
FEW_STEPS = {
    "stages.steps=80 schedule.decay=80": "stages.steps=4 schedule.decay=4 schedule.warmup=2",
    "evaluate.examples=300": "evaluate.examples=20 export_onnx=[]",  # the conversion writes it, too
}


@pytest.mark.slow
def test_the_tour_can_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    text = TOUR.read_text("utf-8").replace("\\\n", " ")
    commands = re.findall(r"^\$ (palm-ds (?:[^'\n]|'[^']*')+)$", text, re.M)
    names = [command.split()[1] for command in commands]
    assert names == ["prepare", "inspect", "pretrain", "fill-mask", "convert"]
    printed = ""
    for command in commands:
        for long, few in FEW_STEPS.items():
            command = command.replace(long, few)
        printed += carry_out(command, tmp_path)
    (model,) = re.findall(r"^model: .*", text, re.M)  # of the recipe that is shipped
    assert model in printed
