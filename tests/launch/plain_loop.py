"""The losses of a recipe by a plain torch loop: no DeepSpeed, one process, one micro-batch a step.

    python plain_loop.py RECIPE OUT.json [a.b=c ...]

Shares with palm_ds the rows and the model; the sums over tasks, clipping, AdamW and its groups are
written out again here, the slow and obvious way.
"""

import json
import sys
from dataclasses import replace

import torch

from palm_ds.common.rng import derive_key
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.train.recipe.recipe import read_recipe
from palm_ds.train.setup.build import build_model, build_stream
from palm_ds.train.setup.sources import open_data

recipe_file, out, *overrides = sys.argv[1:]
recipe = read_recipe(recipe_file, overrides)
data = open_data(recipe)
stream = build_stream(recipe, data)
ds_config = make_ds_config({"zero_optimization": {"stage": 0}})
model = build_model(recipe, ds_config, data.vocabulary, device=torch.device("cpu"))
decayed, kept = [], []
for name, parameter in model.named_parameters():
    plain = name.startswith("backbone.") and parameter.ndim == 2
    (decayed if plain else kept).append(parameter)
settings = recipe.optimizer
groups = [
    {"params": decayed, "weight_decay": settings.weight_decay},
    {"params": kept, "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(
    groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, foreach=False, fused=False
)
losses = []
for step in range(recipe.curriculum.steps):
    (batch,) = stream.batches(step, 0, 1, recipe.rows)
    key = derive_key(recipe.seed, "dropout", step) >> 1
    outputs = model(replace(batch, dropout_key=key))
    mean = {
        task: output.loss_sum / len(batch.labels[task][0])
        for task, output in outputs.items()
        if task in batch.labels
    }
    optimizer.zero_grad()
    # Heads without labels have gradients of zero, not none: Adam counts their steps as well.
    idle = [output.loss_sum for task, output in outputs.items() if task not in mean]
    sum([*mean.values(), *idle]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
    for group in optimizer.param_groups:
        group["lr"] = settings.lr * recipe.lr_scale(recipe.curriculum.at(step, recipe.seed))
    optimizer.step()
    losses.append({task: loss.item() for task, loss in mean.items()})
with open(out, "w") as file:
    json.dump(losses, file)
