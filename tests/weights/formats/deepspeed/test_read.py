"""DeepSpeed's own shards without DeepSpeed: genuine ones if available, and others made here."""

from __future__ import annotations

import json
import shutil
import sys
import types
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.multi_task_model import Model
from palm_ds.weights.formats.contents import OPTIMIZER
from palm_ds.weights.formats.deepspeed import read as deepspeed
from palm_ds.weights.formats.deepspeed import zero_shards as deepspeed_files
from palm_ds.weights.formats.open import open_checkpoint
from tests.helpers.hf_families import ALBERT
from tests.weights.formats.hf_models import make

CONFIG = EncoderConfig(
    vocab_size=11,
    hidden_size=8,
    num_layers=1,
    num_heads=2,
    intermediate_size=12,
    max_positions=10,
    token_types=2,
    task_types=3,
)
SECRET = "backbone.norm.bias"  # the frozen parameter of the shards made here
GENUINE = ("deepspeed_z1_bf16_wrap_frozen", "deepspeed_z3_fp32")


def model() -> Model:
    torch.manual_seed(3)
    backbone = build_encoder(CONFIG)
    heads = {"words": MaskedLMHead(backbone), "pairs": ClassHead(8, 3, pooled=True)}
    return Model(backbone, heads, {name: name for name in heads})


def groups(net: Model) -> list[dict[str, torch.Tensor]]:
    """Two groups of an optimizer, without the frozen parameter."""
    named = {n: p.detach() for n, p in net.named_parameters() if n != SECRET}
    matrices = {n: x for n, x in named.items() if x.ndim > 1}
    return [matrices, {n: x for n, x in named.items() if n not in matrices}]


def flat(tensors: dict[str, torch.Tensor], multiple: int) -> torch.Tensor:
    line = torch.cat([x.reshape(-1) for x in tensors.values()])
    return torch.cat([line, torch.zeros(-len(line) % multiple)])


