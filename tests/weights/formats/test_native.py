"""palm_ds folders and checkpoints are opened by name; the written bytes do not depend on order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from palm_ds.common.errors import UserError
from palm_ds.common.json_files import SEAL, write_sealed_json
from palm_ds.model.distillation.distillation import Distillation
from palm_ds.model.distillation.settings import EmbeddingsSettings, LogitsSettings, TeacherSettings
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.crf import CRFHead
from palm_ds.model.heads.heads import ClassHead, Head, MaskedLMHead
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.checkpoint.checkpoint import FileManifest, Layout
from palm_ds.runtime.checkpoint.shard_files import ParamShard, write_shards
from palm_ds.runtime.processes.process_group import SINGLE_PROCESS
from palm_ds.text.tokenizer import wordpiece
from palm_ds.train.setup.extend import ModelSignature
from palm_ds.weights.formats import native
from palm_ds.weights.formats.contents import OPTIMIZER
from palm_ds.weights.formats.weights_info import INFO, WeightsInfo
from palm_ds.weights.weights_folder import save_weights
from tests.helpers.reseal import reseal
from tests.helpers.small_configs import TINY, letters
from tests.helpers.write_checkpoint import write_checkpoint

MOMENTS = ("exp_avg", "exp_avg_sq")
CONFIG = TINY
WORDS = letters("f")
LAYOUTS = [(stage, world) for stage in (0, 1, 2, 3) for world in (1, 2, 3)]


def model(seed: int = 1) -> Model:
    torch.manual_seed(seed)
    backbone = build_encoder(CONFIG)
    heads = {
        "masking": MaskedLMHead(backbone),
        "distance": ClassHead(8, 3, pooled=True),
        "capital": ClassHead(8, 2),
        "slots": CRFHead(8, 4),
    }
    return Model(backbone, heads, {name: name for name in heads})


def cut(net: Model, stage: int, world: int, rank: int) -> Iterator[ParamShard]:
    """What a process holds, as ZeRO cuts it: whole parameters, one range of all of them laid end
    to end, or a range of each."""
    total = sum(p.numel() for p in net.parameters())
    begun = 0
    for number, (name, parameter) in enumerate(net.named_parameters()):
        flat, size = parameter.detach().view(-1), parameter.numel()
        if stage == 0:
            low, high = (0, size) if number % world == rank else (0, 0)
        elif stage == 3:
            share = -(-size // world)
            low, high = min(rank * share, size), min((rank + 1) * share, size)
        else:
            share = -(-total // world)
            low = min(max(rank * share - begun, 0), size)
            high = min(max((rank + 1) * share - begun, 0), size)
        begun += size
        if low < high:
            moments = {kind: torch.full((high - low,), 0.5) for kind in MOMENTS}
            yield ParamShard(name, low, {"weight": flat[low:high], **moments}, {})


def signature(net: Model) -> ModelSignature:
    return ModelSignature(
        backbone=CONFIG,
        task_ids={"masking": 0, "distance": 2},
        tokenizer=WORDS.fingerprint,
        token_heads=("capital",),
        shapes={name: tuple(p.shape) for name, p in net.named_parameters()},
    )


def save(
    folder: Path,
    net: Model,
    stage: int = 1,
    world: int = 1,
    step: int = 7,
    state: dict[str, Any] | None = None,
) -> Path:
    """A checkpoint as written by `world` processes under a ZeRO stage."""

    def write(partial_folder: Path, written: FileManifest) -> None:
        for rank in range(world):
            write_shards(
                cut(net, stage, world, rank),
                f"process_{rank:05}",
                lambda name, make: written.write(partial_folder / name, make),
            )

    return write_checkpoint(
        folder,
        step,
        write=write,
        layout=Layout(world=world, stage=stage, precision="fp32"),
        parameters={name: step for name, _ in net.named_parameters()},
        engine={},
        state={"signature": signature(net).record()} if state is None else state,
        group=SINGLE_PROCESS,
        keep=3,
    )


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def written(source: Path, target: Path, tokenizer: Path | None = None) -> dict[str, bytes]:
    target.mkdir()
    native.write(native.open_contents(source, tokenizer=tokenizer), target)
    return files(target)


def test_every_layout_gives_the_same_bytes(tmp_path: Path) -> None:
    net, found = model(), {}
    for stage, world in LAYOUTS:
        step = save(tmp_path / f"{stage}_{world}", net, stage, world)
        found[stage, world] = written(step, tmp_path / f"out_{stage}_{world}")
    first = found.pop((0, 1))
    assert set(first) == {"weights.json", "weights.safetensors"}
    assert all(other == first for other in found.values())


class TwoLayers(Head):
    """Matrices of other widths than the encoder's, one of them with three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(8, 3)
        self.out = nn.Bilinear(3, 4, 2)


