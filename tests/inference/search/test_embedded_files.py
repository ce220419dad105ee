"""The nearest texts, from any file that `palm-ds embed` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.inference.embedder import EmbeddingSettings
from palm_ds.inference.embedding_files import EmbeddingJob, embed_files
from palm_ds.inference.search.embedded_files import open_embedded
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.serve.model_set import Served, open_set
from palm_ds.serve.served_model import ModelOptions
from tests.helpers.serving import local

RNG = np.random.default_rng(3)
TEXTS = [" ".join(RNG.choice(["good", "bad", "so", "very", "?"], n)) for n in range(1, 30)]


def embedded(folder: Path, model: Path, name: str, dtype: str, **settings: Any) -> Path:
    (folder / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    output = folder / name
    job = EmbeddingJob(inputs=[str(folder / "texts.txt")], output=output, dtype=dtype)
    embed_files(
        TrainedModel.open(model).embedder(EmbeddingSettings(**settings)), job, model=str(model)
    )
    return output


@pytest.mark.parametrize(
    ("name", "dtype", "settings"),
    [
        ("v.npy", "float32", {}),
        ("v.npy", "int8", {"pooling": "cls"}),
        ("v.parquet", "float16", {"dimensions": 8, "normalize": True, "prompt": "so "}),
    ],
)
def test_a_search_finds_what_the_vectors_say(
    name: str, dtype: str, settings: dict[str, Any], words_run: Path, tmp_path: Path
) -> None:
    output = embedded(tmp_path, words_run, name, dtype, **settings)
    served = Served(models={"m": words_run}, options=ModelOptions(), index=output)
    exact = (
        TrainedModel.open(words_run)
        .embedder(EmbeddingSettings(**settings))
        .embed([*TEXTS, "so very bad"])
    )
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    with local(open_set(served), served) as server:
        found = server.answer("/search", {"query": "so very bad", "top": 5})["results"]
        assert server.get("/info").json()["search"]["texts"] == len(TEXTS)
    cosines = exact[:-1] @ exact[-1]
    rounding = 0.02 if dtype == "int8" else 1e-3
    assert [x["text"] for x in found] == [TEXTS[x["index"]] for x in found]
    for each, wanted in zip(found, np.sort(cosines)[::-1], strict=False):
        assert each["score"] == pytest.approx(cosines[each["index"]], abs=rounding)
        assert each["score"] == pytest.approx(wanted, abs=rounding)


def test_the_model_of_an_index_is_found_by_what_it_computes(
    words_run: Path, tasks_run: Path, tmp_path: Path
) -> None:
    """Both models give vectors of 16 numbers; the index does not say where its own is now."""
    output = embedded(tmp_path, words_run, "v.npy", "int8", pooling="mean")
    described = output.with_name("v.npy.json")
    about = json.loads(described.read_text())
    described.write_text(json.dumps(about | {"model": "runs/moved"}))
    served = Served(
        models={"tasks": tasks_run, "words": words_run}, options=ModelOptions(), index=output
    )
    assert open_set(served).index_model == "words"
    alone = Served(models={"tasks": tasks_run}, options=ModelOptions(), index=output)
    with pytest.raises(UserError, match="not the vectors that tasks gives .* runs/moved's"):
        open_set(alone)
    swapped = tmp_path / "swapped.txt"
    swapped.write_text("\n".join(reversed(TEXTS)) + "\n")
    other = Served(
        models={"words": words_run}, options=ModelOptions(), index=output, texts=[str(swapped)]
    )
    with pytest.raises(UserError, match="not the vectors that words gives for these texts"):
        open_set(other)


def test_the_texts_are_read_as_they_were_embedded(words_run: Path, tmp_path: Path) -> None:
    table = tmp_path / "rows.data"
    rows = "".join(f"a\tb {number}\t{text}\n" for number, text in enumerate(TEXTS))
    table.write_text("text\tid\tbody\n" + rows)
    job = EmbeddingJob(
        inputs=[str(table)], output=tmp_path / "v.npy", columns={"text_a": "body"}, format="tsv"
    )
    embed_files(TrainedModel.open(words_run).embedder(), job, model=str(words_run))
    index = open_embedded(job.output, [])
    with index.store.reading() as now:
        assert [each.text for each in now.records(range(len(TEXTS)))] == TEXTS
    with pytest.raises(UserError, match="vectors of `palm-ds embed` are only searched"):
        index.delete(["0"])
    with pytest.raises(UserError, match="hybrid: these are vectors of `palm-ds embed`, without"):
        index.search(np.ones(index.size), "so", hybrid=True)


def test_mistakes_in_one_line(words_run: Path, tasks_run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--index: .*none.npy: no such file"):
        open_embedded(tmp_path / "none.npy", [])
    output = embedded(tmp_path, words_run, "v.npy", "float32")
    other = tmp_path / "other.txt"
    other.write_text("one\ntwo\n")
    with pytest.raises(UserError, match="29 vectors, but 2 texts; give the files"):
        open_embedded(output, [str(other)])
    described = output.with_name("v.npy.json")
    about = json.loads(described.read_text())
    described.write_text(json.dumps(about | {"settings": about["settings"] | {"layers": [1]}}))
    with pytest.raises(UserError, match=r"has vectors of layers \(1,\); a server computes only"):
        open_embedded(output, [])
    wrong = {"inputs": 3, "columns": 3, "scales": ["a"], "settings": {"layers": None}}
    for text in ("[" * 9999, *(json.dumps(about | {key: wrong[key]}) for key in wrong)):
        described.write_text(text)
        with pytest.raises(UserError, match="v.npy.json: not the description"):
            open_embedded(output, [])
    described.write_text(json.dumps(about | {"scales": [1.0, 2.0]}))
    with pytest.raises(
        UserError, match=r"v.npy.json: scales of shape \(2,\) for vectors of \d+ numbers"
    ):
        open_embedded(output, [])
    described.write_text(json.dumps(about))
    np.save(output, np.zeros((29, 5), np.float32))
    served = Served(models={"m": words_run}, options=ModelOptions(), index=output)
    with pytest.raises(UserError, match="vectors of 5 numbers .*no model served here gives such"):
        open_set(served)
    for content in (b"no array", b"", output.read_bytes().replace(b"}", b"{", 1)):
        output.write_bytes(content)
        with pytest.raises(UserError, match="not a file of `palm-ds embed`"):
            open_embedded(output, [])
    described.unlink()
    with pytest.raises(UserError, match="v.npy.json: not the description"):
        open_embedded(output, [])