def shards(
    folder: Path, net: Model, stage: int, world: int, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """DeepSpeed's layout, with the module's own tensors in half precision."""
    tag = folder / "global_step3"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    (folder / "weights.json").write_text(json.dumps({"format": 1, "backbone": asdict(CONFIG)}))
    module = {n: x.to(dtype) for n, x in net.state_dict().items()}
    parts, shared = groups(net), {"heads.words.tied_words": "backbone.word.weight"}
    state: dict[str, Any] = {
        "module": {**module, "steps": torch.arange(3)},
        "buffer_names": ["steps"],
        "param_shapes": [{n: x.shape for n, x in part.items()} for part in parts],
        "shared_params": shared,
        "frozen_param_shapes": None,
        "dp_world_size": world,
        "ds_config": {"zero_optimization": {"stage": stage}},
    }
    moments = {"state": {}, "param_groups": []}
    if stage == 0:
        lines = [[x.clone() for x in part.values()] for part in parts]
        state |= {"optimizer": {"fp32_groups": lines, **moments}, "param_shapes": None}
        state["shared_params"] = None
        torch.save(state, tag / "mp_rank_00_model_states.pt")
        return folder
    secret = net.state_dict()[SECRET].to(dtype)
    for rank in range(world):
        if stage == 3:
            key, line = deepspeed_files._SHARES, [_shares(part, rank, world) for part in parts]
            state["module"] = {n: torch.empty(0) for n in module}
            state["frozen_param_shapes"] = {SECRET: secret.shape}
            share = -(-len(secret) // world)
            state["frozen_param_fragments"] = {SECRET: secret[rank * share : (rank + 1) * share]}
            torch.save(state, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        else:
            key, line = deepspeed_files._FLAT, [_range(part, rank, world) for part in parts]
        optimizer = {key: [x.clone() for x in line], "zero_stage": stage, **moments}
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, tag / name)
    if stage != 3:
        torch.save(state, tag / "mp_rank_00_model_states.pt")
    return folder


def _range(part: dict[str, torch.Tensor], rank: int, world: int) -> torch.Tensor:
    return flat(part, 2 * world).chunk(world)[rank]


def _shares(part: dict[str, torch.Tensor], rank: int, world: int) -> torch.Tensor:
    padded = [flat({"": x}, world).chunk(world)[rank] for x in part.values()]
    return torch.cat(padded)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_gives_the_fp32_weights(stage: int, world: int, tmp_path: Path) -> None:
    net = model()
    path = shards(tmp_path / "run", net, stage, world)
    assert deepspeed.recognizes(path) and deepspeed.recognizes(path / "global_step3")
    contents = deepspeed.open_contents(path)
    state = net.state_dict()
    assert set(contents.entries) == set(state)
    for name, entry in contents.entries.items():
        wanted = state[name].to(torch.bfloat16) if name == SECRET else state[name]
        assert torch.equal(entry.read().float(), wanted.float()), name
    assert {n: h.kind for n, h in contents.heads.items()} == {
        "words": "masked_words",
        "pairs": "classes",
    }
    assert contents.skipped["steps"] == "a buffer"
    assert contents.skipped["optimizer_state_dict"] == OPTIMIZER


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_shards_are_reopened_after_a_number_of_bytes(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that their weights never stay in memory as mapped pages."""
    monkeypatch.setattr(deepspeed_files, "_MAPPED_BYTES", 200)
    net = model()
    dtype = torch.float32 if stage else torch.bfloat16  # a search finds what these fp32 ones are
    path = shards(tmp_path / "run", net, stage, 2, dtype)
    opened: list[Path] = []
    load = deepspeed_files._load
    monkeypatch.setattr(deepspeed_files, "_load", lambda file: (opened.append(file), load(file))[1])
    contents = deepspeed.open_contents(path)
    once, state = len(opened), net.state_dict()
    sizes, halves = [], 0
    for name, entry in contents.entries.items():
        values = entry.read()
        assert torch.equal(values, state[name].to(values.dtype)), name
        sizes.append(values.nbytes)
        halves += values.dtype == torch.bfloat16
    assert halves == (not stage)  # the frozen one
    wanted, mapped = 1, 0 if stage else 200  # the search has read all
    for size in sizes:
        if mapped >= 200:
            wanted, mapped = wanted + 1, 0
        mapped += size
    assert len(opened) == wanted * once and wanted > 5
    shutil.rmtree(path / "global_step3")
    with pytest.raises(UserError, match="global_step3: its shards have been deleted"):
        for _ in range(2):
            contents.entries["backbone.word.weight"].read()


@pytest.mark.parametrize("tag", ["", "global_step3"])
def test_shards_with_a_weights_json_are_not_a_weights_folder(tag: str, tmp_path: Path) -> None:
    contents = open_checkpoint(shards(tmp_path / "run", model(), 1, 2) / tag)
    assert contents.format == "DeepSpeed ZeRO 1, palm_ds"


def test_missing_fp32_weights_are_reported(tmp_path: Path) -> None:
    contents = deepspeed.open_contents(shards(tmp_path / "run", model(), 0, 1))
    assert contents.notes == (
        "1 parameters in half precision: the shards have no fp32 weights for them",
    )


def test_tied_parameters_of_stage_0_have_one_fp32_copy(tmp_path: Path) -> None:
    """DeepSpeed does not list them there: the file has one storage under two names."""
    net = make("bert", "ForPreTraining")
    fp32 = [[parameter.detach().clone() for parameter in net.parameters()]]
    net.to(torch.bfloat16)
    state = {"module": net.state_dict(), "shared_params": None, "optimizer": {"fp32_groups": fp32}}
    (tmp_path / "step").mkdir()
    torch.save(state, tmp_path / "step/mp_rank_00_model_states.pt")
    net.config.save_pretrained(tmp_path / "step")
    contents = deepspeed.open_contents(tmp_path / "step")
    assert contents.skipped["cls.predictions.decoder.weight"] == (
        "a copy of bert.embeddings.word_embeddings.weight"
    )
    assert torch.equal(contents.entries["backbone.word.weight"].read(), fp32[0][0])
    assert contents.notes == ()


def test_rows_of_transformers_are_in_our_order(tmp_path: Path) -> None:
    net = ALBERT.build("ForPreTraining")
    (tmp_path / "step").mkdir()
    state = {"module": net.state_dict(), "shared_params": None, "optimizer": None}
    torch.save(state, tmp_path / "step/mp_rank_00_model_states.pt")
    net.config.save_pretrained(tmp_path / "step")
    contents = deepspeed.open_contents(tmp_path / "step")
    found = contents.entries["heads.sentence_order.out.weight"].read()
    assert torch.equal(found, net.sop_classifier.classifier.weight.flip(0))


@pytest.mark.parametrize("ending", ["ForSequenceClassification", "ForTokenClassification"])
def test_what_a_classifier_s_scores_mean_is_in_its_config(ending: str, tmp_path: Path) -> None:
    named = {0: "bad", 1: "good", 2: "so so"}
    problem = {"problem_type": "multi_label_classification", "bos_token_id": 7}
    net = make("bert", ending, id2label=named, **problem)
    (tmp_path / "step").mkdir()
    state = {"module": net.state_dict(), "shared_params": None, "optimizer": None}
    torch.save(state, tmp_path / "step/mp_rank_00_model_states.pt")
    net.config.save_pretrained(tmp_path / "step")
    contents = deepspeed.open_contents(tmp_path / "step")
    head = contents.heads["classifier"]
    assert head.outputs.labels == ("bad", "good", "so so")
    assert head.pooled == (ending == "ForSequenceClassification")
    assert head.outputs.problem_type == "multi_label_classification"
    assert contents.extras.config["bos_token_id"] == 7


@pytest.mark.parametrize("case", GENUINE)
def test_genuine_shards(case: str, shared: Path) -> None:
    folder = shared / "oracle" / case
    truth = np.load(folder / "weights.npz")
    found = deepspeed_files.open_shards(folder / "global_step3")
    assert set(found.entries) == set(truth.files)
    for name in truth.files:
        assert np.array_equal(found.entries[name].read().float().numpy(), truth[name]), name
    contents = deepspeed.open_contents(folder, config=folder / "cfg")
    assert set(contents.heads) == {"masked_words", "next_sentence"}
    assert contents.format.startswith(f"DeepSpeed ZeRO {3 if 'z3' in case else 1}")
    word = next(n for n in truth.files if n.endswith("word_embeddings.weight"))
    assert np.array_equal(contents.entries["backbone.word.weight"].read().numpy(), truth[word])


def test_deepspeed_is_not_imported(shared: Path) -> None:
    before = {name for name in sys.modules if name.split(".")[0] == "deepspeed"}
    deepspeed_files.open_shards(shared / "oracle" / GENUINE[0] / "global_step3")
    after = {name for name in sys.modules if name.split(".")[0] == "deepspeed"}
    assert before == after


def test_deepspeeds_own_classes_are_replaced(tmp_path: Path, monkeypatch) -> None:
    """A class with a name from genuine files is never instantiated."""
    path, name = shards(tmp_path / "run", model(), 1, 1), deepspeed_files.GENUINE[1]
    module = types.ModuleType(name.rpartition(".")[0])
    scaler = type("LossScaler", (), {"__module__": module.__name__})
    module.LossScaler = scaler  # type: ignore[attr-defined]
    with monkeypatch.context() as patched:
        pieces = module.__name__.split(".")
        for depth in range(1, len(pieces)):
            above = ".".join(pieces[:depth])
            patched.setitem(sys.modules, above, types.ModuleType(above))
        patched.setitem(sys.modules, module.__name__, module)
        edit(path, "optim", lambda x: x["optimizer_state_dict"].update(loss_scaler=scaler()))
    assert len(deepspeed.open_contents(path).entries) == len(model().state_dict())


# ---- broken and hostile ----


def edit(folder: Path, kind: str, change: Callable[[dict], object]) -> None:
    for file in folder.glob(f"*/*{kind}_states.pt"):
        state = torch.load(file, weights_only=True)
        change(state)
        torch.save(state, file)


class Calls:
    """What a hostile pickle calls."""

    def __reduce__(self) -> tuple:
        return print, ("harm",)


def first(folder: Path, kind: str) -> Path:
    return sorted(folder.glob(f"*/*{kind}_states.pt"))[0]


def hostile(folder: Path) -> None:
    torch.save({"optimizer_state_dict": Calls()}, first(folder, "optim"))


def lengthened(state: dict) -> None:
    shapes = state["param_shapes"][0]
    shapes["backbone.word.weight"] = torch.Size((999, 8))


def longer(state: dict) -> None:
    lines = state["optimizer_state_dict"]
    lines[deepspeed_files._FLAT] = [torch.cat([x, x]) for x in lines[deepspeed_files._FLAT]]


def renamed(state: dict) -> None:
    for shapes in (*state["param_shapes"], state["module"]):
        for name in list(shapes):
            shapes[f"tower.{name.replace('backbone.', 'body.')}"] = shapes.pop(name)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pickle that calls": (hostile, "asks for .*print, which files of weights do not"),
    "a share gone": (lambda p: first(p, "optim").unlink(), "optim_states file of rank 0"),
    "more values": (lambda p: edit(p, "optim", longer), "fp32 weights, but its shapes need"),
    "other shapes": (lambda p: edit(p, "model", lengthened), "its shapes need|fewer values than"),
    "no shapes": (
        lambda p: edit(p, "model", lambda x: x.pop("param_shapes")),
        "does not have the layout",
    ),
    "not tensors": (
        lambda p: edit(
            p,
            "optim",
            lambda x: x["optimizer_state_dict"].update({deepspeed_files._FLAT: [[1, 2], [3]]}),
        ),
        "expected a tensor",
    ),
    "a list": (lambda p: torch.save([1], first(p, "model")), "holds list"),
    "more processes": (lambda p: edit(p, "model", lambda x: x.update(dp_world_size=9)), "by 9"),
    "tensor parallel": (
        lambda p: shutil.copy(
            first(p, "model"), first(p, "model").parent / ("mp_rank_01_model_states.pt")
        ),
        "tensor-parallel",
    ),
    "no numbers": (lambda p: (p / "weights.json").unlink(), "give one with --config"),
    "a name that is no text": (
        lambda p: edit(p, "model", lambda x: x["param_shapes"][0].update({("a",): (0,)})),
        "not laid out|a parameter with the name tuple",
    ),
    "names of nobody": (lambda p: edit(p, "model", renamed), "neither a palm_ds model"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_shards_are_one_line(name: str, tmp_path: Path, capsys) -> None:
    breaks, message = BROKEN[name]
    path = shards(tmp_path / "run", model(), 1, 2)
    breaks(path)
    with pytest.raises(UserError, match=message) as raised:
        deepspeed.open_contents(path)
    assert "\n" not in str(raised.value) and str(tmp_path) in str(raised.value)
    assert "harm" not in capsys.readouterr().out


@pytest.mark.parametrize("tag", ["../elsewhere", "..", "", "gone", "/"])
def test_latest_names_a_folder_next_to_it(tag: str, tmp_path: Path) -> None:
    path = shards(tmp_path / "run", model(), 1, 1)
    shutil.copytree(path / "global_step3", tmp_path / "elsewhere")
    (path / "latest").write_text(tag)
    assert not deepspeed.recognizes(path)
    with pytest.raises(UserError, match="not DeepSpeed shards"):
        deepspeed.open_contents(path)


def test_a_skipped_value_with_tensors_counts_as_lost(tmp_path: Path) -> None:
    path = shards(tmp_path / "run", model(), 2, 1)
    edit(path, "model", lambda x: x.update(epoch=3, average=[{"w": torch.ones(1)}]))
    skipped = deepspeed.open_contents(path).skipped
    assert skipped["epoch"].startswith(OPTIMIZER) and "contains tensors" in skipped["average"]


class GetAttr:
    """Pickled as getattr(owner, name), as Python 3.11.0 to 3.11.3 write an enum's member."""

    def __init__(self, owner: object, name: object):
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple:
        return getattr, (self.owner, self.name)


@pytest.fixture
def zero_stages() -> type:
    from deepspeed.runtime.zero.config import ZeroStageEnum

    return ZeroStageEnum


def test_enums_pickled_by_early_python_3_11(tmp_path: Path, zero_stages) -> None:
    path = shards(tmp_path / "run", model(), 1, 1)
    expected = {n: e.read().clone() for n, e in deepspeed.open_contents(path).entries.items()}
    stages = [GetAttr(zero_stages, name) for name in zero_stages.__members__ if name[:3] != "max"]
    edit(path, "optim", lambda x: x["optimizer_state_dict"].update(zero_stage=stages))
    found = deepspeed.open_contents(path).entries
    assert set(found) == set(expected)
    assert all(torch.equal(found[name].read(), value) for name, value in expected.items())


@pytest.mark.parametrize("name", ["__class__", "mro", "max", 3, "weights\x1b[2J"])
def test_only_stages_of_zero_are_looked_up(tmp_path: Path, zero_stages, name: object) -> None:
    path = shards(tmp_path / "run", model(), 1, 1)
    asked = GetAttr(zero_stages, name)
    edit(path, "optim", lambda x: x["optimizer_state_dict"].update(zero_stage=asked))
    with pytest.raises(UserError, match="is not a ZeRO stage; refused") as error:
        deepspeed.open_contents(path)
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize("owner", [torch.Tensor, torch.float32, "text"])
def test_attributes_of_anything_else_are_refused(tmp_path: Path, owner: object) -> None:
    path = shards(tmp_path / "run", model(), 1, 1)
    asked = GetAttr(owner, "weights")
    edit(path, "optim", lambda x: x["optimizer_state_dict"].update(zero_stage=asked))
    with pytest.raises(UserError, match="asks for an attribute of something not an enum"):
        deepspeed.open_contents(path)
