"""The three commands, run in this process: output, exit codes, files."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import ClassHead, Head, MaskedLMHead
from palm_ds.model.multi_task_model import Model
from palm_ds.text.tokenizer import wordpiece
from palm_ds.weights.weights_folder import WeightsInfo, save_weights

FOLDER = Path(__file__).resolve().parents[2] / "tools" / "convert_ckpt"
CONFIG = EncoderConfig(
    vocab_size=16,
    hidden_size=8,
    num_layers=2,
    num_heads=2,
    intermediate_size=12,
    max_positions=16,
    task_types=2,
    layer_norm_eps=1e-5,
)
TO_HF = ("--to", "huggingface", "--onnx", "none")
WORDS = wordpiece(["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *"abcdefgh"], lower=True)


@dataclass(frozen=True)
class Said:
    """How a command ended, and its output."""

    code: int
    out: str
    err: str


Enter = Callable[..., Said]


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Enter:
    """enter("show", argument, ...): the command's `main`."""

    def enter(command: str, *arguments: object) -> Said:
        spec = importlib.util.spec_from_file_location(
            f"{command}_command", FOLDER / f"{command}.py"
        )
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [f"{command}.py", *map(str, arguments)])
        capsys.readouterr()
        try:
            code = module.main()
        except SystemExit as ended:
            code = ended.code
        return Said(int(code or 0), *capsys.readouterr())

    return enter


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(2)
    backbone = build_encoder(CONFIG)
    heads = {"masking": MaskedLMHead(backbone), "order": ClassHead(8, 3, pooled=True)}
    net = Model(backbone, heads, {name: name for name in heads})
    info = WeightsInfo(backbone=CONFIG, task_ids={"masking": 0, "order": 1})
    save_weights(net, tmp_path / "source", info, tokenizer=WORDS)
    return tmp_path / "source"


def test_convert_reports_every_tensor(enter: Enter, source: Path, tmp_path: Path) -> None:
    said = enter("convert", source, tmp_path / "hf", *TO_HF)
    assert (said.code, said.err) == (0, "")
    lines = said.out.splitlines()
    assert any(line.startswith("mapped\tbackbone.layers.*.qkv.weight\t") for line in lines)
    assert any(line.startswith("skipped\theads.order.out") for line in lines)
    assert any("3 rows of the token embeddings have no token" in line for line in lines)
    assert lines[-2].startswith("palm_ds weights -> huggingface: ")
    assert lines[-1].startswith("checked: largest difference ")


