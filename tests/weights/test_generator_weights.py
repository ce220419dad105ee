"""Published pairs of generator and discriminator go in and out of a run, as transformers computes
them; pairs that do not fit are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from palm_ds.common.errors import UserError
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.encoder.shared_embeddings import EmbeddingSharing
from palm_ds.model.heads.replaced_tokens import Generator, ReplacedTokenHead
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.train.recipe.recipe import make_recipe
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.train import train
from palm_ds.weights.generator_weights import load_generator
from palm_ds.weights.model_folder import open_model
from tests.helpers.hf_families import DEBERTA, ELECTRA
from tests.helpers.small_corpus import write_small_corpus

TASK = "replaced_token_detection"
SHARED = {"embedding_sharing": "shared"}
SMALL = {"hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 36}
IDS = torch.tensor([[2, *range(5, 25), 3]])


def electra_pair(folder: Path, *, shared: bool = True) -> tuple[Path, Path]:
    """A discriminator and a generator of half its width, with the same embeddings or others."""
    large, small = ELECTRA.build("ForPreTraining"), ELECTRA.build("ForMaskedLM", **SMALL)
    embeddings = large.electra.embeddings.state_dict()
    if not shared:
        embeddings = {name: x + torch.randn_like(x) for name, x in embeddings.items()}
        embeddings["position_ids"] = large.electra.embeddings.position_ids
    small.electra.embeddings.load_state_dict(embeddings, strict=False)
    large.save_pretrained(folder / "large")
    small.save_pretrained(folder / "small")
    return folder / "large", folder / "small"


def deberta_pair(folder: Path) -> tuple[Path, Path]:
    """Both as Microsoft names them; a generator has the table of its discriminator's base."""
    large, small = folder / "large", folder / "small"
    DEBERTA.build("Model").save_pretrained(large)
    detecting = {"dense": (48, 48), "LayerNorm": (48,), "classifier": (1, 48)}
    state = {f"deberta.{name}": x for name, x in load_file(large / "model.safetensors").items()}
    for part, shape in detecting.items():
        state[f"mask_predictions.{part}.weight"] = torch.randn(shape)
        state[f"mask_predictions.{part}.bias"] = torch.randn(shape[0])
    save_file(state, large / "model.safetensors", {"format": "pt"})
    model = DEBERTA.build("ForMaskedLM", num_hidden_layers=2)
    with torch.no_grad():
        model.deberta.embeddings.word_embeddings.weight.add_(0.5)
    model.save_pretrained(small)
    return large, small


def settings(
    folder: Path, init_from: Path, tasks: dict[str, Any], stages: list[dict[str, int]]
) -> dict[str, Any]:
    """A recipe whose steps change nothing that fp32 keeps."""
    return {
        "init_from": str(init_from),
        "length": 64,
        "batch": "2 rows",
        "optimizer": {"lr": 1e-20, "weight_decay": 0.0},
        "schedule": {"kind": "constant"},
        "sources": {"text": {"corpus": str(folder / "corpus")}},
        "held_out": 0.0,
        "tasks": tasks,
        "stages": stages,
        "export_onnx": [],
    }


