"""Shared by the tests of conversion: small transformers models, and palm_ds models built from
contents."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import transformers

from palm_ds.data.tasks.example import Example, collate
from palm_ds.model.encoder.encoder import Encoder, build_encoder
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.multi_task_model import Model
from palm_ds.weights.formats.contents import CheckpointContents

WORDS, WIDTH = 37, 16
SIZES = dict(
    vocab_size=WORDS,
    hidden_size=WIDTH,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=20,
)
ERNIE = dict(type_vocab_size=4, task_type_vocab_size=5, use_task_id=True)
EPS = dict(layer_norm_eps=1e-5)
CONFIGS = {
    "bert": lambda **more: transformers.BertConfig(**SIZES | more),
    "ernie": lambda **more: transformers.ErnieConfig(**SIZES | ERNIE | EPS | more),
    "roberta": lambda **more: transformers.RobertaConfig(**SIZES | EPS | more),
    "xlm-roberta": lambda **more: transformers.XLMRobertaConfig(**SIZES | more),
    "camembert": lambda **more: transformers.CamembertConfig(**SIZES | EPS | more),
}
FAMILY = {
    "bert": "Bert",
    "ernie": "Ernie",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
}


def make(kind: str, ending: str, *, seed: int = 1, **more: object) -> transformers.PreTrainedModel:
    """A small model with noise as weights."""
    torch.manual_seed(seed)
    config = CONFIGS[kind](**more)
    model = getattr(transformers, FAMILY[kind] + ending)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save(model: transformers.PreTrainedModel, folder: Path, **options: object) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def build(contents: CheckpointContents) -> Model:
    """The model of the contents, in fp32."""
    backbone = build_encoder(contents.config)
    heads: dict[str, torch.nn.Module] = {}
    for name, head in contents.heads.items():
        if head.kind == "masked_words":
            heads[name] = MaskedLMHead(backbone)
        else:
            heads[name] = ClassHead(contents.config.hidden_size, head.classes, pooled=head.pooled)
    model = Model(backbone, heads, {name: name for name in heads}) if heads else _bare(backbone)
    state = {name: entry.read().float() for name, entry in contents.entries.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all(".pooler." in name for name in missing), (missing, unexpected)
    return model.eval()


def _bare(backbone: Encoder) -> Model:
    head = ClassHead(backbone.config.hidden_size, 1)
    model = Model(backbone, {"none": head}, {"none": "none"})
    del model.heads["none"]
    return model


@torch.no_grad()
def outputs(
    model: Model, ids: torch.Tensor, segments: torch.Tensor, tasks: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """The outputs of a palm_ds model for texts of one length: `hidden`, `pooled`, and each
    head's scores."""
    rows = []
    for i, text in enumerate(ids.numpy()):
        example = Example(
            input_ids=text,
            token_type_ids=segments[i].numpy(),
            source_offsets=np.zeros_like(text),
            annotations={},
        )
        rows.append([(example, 0 if tasks is None else int(tasks[i, 0]))])
    batch = collate(rows, length=ids.shape[1], pad=model.backbone.config.pad)
    hidden = model.backbone(batch)  # (texts, length, width)
    found = {"hidden": hidden, "pooled": model.backbone.pooler(hidden[:, 0])}
    for name, head in model.heads.items():
        found[name] = head.logits(found["pooled"] if head.pooled else hidden)  # type: ignore[operator]
    return found


def inputs_of(kind: str, *, seed: int = 0, tasks: bool = True) -> dict[str, torch.Tensor]:
    """Two texts in the form transformers takes."""
    rng = np.random.default_rng(seed)
    ids = torch.tensor(rng.integers(5, WORDS, (2, 11)))
    most = 4 if kind == "ernie" else 2
    found = {"input_ids": ids, "token_type_ids": torch.tensor(rng.integers(0, most, (2, 11)))}
    if kind == "ernie" and tasks:
        found["task_type_ids"] = torch.tensor([[3], [1]]).expand(2, 11)
    return found


@torch.no_grad()
def run(model: transformers.PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> dict:
    """Every tensor that a transformers model returns."""
    if "MultipleChoice" in type(model).__name__:  # Ernie's takes no task ids (of two dimensions)
        inputs = {name: value[None] for name, value in inputs.items()}
    output = model(**inputs)
    return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}
