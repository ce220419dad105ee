"""What trees tell from lengths and from the ends of segments, of corpora where either says it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.surface_cues import main, open_quotations
from palm_ds.common.errors import UserError
from tests.helpers.pair_corpus import tokenizer_of, write_sentences

RECIPE = """
backbone: {{preset: tiny}}
length: 32
batch: 4 rows
held_out: 0.25
sources: {{text: {{corpus: {corpus}}}}}
tasks: {{sentence_order: {{source: text}}, knowledge_masking: {{source: text, units: [word]}}}}
stages: [{{sentence_order + knowledge_masking: 2}}, {{knowledge_masking: 2}}]
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a b", (0, 0, 0)),
        ("“ a ” b", (0, 0, 0)),
        ("“ a b", (1, 0, 0)),
        ("a ” b", (0, 1, 0)),
        ("a ” b “ c", (1, 1, 0)),
        ("「 a 」 『 b", (1, 0, 0)),
        ('" a " b "', (0, 0, 1)),
    ],
)
def test_open_quotations(text: str, found: tuple[int, int, int]) -> None:
    assert open_quotations(text.split()) == found


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("held_out=0", "held_out: 0 leaves nothing to score trees on"),
        ("stages=[{knowledge_masking: 2}]", "no task group begins with a task that classifies"),
    ],
)
def test_a_recipe_with_nothing_to_score_is_refused(
    override: str, message: str, tmp_path: Path
) -> None:
    documents = [(str(n), ["a b", "c d"]) for n in range(8)]
    write_sentences(tmp_path / "corpus", documents, tokenizer_of("a b c d"))
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(corpus=tmp_path / "corpus"))
    with pytest.raises(UserError, match=message):
        main([str(tmp_path / "recipe.yaml"), override])


@pytest.mark.parametrize(
    ("first", "second", "lengths", "surface"),
    [
        ("x y", "z w", (0.4, 0.6), (0.4, 0.6)),  # either may come first
        ("“ x", "y ”", (0.4, 0.6), (1.0, 1.0)),
        ("x y", "z w x", (1.0, 1.0), (1.0, 1.0)),
    ],
)
def test_the_order_of_two_sentences(
    first: str,
    second: str,
    lengths: tuple[float, float],
    surface: tuple[float, float],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rng, documents = np.random.default_rng(1), []
    for n in range(1200):
        words = dict(zip("xyzw", rng.choice(list("abcdefgh"), 4), strict=True))
        sentences = [[words.get(x, x) for x in each.split()] for each in (first, second)]
        documents.append((str(n), [" ".join(each) for each in sentences]))
    write_sentences(tmp_path / "corpus", documents, tokenizer_of("a b c d e f g h “ ”"))
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(corpus=tmp_path / "corpus"))
    main([str(tmp_path / "recipe.yaml")])
    header, line = capsys.readouterr().out.splitlines()
    assert header.split()[-2:] == ["lengths", "surface"]
    name, training, held_out, *shares = line.split()
    assert (name, training) == ("sentence_order", "894")
    assert int(held_out) in (306, 224)  # 82 are copies of training documents; in one case, all
    frequent, by_length, by_surface = (float(share.rstrip("%")) / 100 for share in shares)
    assert 0.4 < frequent < 0.6
    assert lengths[0] <= by_length <= lengths[1]
    assert surface[0] <= by_surface <= surface[1]