def test_a_custom_head_keeps_its_shapes(tmp_path: Path) -> None:
    net = Model(build_encoder(CONFIG), {"mine": TwoLayers()}, {"mine": "mine"})
    opened = native.open_contents(save(tmp_path, net, 3, 2))
    assert set(opened.entries) == set(net.state_dict())
    for name, entry in opened.entries.items():
        torch.testing.assert_close(entry.read(), net.state_dict()[name])


@pytest.mark.parametrize(("stage", "world"), [(1, 1), (2, 3), (3, 2)])
def test_a_checkpoint_contains_the_model(stage: int, world: int, tmp_path: Path) -> None:
    net = model()
    path = save(tmp_path, net, stage, world)
    assert native.recognizes(path) and not native.recognizes(tmp_path)
    contents = native.open_contents(path)
    assert contents.config == CONFIG
    assert contents.task_ids == {"masking": 0, "distance": 2}
    assert {n: (h.kind, h.classes, h.pooled) for n, h in contents.heads.items()} == {
        "masking": ("masked_words", 0, False),
        "distance": ("classes", 3, True),
        "capital": ("classes", 2, False),
        "slots": ("classes", 4, False),
    }
    assert contents.heads["slots"].transitions and not contents.heads["capital"].transitions
    state = net.state_dict()
    assert set(contents.entries) == set(state)
    for name, entry in contents.entries.items():
        assert entry.shape == tuple(state[name].shape)
        assert torch.equal(entry.read(), state[name])
    assert set(contents.skipped) == {f"{kind}/{name}" for kind in MOMENTS for name in state}
    assert set(contents.skipped.values()) == {OPTIMIZER}


@pytest.mark.parametrize("problem", ["", "the loss of masking is 9"])
def test_a_checkpoint_with_averages_opens_as_a_run_ends(problem: str, tmp_path: Path) -> None:
    """With the averaged weights, as evaluated, unless the check of its run found them worse;
    a frozen parameter has none."""
    net, average = model(), model(2)
    averages = {name: p.detach().view(-1) for name, p in average.named_parameters()}
    frozen = "backbone.word.weight"

    def write(folder: Path, out: FileManifest) -> None:
        for rank in range(2):
            shards = [
                ParamShard(
                    each.name,
                    each.start,
                    {**each.tensors, "average": averages[each.name][each.start :][: len(each)]}
                    if each.name != frozen
                    else {"weight": each.tensors["weight"]},
                    {},
                )
                for each in cut(net, 1, 2, rank)
            ]
            write_shards(shards, f"process_{rank}", lambda n, m: out.write(folder / n, m))

    path = write_checkpoint(
        tmp_path,
        7,
        write=write,
        layout=Layout(world=2, stage=1, precision="fp32"),
        parameters=dict.fromkeys(averages, 7),
        engine={},
        state={"signature": signature(net).record(), "recovery": {"averages": problem}},
        group=SINGLE_PROCESS,
    )
    contents = native.open_contents(path)
    taken = net if problem else average
    wanted = taken.state_dict() | {frozen: net.state_dict()[frozen]}
    assert all(torch.equal(entry.read(), wanted[n]) for n, entry in contents.entries.items())
    (note,) = contents.notes
    assert note.startswith("optimizer.ema: ") and note.endswith(problem)


def test_maps_to_a_teachers_width_are_left_out(tmp_path: Path) -> None:
    net, settings = model(), TeacherSettings(path="teacher", embeddings=EmbeddingsSettings())
    names = set(net.state_dict())
    wider = replace(CONFIG, hidden_size=2 * CONFIG.hidden_size)
    net.learn_from_teacher(LogitsSettings(), {}, Distillation(settings, net.backbone, wider))
    contents = native.open_contents(save(tmp_path, net))
    assert set(contents.entries) == names < set(net.state_dict())
    assert contents.skipped["distillation.embeddings.weight"] == "a map to a teacher's width"


def test_the_contents_of_a_weights_folder(tmp_path: Path) -> None:
    net = model()
    save_weights(net, tmp_path / "weights", info(), tokenizer=WORDS)
    contents = native.open_contents(tmp_path / "weights")
    assert contents.config == CONFIG and contents.export_task == "masking"
    assert contents.heads["distance"].pooled and not contents.heads["capital"].pooled
    assert contents.tokenizer == tmp_path / "weights/tokenizer"
    state = net.state_dict()
    assert {n: torch.equal(e.read(), state[n]) for n, e in contents.entries.items()} == (
        dict.fromkeys(state, True)
    )
    again = written(tmp_path / "weights", tmp_path / "again")
    assert native.open_contents(tmp_path / "again").head_of == contents.head_of
    assert written(tmp_path / "again", tmp_path / "third") == again


def info() -> WeightsInfo:
    return WeightsInfo(
        backbone=CONFIG,
        task_ids={"masking": 1},
        head_of={"masking": "masking"},
        export_task="masking",
        token_heads=("capital",),
    )


