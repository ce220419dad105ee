"""Extends a run by a task or a corpus (ERNIE 2.0, section 3.1).

The new run starts from the weights *and* the optimizer state of the old one. Parameters of both
models continue unchanged; new heads and new rows of the task embedding are newly initialized;
datasets of both runs continue after the last example read. Steps count from 0, by a new plan.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from palm_ds.common.config import differences
from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.shared_embeddings import differences_of_tables
from palm_ds.model.heads.outputs import HeadOutputs
from palm_ds.model.multi_task_model import Model
from palm_ds.model.pooling import TextPooling
from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.runtime.checkpoint.shard_files import ResizedTable, ShardReader
from palm_ds.runtime.optimizer.optimizer import SAME_STATE
from palm_ds.runtime.processes.process_group import ProcessGroup
from palm_ds.text.exported_tokenizer import TextPreparation
from palm_ds.weights.formats.native import signature_in
from palm_ds.weights.formats.weights_info import outputs_record

_TASK_TABLE = "backbone.task.weight"
_MAY_DIFFER = ("task_types", "dropout", "attention_dropout", "init_range")
"""Keys of `backbone` that may differ between the two runs."""


@dataclass(frozen=True, kw_only=True)
class ModelSignature:
    """Model that a run's weights belong to. Stored in its checkpoints, so that a run that extends
    it can check that the two fit."""

    backbone: EncoderConfig
    task_ids: Mapping[str, int]
    """Of tasks with the same row, the last one keeps the row that it had."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    token_heads: tuple[str, ...] = ()
    """Names of the classification heads that read tokens, as in weights.json."""
    heads: Mapping[str, HeadOutputs] = field(default_factory=dict)
    """The meaning of the classification heads' scores, as in weights.json."""
    optimizer: str = "adamw"
    """The recipe's `optimizer.kind`."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """{task: kind}."""
    head_of: Mapping[str, str] = field(default_factory=dict)
    """{task: its head}, as in weights.json."""
    export_task: str = ""
    """The task whose row of the task embedding is used for texts that name none."""
    pooling: TextPooling | None = None
    """How texts become vectors, if a task trains that."""
    preparation: TextPreparation = TextPreparation()
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """{parameter: shape} of all parameters."""
    lora_scale: float = 0.0
    """The factor of LoRA's change; 0 without LoRA."""

    def record(self, rope_bases: Sequence[float | None] = (None, None)) -> dict[str, Any]:
        """Plain values for JSON. `rope_bases`: those of a stage, instead of the encoder's."""
        plain = {
            "backbone": asdict(self.backbone),
            "rope_bases": rope_bases,
            "task_ids": dict(self.task_ids),
            "tokenizer": self.tokenizer,
            "token_heads": self.token_heads,
            "heads": outputs_record(self.heads),
            "optimizer": self.optimizer,
            "kinds": dict(self.kinds),
            "head_of": dict(self.head_of),
            "export_task": self.export_task,
            "pooling": asdict(self.pooling) if self.pooling else None,
            "preparation": asdict(self.preparation),
            "shapes": dict(self.shapes),
            "lora_scale": self.lora_scale,
        }
        return json.loads(json.dumps(plain))


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Weights that a new run takes over from the run that it extends."""

    found: checkpoint.VerifiedCheckpoint
    grown: Mapping[str, ResizedTable]
    new: tuple[str, ...]
    """Parameters that the old run lacks."""
    dropped: tuple[str, ...]
    """Parameters of the old run that the new one lacks."""
    consumed: Mapping[str, int]
    """Examples of each dataset that the old run has read."""

    @property
    def update_counts(self) -> dict[str, int]:
        """Optimizer updates of each parameter taken over."""
        return {n: k for n, k in self.found.parameters.items() if n not in self.dropped}

    def lines(self) -> list[str]:
        """A summary for the log."""
        lines = [f"extends {self.found.path.parent.parent}, after step {self.found.step}"]
        if self.new:
            lines.append(f"extends: newly initialized: {', '.join(self.new)}")
        if self.dropped:
            lines.append(f"extends: skipped: {', '.join(self.dropped)}")
        resumed = [f"{dataset} from {n:,}" for dataset, n in self.consumed.items() if n]
        return [*lines, f"extends: data continues: {'; '.join(resumed) or 'nowhere'}"]


def warm_start(
    old: Path,
    model: Model,
    signature: ModelSignature,
    datasets: Iterable[str],
    *,
    group: ProcessGroup,
    warn: Callable[[str], None],
) -> WarmStart:
    """Find what `model` takes over from the newest good checkpoint of the run folder `old`.
    Collective. Raises UserError if the two do not fit together."""
    newest = checkpoint.latest_good(old / "checkpoints", group=group, warn=warn)
    if newest is None:
        raise UserError(f"extend: {old}: no checkpoint in {old / 'checkpoints'}; name a run folder")
    before = signature_in(newest)
    _check(old, before, signature)
    stored = ShardReader(newest.files)
    parameters = dict(model.named_parameters())
    if differences_of_tables(parameters) != differences_of_tables(newest.parameters):
        raise UserError(
            f"extend: {old}: only one of the two runs has embeddings that are differences from a "
            "generator's (embedding_sharing: gradient_disentangled); start from its weights with "
            "`init_from`"
        )
    fresh = tuple(name for name in parameters if name not in stored)
    grown = _grown(before["task_ids"], signature.task_ids, parameters, stored)
    kept = {name: p for name, p in parameters.items() if name not in fresh and name not in grown}
    _check_shapes(old, before["shapes"], kept)
    read = newest.state["consumed"]
    return WarmStart(
        found=newest,
        grown=grown,
        new=fresh,
        dropped=tuple(name for name in newest.parameters if name not in parameters),
        consumed={dataset: read[dataset] for dataset in datasets if dataset in read},
    )


def _check(old: Path, before: Mapping[str, Any], signature: ModelSignature) -> None:
    now = signature.record()
    if before["lora_scale"]:
        raise UserError(
            f"extend: {old}: was trained with LoRA, whose optimizer state is not that of whole "
            "matrices; start from its weights with `init_from`"
        )
    if before["tokenizer"] != now["tokenizer"]:
        raise UserError(
            f"extend: {old}: its corpora were prepared with another tokenizer; prepare the new "
            "ones with that tokenizer (--tokenizer RUN/weights/tokenizer)"
        )
    kinds = (before["optimizer"], signature.optimizer)
    if kinds[0] != kinds[1] and not set(kinds) <= set(SAME_STATE):
        raise UserError(
            f"extend: {old}: was trained with optimizer.kind {kinds[0]}, this recipe has "
            f"{kinds[1]}; their optimizer states are incompatible"
        )
    _check_kinds(old, before["kinds"], now["kinds"])
    _check_pooling(old, before, now)
    encoder = asdict(EncoderConfig.from_dict(before["backbone"], f"{old}: signature.backbone"))
    encoders = [
        {k: v for k, v in x.items() if k not in _MAY_DIFFER} for x in (encoder, now["backbone"])
    ]
    if changed := differences(encoders[0], encoders[1], "backbone"):
        raise UserError(f"extend: {old}: has another encoder: {'; '.join(changed)}")
    if bool(before["backbone"]["task_types"]) != bool(now["backbone"]["task_types"]):
        raise UserError(f"extend: {old}: only one of the two encoders has a task embedding")


def _check_kinds(old: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises UserError if a task has another kind than in the old run: heads are matched by task
    name."""
    for task, kind in now.items():
        if before.get(task, kind) != kind:
            raise UserError(
                f"extend: {old}: tasks.{task} is of kind {before[task]} there and {kind} here; "
                "give the new task another name, so that its head is newly initialized"
            )


