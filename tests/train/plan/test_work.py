"""A plan for every preset and every shipped recipe of pretraining, built without values."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from palm_ds.model.config.meta import on_meta
from palm_ds.model.config.presets import PRESETS
from palm_ds.model.encoder.encoder import encoder_class
from palm_ds.train.plan.cluster import parse_clusters
from palm_ds.train.plan.table import StageWork, plan_lines, stage_lines, stage_work
from palm_ds.train.plan.work import ModelSize, size_of
from palm_ds.train.recipe.recipe import Recipe, make_recipe, read_values
from palm_ds.train.setup.build import AnyStream, build_model, build_stream
from palm_ds.train.setup.sources import Data, open_data
from tests.helpers.small_corpus import write_small_corpus
from tests.train.plan.test_step_time import ds_config
from tests.train.plan.test_table import cells_of
from tests.train.recipe.test_stage_settings import MASKS, recipe

WORDS, MODERN, MMBERT, EURO, DEBERTA = 30_522, 50_368, 256_000, 128_256, 128_100
PUBLISHED = {  # preset: (tokens, millions of parameters, of them in matrices of layers)
    "bert-base": (WORDS, 110, 85),
    "bert-large": (WORDS, 335, 302),
    "modernbert-base": (MODERN, 149.7, 110.3),
    "modernbert-large": (MODERN, 395.9, 343.1),
    "ettin-17m": (MODERN, 16.9, 3.9),
    "ettin-32m": (MODERN, 32.1, 12.5),
    "ettin-68m": (MODERN, 68.5, 42.3),
    "ettin-1b": (MODERN, 1031, 937.7),
    "mmbert-small": (MMBERT, 140.9, 42.2),
    "mmbert-base": (MMBERT, 307.8, 110.3),
    "neobert": (WORDS, 245, 198.2),
    "eurobert-210m": (EURO, 211.7 + 98.5, 113.2),  # its head has a table of its own
    "eurobert-610m": (EURO, 607.8 + 147.8, 460.1),
    "eurobert-2.1b": (EURO, 2107 + 295, 1812),
    "nomic-bert-2048": (30_528, 136.7, 113.2),
    "gte-multilingual-base": (250_048, 305, 113.2),
    "gte-base-en-v1.5": (30_528, 137, 113.2),
    "deberta-v3-xsmall": (DEBERTA, 21 + 49, 21),
    "deberta-v3-small": (DEBERTA, 42 + 98, 42),
    "deberta-v3-base": (DEBERTA, 85 + 98, 85),
    "deberta-v3-large": (DEBERTA, 302 + 131, 302),
    "albert-base-v2": (30_000, 11.7, 85),  # one layer, twelve times
    "distilbert-base": (WORDS, 67, 42.5),
}
RECIPES = Path(__file__).parents[3] / "launch/recipes"
OF_NUMBERS = [  # the others need headings, capitals, markers, dialogues or logs of queries
    *("gpt_bert_small", "modern_phases", "modernbert_base", "replaced_tokens"),
    *(
        pytest.param(name, marks=pytest.mark.exhaustive)
        for name in (
            *("babyberta", "deberta_v3_small", "domain_modernbert", "electra_small", "embedded"),
            *("ettin_17m", "hybrid", "small"),
        )
    ),
]
"""Recipes whose tasks a corpus without real words is enough for."""


@pytest.fixture(scope="module")
def masks(text: Path) -> tuple[Data, AnyStream]:
    """Masked words of that corpus, and their rows, which do not depend on the encoder."""
    made = recipe(text, tasks={MASKS: {"source": "text"}}, stages=[{MASKS: 2}])
    data = open_data(made)
    return data, build_stream(made, data)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "text"
    write_small_corpus(folder, documents=10)
    return folder


def plan_of(
    made: Recipe, data: Data, stream: AnyStream | None = None
) -> tuple[ModelSize, list[StageWork]]:
    """The model's size and its work by stages, which make one row for each stage of a plan."""
    config, clusters = ds_config(1), parse_clusters("1 x H100")
    with on_meta():
        model = build_model(made, config, data.vocabulary, device=torch.device("cpu"))
    size, work = size_of(model), stage_work(stream or build_stream(made, data), model)
    _, _, *gpus = cells_of(plan_lines(size, work[-1].parts[-1][0], config, clusters))
    _, _, *stages = cells_of(stage_lines(size, work, config, clusters))
    assert len(gpus) == 1 and len(stages) == len(work) + 1
    assert all(math.isfinite(float(hours.replace(",", ""))) for *_, hours in stages)
    return size, work


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_plan(text: Path, masks: tuple[Data, AnyStream], preset: str) -> None:
    """With the parameters and FLOPs of the published sizes."""
    tokens, parameters, matrices = PUBLISHED.get(preset, (WORDS, 0, 0))
    backbone = {"preset": preset, "vocab_size": tokens}
    made = recipe(text, backbone=backbone, tasks={MASKS: {"source": "text"}}, stages=[{MASKS: 2}])
    size, (work,) = plan_of(made, *masks)
    if parameters:
        assert size.parameters / 1e6 == pytest.approx(parameters, rel=0.02)
        per_token = encoder_class(size.config).flops(size.config).token
        assert per_token / 6e6 == pytest.approx(matrices, rel=0.02)
    assert work.flops(size) > work.tokens * encoder_class(size.config).flops(size.config).token


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_recipes_have_a_plan(text: Path, name: str) -> None:
    values = read_values(RECIPES / f"{name}.yaml")
    values["sources"] = {source: {"corpus": str(text)} for source in values["sources"]}
    made = make_recipe(values, name)
    size, work = plan_of(made, open_data(made))
    for stage, plan, step in zip(made.curriculum.stages, work, made.stage_plan.sizes, strict=True):
        assert plan.steps == stage.steps
        rows = step.rows_before(stage.steps)  # 0: a batch of examples fills what it needs
        full = (rows or plan.steps * plan.parts[0][0].rows) * step.length
        assert 0.3 * full < plan.tokens <= full  # short documents leave some of a row empty
        assert plan.flops(size) > 6 * plan.tokens * size.parameters / 100
