"""What training does with an encoder works with every transformer, through the interface alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from palm_ds.common.config import parse
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.distillation.distillation import Distillation
from palm_ds.model.distillation.settings import TeacherSettings
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.encoder.states import recorded
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from palm_ds.model.lora import LoraSettings, add_lora, merged
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.optimizer.muon import stacked_rows
from palm_ds.runtime.optimizer.param_groups import freeze, is_hidden_matrix, param_lr_scales
from palm_ds.weights.convert.embeddings import pad_vocab
from palm_ds.weights.formats.weights_info import WeightsInfo
from palm_ds.weights.model_folder import open_model
from palm_ds.weights.starting_weights import expand_embeddings
from palm_ds.weights.weights_folder import load_weights, save_weights
from tests.helpers.small_encoders import TRANSFORMERS, small_transformer
from tests.model.encoder.test_transformer import texts

TASKS = {"words": "words", "kind": "kind"}
RATES = {"dropout": 0.1, "attention_dropout": 0.1}
EVERY = pytest.mark.parametrize("kind", list(TRANSFORMERS))
UNSHARED = pytest.mark.parametrize("kind", [x for x in TRANSFORMERS if x != "albert"])
"""Those whose layers have weights of their own."""


def model_of(config: EncoderConfig, *, recompute: bool = False, seed: int = 1) -> Model:
    torch.manual_seed(seed)
    kernels = Kernels(attention="plain", dropout="counter")
    encoder = build_encoder(config, kernels, recompute=recompute)
    heads = {"words": MaskedLMHead(encoder), "kind": ClassHead(32, 3, pooled=True)}
    return Model(encoder, heads, TASKS)


def batch_of() -> Batch:
    """Two texts in a row, one in another; masked words and a class of each text."""
    first, second, third = texts((9, 5, 11))
    batch = Batch.from_rows([[first, second], [third]], length=16, pad=0)
    batch.labels["words"] = torch.tensor([2, 11, 20]), torch.tensor([7, 9, 3])
    batch.labels["kind"] = torch.tensor([0, 9, 16]), torch.tensor([0, 2, 1])
    return replace(batch, dropout_key=5)


def loss_of(model: Model) -> torch.Tensor:
    outputs = model(batch_of()).values()
    return torch.stack([each.loss_sum for each in outputs]).sum()


def gradients(model: Model) -> dict[str, torch.Tensor]:
    loss_of(model).backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(x, other[name]) for name, x in one.items()
    )


@EVERY
def test_recomputed_and_frozen_layers(kind: str) -> None:
    config = small_transformer(kind, **RATES)
    model = model_of(config)
    whole = gradients(model)
    assert whole.keys() == dict(model.named_parameters()).keys(), "each is used"
    assert equal(gradients(model_of(config, recompute=True)), whole)
    freeze(frozen := model_of(config), ["backbone.layers.0.*", "backbone.word.weight"])
    left = {x: y for x, y in whole.items() if not x.startswith("backbone.layers.0.")}
    del left["backbone.word.weight"]
    assert equal(gradients(frozen), left)


@UNSHARED
def test_rates_and_matrices_of_optimizers(kind: str) -> None:
    """Layer decay counts from the embeddings, of any kind, to the heads; Muon changes each matrix
    of a layer by itself."""
    config = small_transformer(kind)
    model, encoder = model_of(config), model_of(config).backbone
    parameters = dict(model.named_parameters())
    scales = param_lr_scales(list(parameters), 0.5, above=encoder.above_layers)
    above = ("heads.", "backbone.pooler.", "backbone.final_norm.")
    layers = {"backbone.layers.0.": 0.25, "backbone.layers.1.": 0.5}
    for name, scale in scales.items():
        of_layer = next((x for start, x in layers.items() if name.startswith(start)), 0.125)
        assert scale == (1 if name.startswith(above) else of_layer), name
    matrices = encoder.matrices(config)
    paths = [f"backbone.layers.{n}.{matrix.path}.weight" for n in range(2) for matrix in matrices]
    assert paths == [x for x, y in parameters.items() if is_hidden_matrix(x, y)]
    stacked = {matrix.path: matrix.stacked for matrix in matrices}
    width, inner, kv = 32, 48, 16 if kind == "eurobert" else 32
    heights = {"qkv": [width, kv, kv], "project": [width], "contract": [width]}
    for path in paths[:4]:
        rows = len(parameters[path])
        made = [inner] * (rows // inner) if ".expand." in path else heights[path.split(".")[-2]]
        assert stacked_rows(path, rows, stacked) == made and sum(made) == rows


@UNSHARED
def test_chosen_layers_more_words_and_a_task_embedding(kind: str, tmp_path: Path) -> None:
    large = small_transformer(kind, num_layers=4)
    source = model_of(large)
    save_weights(source, tmp_path / "large", WeightsInfo(backbone=large, head_of=TASKS))
    small = model_of(replace(large, num_layers=2), seed=2)
    report = load_weights(open_model(tmp_path / "large"), small, layers=[0, 2])
    assert not report.newly_initialized and not report.unused
    old = source.state_dict()
    for name, x in small.state_dict().items():
        assert torch.equal(x, old[name.replace("layers.1.", "layers.2.")]), name
    grown = pad_vocab(small.state_dict(), small.backbone.config, used=64, multiple=48)
    assert grown.config.vocab_size == 96
    larger = model_of(grown.config)
    larger.load_state_dict(grown.state)
    assert larger.heads["words"].logits(torch.zeros(1, 32)).shape == (1, 96)
    torch.testing.assert_close(larger.backbone(batch_of()), small.backbone(batch_of()))
    wanted = replace(large, task_types=3)
    _, tables, _ = expand_embeddings(large, old, wanted, tmp_path)
    with_tasks = model_of(wanted)
    with_tasks.load_state_dict({**old, **tables})
    torch.testing.assert_close(loss_of(with_tasks), loss_of(source))


@EVERY
def test_a_teacher_of_its_kind(kind: str) -> None:
    """An encoder teaches itself nothing, and a narrower one everything."""
    parts: Any = {"hidden_states": {}, "relations": {"pairs": ["qk", "vv"]}, "embeddings": {}}
    settings = parse(TeacherSettings, {"path": "x", "attention": {}, **parts}, "teacher")
    config, batch = small_transformer(kind), batch_of()
    teacher = build_encoder(replace(config, num_layers=4)).eval()
    for student in (teacher, build_encoder(replace(config, hidden_size=24))):
        torch.manual_seed(0)
        losses = Distillation(settings, student, teacher.config)
        with recorded(teacher, losses.teacher) as its, torch.no_grad():
            teacher(batch)
        with recorded(student, losses.student) as mine:
            student(batch)
        found = losses(mine, its, batch)
        assert found.keys() == {*parts, "attention"}
        assert all((x < 1e-5) == (student is teacher) for x in found.values()), found
    torch.stack([*found.values()]).sum().backward()
    names = [name for name, x in student.named_parameters() if x.grad is None]
    assert all(name.startswith(student.above_layers) or ".1." in name for name in names), names


@EVERY
def test_lora(kind: str) -> None:
    """Nothing changes at first; what has been trained is merged into the same names."""
    config = small_transformer(kind, **RATES)
    plain, model = model_of(config).eval(), model_of(config)
    settings = LoraSettings(rank=2, targets="all", dropout=0.1)
    add_lora(model, settings, seed=1)
    torch.testing.assert_close(loss_of(model.eval()), loss_of(plain))
    optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.1)
    for _ in range(2):
        loss_of(model.train()).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = plain.state_dict()
    state = merged(model.state_dict(), settings)
    changed = {x.split(".")[-2] for x in state if not torch.equal(state[x], before[x])}
    assert {"qkv", "project", "expand", "contract"} < changed and "word" not in changed
    plain.load_state_dict(dict(state))
    torch.testing.assert_close(loss_of(plain), loss_of(model.eval()))