def _check_pooling(old: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises UserError if a head reads something else than in the old run."""
    for name in sorted({*before["head_of"].values()} & {*now["head_of"].values()}):
        outputs = [record["heads"].get(name, {}) for record in (before, now)]
        averaged = [bool(each.get("averaged")) for each in outputs]
        if averaged[0] != averaged[1]:
            there, here = ("mean" if each else "pooler" for each in averaged)
            raise UserError(
                f"extend: {old}: the head of tasks.{name} has `pooling: {there}` there and {here} "
                f"here; give the task `pooling: {there}`, or another name"
            )


def _check_shapes(
    old: Path,
    shapes: Mapping[str, Sequence[int]],
    parameters: Mapping[str, torch.Tensor],
) -> None:
    for name, parameter in parameters.items():
        here, there = tuple(parameter.shape), tuple(shapes[name])
        if here != there:
            raise UserError(
                f"extend: {old}: {name} has {there} there and {here} here; give its task the "
                "settings and classes that it has there, or another name"
            )


def _grown(
    old_ids: Mapping[str, int],
    ids: Mapping[str, int],
    parameters: Mapping[str, Any],
    stored: ShardReader,
) -> dict[str, ResizedTable]:
    """The task embedding with its rows rearranged: each task keeps its row, whatever its index is
    now; the row of a new task is newly initialized."""
    if _TASK_TABLE not in parameters:
        return {}
    table = parameters[_TASK_TABLE].detach().float().cpu().clone()  # (task slots, hidden)
    before = stored.size(_TASK_TABLE) // table.shape[1]
    of_new_tasks = set(ids.values()) - {ids[name] for name in ids if name in old_ids}
    rows = [-1 if i >= before or i in of_new_tasks else i for i in range(len(table))]
    for name, row in ids.items():
        if name in old_ids:
            rows[row] = old_ids[name]
    same = len(table) == before and rows == list(range(before))
    return {} if same else {_TASK_TABLE: ResizedTable(rows=tuple(rows), first=table)}
