"""What a run takes over from an old one, and what it refuses. Losses are tested in distributed/."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.encoder.shared_embeddings import EmbeddingSharing
from palm_ds.model.heads.heads import ClassHead
from palm_ds.model.heads.outputs import HeadOutputs
from palm_ds.model.heads.replaced_tokens import Generator, ReplacedTokenHead
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.checkpoint import checkpoint, sharded_state
from palm_ds.runtime.checkpoint.shard_files import write_shards
from palm_ds.train.setup.extend import ModelSignature, WarmStart, _check, warm_start
from tests.helpers.write_checkpoint import write_checkpoint


class Alone:
    rank, world = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]


def make_model(classes: dict[str, int], **changes: Any) -> Model:
    values = {
        "vocab_size": 20,
        "hidden_size": 8,
        "num_layers": 1,
        "num_heads": 2,
        "max_positions": 16,
    }
    backbone = build_encoder(EncoderConfig(**{**values, "task_types": 3, **changes}))
    heads = {name: ClassHead(8, number) for name, number in classes.items()}
    return Model(backbone, heads, {name: name for name in heads})


def signature(model: Model, tokenizer: str = "words") -> ModelSignature:
    ids = {name: number for number, name in enumerate(model.heads)}
    return ModelSignature(
        backbone=model.backbone.config,
        task_ids=ids,
        tokenizer=tokenizer,
        kinds=dict.fromkeys(ids, "classification"),
        shapes={name: tuple(p.shape) for name, p in model.named_parameters()},
    )


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> Path:
    """A run folder after 5 steps (of nothing): tasks a and b."""
    run = tmp_path_factory.mktemp("old")
    torch.manual_seed(0)
    model = make_model({"a": 2, "b": 3})
    base = torch.optim.AdamW(model.parameters())
    parameters = dict(model.named_parameters())
    held = sharded_state.LocalShards(
        parameters=parameters, base=base, zero=None, stage=0, rank=0, world=1
    )

    def write(place: Path, written: checkpoint.FileManifest) -> None:
        write_shards(
            held.shards_to_write(), "process", lambda name, make: written.write(place / name, make)
        )

    write_checkpoint(
        run / "checkpoints",
        5,
        write=write,
        layout=checkpoint.Layout(world=1, stage=0, precision="fp32"),
        parameters=dict.fromkeys(parameters, 5),
        engine={},
        state={"signature": signature(model).record(), "consumed": {"a": 70, "b + a": 4}},
        group=Alone(),
        keep=1,
    )
    return run


def taken(old: Path, model: Model, datasets: tuple[str, ...] = ("a", "c")) -> WarmStart:
    return warm_start(old, model, signature(model), datasets, group=Alone(), warn=pytest.fail)


def test_an_added_task(old: Path) -> None:
    found = taken(old, make_model({"a": 2, "b": 3, "c": 4}))
    assert found.new == ("heads.c.out.weight", "heads.c.out.bias") and found.dropped == ()
    assert found.consumed == {"a": 70}
    assert (
        set(found.update_counts.values()) == {5} and "heads.c.out.weight" not in found.update_counts
    )
    assert found.grown["backbone.task.weight"].rows == (0, 1, -1)  # 2 is the new task's
    lines = found.lines()
    assert lines[0].endswith(", after step 5") and "heads.c.out.bias" in lines[1]
    assert lines[-1] == "extends: data continues: a from 70"


def test_task_embedding_rows_follow_their_tasks(old: Path) -> None:
    found = taken(old, make_model({"b": 3, "c": 4, "a": 2}, task_types=5))
    assert found.grown["backbone.task.weight"].rows == (1, -1, 0, -1, -1)


def test_of_tasks_with_one_row_the_last_keeps_its_own(old: Path) -> None:
    model = make_model({"a": 2, "b": 3})
    for order, row in ((("a", "b"), 1), (("b", "a"), 0)):
        ids = dict.fromkeys(order, 0)
        found = warm_start(
            *(old, model, replace(signature(model), task_ids=ids), ("a",)),
            **{"group": Alone(), "warn": pytest.fail},
        )
        grown = found.grown.get("backbone.task.weight")
        assert (grown.rows if grown else (0, 1, 2)) == (row, 1, 2)


def test_a_removed_task_is_named(old: Path) -> None:
    found = taken(old, make_model({"b": 3, "c": 4}))
    assert found.dropped == ("heads.a.out.weight", "heads.a.out.bias")
    assert not set(found.dropped) & set(found.update_counts)
    assert any("skipped: heads.a.out.weight" in line for line in found.lines())


def test_the_same_tasks_on_another_corpus_keep_their_rows(old: Path) -> None:
    found = taken(old, make_model({"a": 2, "b": 3}), datasets=("b + a",))
    assert found.grown == {} and found.new == () and found.consumed == {"b + a": 4}


def test_dropout_may_change_and_the_encoder_may_not(old: Path) -> None:
    assert taken(old, make_model({"a": 2, "b": 3}, dropout=0.3)).new == ()
    with pytest.raises(UserError, match=r"another encoder: backbone.hidden_size: 8 -> 16"):
        taken(old, make_model({"a": 2, "b": 3}, hidden_size=16))
    with pytest.raises(UserError, match="has a task embedding"):
        taken(old, make_model({"a": 2, "b": 3}, task_types=0))


def test_the_state_of_another_optimizer_is_refused(old: Path) -> None:
    model = make_model({"a": 2, "b": 3})
    for kind in ("adamw", "lamb", "stable_adamw"):  # which keep the same
        now = replace(signature(model), optimizer=kind)
        assert warm_start(old, model, now, [], group=Alone(), warn=print).new == ()
    for kind in ("mine.Lion", "muon"):
        now = replace(signature(model), optimizer=kind)
        with pytest.raises(UserError, match=f"optimizer.kind adamw, this recipe has {kind};"):
            warm_start(old, model, now, [], group=Alone(), warn=print)


def test_other_classes_another_tokenizer_and_no_run_are_refused(old: Path, tmp_path) -> None:
    with pytest.raises(
        UserError, match=r"heads.b.out.weight has \(3, 8\) there and \(4, 8\) here; "
    ):
        taken(old, make_model({"a": 2, "b": 4}))
    model = make_model({"a": 2, "b": 3})
    with pytest.raises(UserError, match="another tokenizer"):
        warm_start(old, model, signature(model, "other"), [], group=Alone(), warn=pytest.fail)
    with pytest.raises(UserError, match="no checkpoint in"):
        taken(tmp_path, model)


def with_generator(sharing: EmbeddingSharing) -> Model:
    """The tasks a and b, and one with a generator."""
    backbone = (model := make_model({"a": 2, "b": 3})).backbone
    generator = Generator(backbone.config, backbone, sharing=sharing)
    heads = {**model.heads, "c": ReplacedTokenHead(backbone, generator)}
    return Model(backbone, heads, {name: name for name in heads})


def test_embeddings_that_become_differences_are_refused(old: Path) -> None:
    """As in DeBERTa-v3; a generator that shares nothing is added."""
    assert any(".generator." in name for name in taken(old, with_generator("none")).new)
    with pytest.raises(UserError, match="only one of the two runs has .*`init_from`"):
        taken(old, with_generator("gradient_disentangled"))


def test_another_kind_under_the_same_name_is_refused(old: Path) -> None:
    """Its head may have the same shape, and its weights mean something else."""
    model = make_model({"a": 2, "b": 3})
    kinds = {"a": "classification", "b": "mine.Another"}
    now = replace(signature(model), kinds=kinds)
    with pytest.raises(UserError, match="tasks.b is of kind classification there and mine.Another"):
        warm_start(old, model, now, [], group=Alone(), warn=pytest.fail)


def test_a_head_that_read_something_else_is_refused(tmp_path: Path) -> None:
    """Heads of means and of the pooler have the same shapes."""
    labels = ("x", "y", "z")
    signatures = {
        name: replace(
            signature(make_model({"b": 3})),
            heads={"b": HeadOutputs(labels=labels, averaged=name == "mean")},
            head_of={"b": "b"},
        )
        for name in ("mean", "pooler")
    }
    for there, here in (("mean", "pooler"), ("pooler", "mean")):
        _check(tmp_path, signatures[there].record(), signatures[there])
        match = f"tasks.b has `pooling: {there}` there and {here} here; give the task"
        with pytest.raises(UserError, match=match):
            _check(tmp_path, signatures[there].record(), signatures[here])


def test_a_head_of_another_form_is_refused(old: Path) -> None:
    model = make_model({"a": 2, "b": 3})
    same_size = torch.nn.Parameter(torch.zeros(8, 3))
    model.get_submodule("heads.b.out").register_parameter("weight", same_size)
    with pytest.raises(UserError, match="heads.b.out.weight has"):
        taken(old, model)


def test_the_signature_of_a_run_is_json(old: Path) -> None:
    record = signature(make_model({"a": 2})).record()
    assert json.loads(json.dumps(record)) == record