@pytest.mark.parametrize("kind", ["electra", "deberta"])
def test_a_pair_goes_in_and_out(tmp_path: Path, kind: str) -> None:
    """Through a run whose steps change nothing that fp32 keeps."""
    large, small = electra_pair(tmp_path) if kind == "electra" else deberta_pair(tmp_path)
    sharing = "shared" if kind == "electra" else "gradient_disentangled"
    write_small_corpus(tmp_path / "corpus", words=59, documents=12)
    task = {"source": "text", "embedding_sharing": sharing, "generator": {"path": str(small)}}
    recipe = make_recipe(settings(tmp_path, large, {TASK: task}, [{TASK: 2}]))
    ds_config = make_ds_config({"zero_optimization": {"stage": 0}})
    run = tmp_path / "run"
    assert train(RunSpec(recipe=recipe, ds_config=ds_config, folder=run)) == 0
    for source, folder in ((large, "hf"), (small, "generator")):
        before, after = (load_file(x / "model.safetensors") for x in (source, run / folder))
        assert before.keys() == after.keys()
        for name, values in before.items():
            torch.testing.assert_close(after[name], values, atol=1e-6, rtol=0)
    opened: Any = open_model(run).recipe["tasks"][TASK]["generator"]
    assert (opened["num_layers"], opened["hidden_size"]) == (
        (3, 24) if kind == "electra" else (2, 48)
    )
    (small / "model.safetensors").unlink()  # the weights do without the folder
    _, report = TrainedModel.open(run)._loaded
    assert not [name for name in report.newly_initialized if ".pooler." not in name]
    if kind == "electra":
        model: Any = transformers.ElectraForPreTraining.from_pretrained(run / "hf")
        words: Any = transformers.ElectraForMaskedLM.from_pretrained(run / "generator")
        theirs: Any = transformers.ElectraForPreTraining.from_pretrained(large)
        torch.testing.assert_close(model.eval()(IDS).logits, theirs.eval()(IDS).logits)
        assert words.eval()(IDS).logits.shape == (1, 22, 64)


def test_a_generator_that_a_task_adds_to_a_run_starts_from_its_folder(tmp_path: Path) -> None:
    """It was newly initialized, without a line about it."""
    large, small = electra_pair(tmp_path, shared=False)
    write_small_corpus(tmp_path / "corpus", words=59, documents=12)
    masks = {"knowledge_masking": {"source": "text"}}
    values = settings(tmp_path, large, masks, [{"knowledge_masking": 1}])

    def run(name: str, values: dict[str, Any]) -> Path:
        how = make_ds_config({"zero_optimization": {"stage": 0}})
        spec = RunSpec(recipe=make_recipe(values), ds_config=how, folder=tmp_path / name)
        assert train(spec) == 0
        return spec.folder

    first = run("first", values)
    task = {"source": "text", "embedding_sharing": "none", "generator": {"path": str(small)}}
    more = {"backbone": open_model(first).recipe["backbone"], "extend": str(first)}
    more |= {"init_from": "", "stages": [{TASK: 1}]}
    with pytest.raises(UserError, match=f"tasks.{TASK}.generator.path: .* set `embedding_sharing"):
        run("shared", {**values, **more, "tasks": {**masks, TASK: {**task, **SHARED}}})
    second = run("second", {**values, **more, "tasks": {**masks, TASK: task}})
    before, after = (load_file(x / "model.safetensors") for x in (small, second / "generator"))
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, atol=1e-6, rtol=0)


def fitted(large: Path, sharing: EmbeddingSharing, **sizes: Any) -> Model:
    """A model for a pair, with new weights."""
    contents = open_model(large)
    backbone = build_encoder(contents.config)
    small = {"hidden_size": 24, "num_heads": 2, "intermediate_size": 36, **sizes}
    config = contents.config.from_dict({**vars(contents.config), **small})
    head = ReplacedTokenHead(backbone, Generator(config, backbone, sharing=sharing))
    return Model(backbone, {"x": head}, {"x": "x"})


@pytest.mark.parametrize(
    ("sharing", "source", "message"),
    [
        ("shared", "small", "its embeddings are not those of the discriminator"),
        ("none", "large", "has backbone.hidden_size 48, but this model has 24"),
        ("gradient_disentangled", "small", ""),
    ],
)
def test_other_embeddings(
    tmp_path: Path, sharing: EmbeddingSharing, source: str, message: str
) -> None:
    """A pair whose embeddings differ fits every way but sharing them."""
    folders = dict(zip(("large", "small"), electra_pair(tmp_path, shared=False), strict=True))
    model = fitted(folders["large"], sharing)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    contents = open_model(folders[source])
    if not message:
        load_generator(contents, model, "x")
        table = contents.entries["backbone.word.weight"].read()
        assert torch.equal(model.generators["x"].encoder.word.weight, table)
        return
    with pytest.raises(UserError, match=message):
        load_generator(contents, model, "x")
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