def test_convert_in_json(enter: Enter, source: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.write_text("a b c\n\nd e f g h\n")
    options = [*TO_HF, "--family=bert", "--task=order", "--dtype=bf16", "--json"]
    said = enter("convert", source, tmp_path / "hf", *options, "--texts", texts)
    record = json.loads(said.out)
    assert record["parity"]["passed"] and record["parity"]["tolerance"] == 0.05
    assert [each["transform"] for each in record["mapped"] if "task" in each["transform"]]
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "bert"
    assert "onnx" not in record


def test_an_unchecked_conversion_is_labeled(enter: Enter, source: Path, tmp_path: Path) -> None:
    said = enter("convert", source, tmp_path / "out", "--unchecked")
    assert said.out.splitlines()[-1] == "checked: not at all"


def test_verify_distinguishes_equal_and_different_models(
    enter: Enter, source: Path, tmp_path: Path
) -> None:
    enter("convert", source, tmp_path / "hf", *TO_HF)
    said = enter("verify", source, tmp_path / "hf")
    assert said.code == 0 and said.out.splitlines()[-1].startswith("the same: largest difference")
    assert "real\thead masking\t" in said.out
    state = load_file(tmp_path / "hf/model.safetensors")
    state["bert.encoder.layer.0.output.dense.bias"][0] += 0.5
    save_file(state, tmp_path / "hf/model.safetensors", {"format": "pt"})
    said = enter("verify", source, tmp_path / "hf")
    assert said.code == 1 and said.out.splitlines()[-1].startswith("NOT the same")
    assert enter("verify", source, tmp_path / "hf", "--tolerance", 9).code == 0
    assert json.loads(enter("verify", source, tmp_path / "hf", "--json").out)["passed"] is False


def test_show_writes_nothing(enter: Enter, source: Path, tmp_path: Path) -> None:
    said = enter("show", source)
    assert said.code == 0 and "heads: masking (masked words), order (3 classes of whole" in said.out
    assert "tasks: {'masking': 0, 'order': 1}" in said.out and "eps 1e-05" in said.out
    record = json.loads(enter("show", source, "--json").out)
    assert record["tensors"]["backbone.word.weight"]["shape"] == [16, 8]
    assert record["heads"]["order"]["classes"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


class Other(Head):
    """A head that no other program knows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Linear(8, 1)


def test_show_names_every_head(enter: Enter, tmp_path: Path) -> None:
    backbone = build_encoder(CONFIG)
    heads = {"masking": MaskedLMHead(backbone), "other": Other()}
    net = Model(backbone, heads, {name: name for name in heads})
    save_weights(net, tmp_path / "source", WeightsInfo(backbone=CONFIG))
    out = enter("show", tmp_path / "source").out
    assert "heads: masking (masked words), other (for palm_ds alone)" in out
    assert "None" not in out


def words_only(config: EncoderConfig) -> Model:
    backbone = build_encoder(config)
    return Model(backbone, {"words": MaskedLMHead(backbone)}, {"words": "words"})


def cut(source: Path) -> None:
    file = source / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:100])


MISTAKES: dict[str, tuple[str, list[str], str]] = {
    "nothing there": ("convert", ["{0}/none", "{0}/out"], "none: no such file or folder"),
    "nothing known": ("convert", ["{0}", "{0}/out"], "not a checkpoint of a known format"),
    "target there": ("convert", ["{0}/source", "{0}/source"], "already exists"),
    "target in a file": ("convert", ["{0}/source", "{0}/source/weights.json/x"], "is not a folder"),
    "no such format": ("convert", ["{0}/source", "{0}/out", "--to=paddl"], 'did you mean "paddle"'),
    "no such option": ("convert", ["{0}/source", "{0}/out", "--config={0}"], "no option 'config'"),
    "no texts": ("convert", ["{0}/source", "{0}/out", "--texts={0}/none"], "cannot be read"),
    "no config": ("show", ["{0}/source", "--config={0}"], "no option 'config'"),
    "no tokenizer": (
        "convert",
        ["{0}/source", "{0}/out", "--tokenizer={0}/none"],
        "none: no such file or folder",
    ),
    "strict": ("convert", ["{0}/source", "{0}/out", "--to=huggingface", "--strict"], "strict: "),
    "another shape": ("verify", ["{0}/source", "{0}/other"], "has hidden_size 4, but"),
    "one is none": ("verify", ["{0}/source", "{0}/none"], "no such file or folder"),
    "tolerance": ("verify", ["{0}/source", "{0}/other", "--tolerance=-1"], "at least 0"),
    "any tolerance": ("verify", ["{0}/source", "{0}/other", "--tolerance=inf"], "at least 0"),
    **{
        f"eps {eps}": ("convert", ["{0}/source", "{0}/out", f"--eps={eps}"], "eps: expected a numb")
        for eps in ("inf", "nan", "-1", "0", "2")
    },
    **{
        f"size {size}": ("convert", ["{0}/source", "{0}/out", f"--shard_size={size}"], "shard_size")
        for size in ("nan", "inf", "9" * 400 + "GB", "0.0000001", "-1GB", "0")
    },
    "a huge multiple": (
        "edit",
        ["{0}/source", "{0}/out", "--multiple=1000000000"],
        "multiple: must be from 1 to 65,536",
    ),
    "too many positions": (
        "edit",
        ["{0}/source", "{0}/out", "--positions=1000000000"],
        "positions: must be from 1 to 131,072",
    ),
    "a huge seed": (
        "edit",
        ["{0}/source", "{0}/out", "--multiple=8", f"--seed={2**70}"],
        "seed: expected a number below 4,611,686",
    ),
    "a name too long": ("show", ["{0}/" + "x" * 300], f"{'x' * 300}: "),  # too long, or absent
    "show nothing": ("show", ["{0}/none"], "no such file or folder"),
    "shown a file": (
        "show",
        ["{0}/source/tokenizer/vocab.txt"],
        "not a checkpoint of a known format",
    ),
    "a damaged one": ("show", ["{0}/cut"], "cannot be read as safetensors"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_end_with_one_line_and_code_2(
    name: str, enter: Enter, source: Path, tmp_path: Path
) -> None:
    other = EncoderConfig(
        vocab_size=16, hidden_size=4, num_layers=1, num_heads=1, max_positions=16, task_types=0
    )
    for folder in ("other", "cut"):
        save_weights(words_only(other), tmp_path / folder, WeightsInfo(backbone=other))
    cut(tmp_path / "cut")
    command, arguments, message = MISTAKES[name]
    said = enter(command, *(each.format(tmp_path) for each in arguments))
    assert said.code == 2 and said.out == ""
    assert said.err.startswith("error: ") and said.err.count("\n") == 1 and message in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "other", "source"]
