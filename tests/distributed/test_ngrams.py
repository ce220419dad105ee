"""Explicit n-gram masking: one curve whatever the processes, ZeRO stage and restarts, and weights
without the tables over n-grams."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from palm_ds.corpus.mine_ngrams import mine_ngrams
from palm_ds.model.heads.replaced_tokens import generator_name
from palm_ds.weights.formats.open import open_checkpoint
from tests.distributed.test_commands import DROPOUT, losses, records, write_recipe
from tests.distributed.test_phases import train
from tests.helpers.small_corpus import write_small_corpus

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

NAME = "explicit_ngram_masking"
SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_positions": 64, **DROPOUT}


LAYOUTS = [
    pytest.param((), id="alone", marks=pytest.mark.exhaustive),  # others have two processes
    pytest.param(((2, 1, 2),), id="after a kill", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("killed", LAYOUTS)
def test_one_curve_for_any_layout(tmp_path: Path, killed: tuple[tuple[int, int, int], ...]) -> None:
    """Two processes under ZeRO 3, also where one process with ZeRO 2 began, against one process
    without."""
    corpus = write_small_corpus(tmp_path / "corpus")
    lexicon = tmp_path / "ngrams.tsv"
    mine_ngrams(corpus.path, lexicon, sizes=(60, 40), least=3)
    task = {"source": "text", "lexicon": str(lexicon), "relation": {"width": 0.5}}
    recipe = write_recipe(
        tmp_path,
        tmp_path / "corpus",
        backbone={"kind": "ernie_gram", **SIZES},
        tasks={NAME: task},
        stages=[{NAME: 4}],
        log={"every": 1},
        save={"every": 2},
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(recipe, whole, world=1, stage=0)
    for step, world, stage in killed:
        train(recipe, broken, world=world, stage=stage, killed=step)
    train(recipe, broken, world=2, stage=3)
    mine, its = losses(whole), losses(broken)
    names = {NAME, f"{NAME} (fine)", f"{NAME} (replaced)", generator_name(NAME)}
    assert len(mine) == len(its) == 4 and mine[0].keys() == names
    for one, other in zip(mine, its, strict=True):
        assert [*one.values()] == pytest.approx([other[name] for name in one], abs=1e-6)
    score = records(whole, "evaluation")[-1]["scores"]
    assert score.keys() == names and score[f"{NAME} (replaced)"]["metrics"]["always_original"] < 1
    for run in (whole, broken):
        assert not (run / "generator").exists() and not (run / "hf").exists()
        contents = open_checkpoint(run / "weights")
        assert [x.kind for x in contents.heads.values()] == ["masked_words"]
    tables = [load_file(run / "weights/weights.safetensors") for run in (whole, broken)]
    assert tables[0].keys() == tables[1].keys()
    assert not [x for x in tables[0] if "ngrams" in x or "generator" in x]