def test_a_damaged_checkpoint_is_not_opened(tmp_path: Path) -> None:
    bad = save(tmp_path / "checkpoints", model(2), step=9)
    flip(next(bad.glob("*.safetensors")))
    with pytest.raises(UserError, match="checksum"):
        native.open_contents(bad)


def test_a_checkpoints_tokenizer_is_the_one_it_was_trained_with(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", model())
    assert native.open_contents(path).tokenizer is None
    WORDS.save(tmp_path / "words")
    found = native.open_contents(path, tokenizer=tmp_path / "words")
    assert found.tokenizer == tmp_path / "words"
    other = wordpiece(["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "z"], lower=True)
    other.save(tmp_path / "other")
    with pytest.raises(UserError, match="a tokenizer other than"):
        native.open_contents(path, tokenizer=tmp_path / "other")


def test_a_checkpoint_knows_the_tokenizers_that_its_run_names(tmp_path: Path) -> None:
    """Of those only the one it was trained with."""
    path = save(tmp_path / "checkpoints", model())
    other = wordpiece(["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "z"], lower=True)
    other.save(tmp_path / "other")
    (tmp_path / "corpus").mkdir()
    WORDS.save(tmp_path / "corpus/tokenizer")
    sources = {"a": {"tokenizer": str(tmp_path / "other")}, "b": {"corpus": "c", "tokenizer": ""}}
    recipe = {"sources": sources, "init_from": str(tmp_path / "gone")}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    assert native.open_contents(path).tokenizer is None
    corpora = {str(tmp_path / "corpus"): "its fingerprint"}
    (tmp_path / "recipe.yaml").write_text(json.dumps({**recipe, "corpora": corpora}))
    assert native.open_contents(path).tokenizer == tmp_path / "corpus/tokenizer"


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def change(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text())
    for key, value in changes.items():
        content[key] = value
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def shorten_all(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        shorten(file)


def stateless(path: Path) -> None:
    content = json.loads((path / "manifest.json").read_text())
    del content[SEAL]
    write_sealed_json(path / "manifest.json", {**content, "state": {}})


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (shorten_all, "bytes instead of"),
    "of no encoder": (stateless, "does not describe the encoder"),
    "manifest no JSON": (lambda p: (p / "manifest.json").write_text("{"), "is damaged"),
    "of another version": (lambda p: change(p / "manifest.json", format=2), "format 2"),
    "a file gone": (lambda p: next(p.glob("*.safetensors")).unlink(), "is missing"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoints_are_one_line(name: str, tmp_path: Path) -> None:
    breaks, message = BROKEN[name]
    path = save(tmp_path, model(), 3, 2)
    breaks(path)
    with pytest.raises(UserError, match=message) as raised:
        native.open_contents(path)
    assert "\n" not in str(raised.value) and "step_00000007" in str(raised.value)


BROKEN_WEIGHTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "of another version": (lambda p: change(p / INFO, format=9), "format 9"),
    "without its numbers": (lambda p: change(p / INFO, backbone=None), "no `backbone`"),
}


@pytest.mark.parametrize("name", BROKEN_WEIGHTS)
def test_broken_folders_of_weights_are_one_line(name: str, tmp_path: Path) -> None:
    breaks, message = BROKEN_WEIGHTS[name]
    save_weights(model(), tmp_path / "weights", info())
    breaks(tmp_path / "weights")
    with pytest.raises(UserError, match=message) as raised:
        native.open_contents(tmp_path / "weights")
    assert "\n" not in str(raised.value) and str(tmp_path) in str(raised.value)


def test_missing_values_are_detected(tmp_path: Path) -> None:
    """A process that wrote nothing, and a manifest that does not know."""
    net = model()

    def write(folder: Path, out: FileManifest) -> None:
        part = partial(cut, net, 3, 2)
        write_shards(part(0), "process_0", lambda n, m: out.write(folder / n, m))

    record = ModelSignature(backbone=CONFIG, task_ids={}, tokenizer="").record()
    path = write_checkpoint(
        tmp_path,
        1,
        write=write,
        layout=Layout(world=2, stage=3, precision="fp32"),
        parameters={},
        engine={},
        state={"signature": record},
        group=SINGLE_PROCESS,
        keep=1,
    )
    with pytest.raises(UserError, match="incomplete|the configuration expects|are missing"):
        native.open_contents(path)


def test_the_vocabulary_size_may_come_from_the_embeddings(tmp_path: Path) -> None:
    save_weights(model(), tmp_path / "weights", replace(info(), backbone=CONFIG))
    change(tmp_path / "weights" / INFO, backbone={**vars(CONFIG), "vocab_size": None})
    reseal(tmp_path / "weights")
    assert native.open_contents(tmp_path / "weights").config.vocab_size == 11
