"""Files of vectors: complete or absent, continued, the same for any number of processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from palm_ds.cli.embed import COMMAND
from palm_ds.common.errors import UserError
from palm_ds.inference import embedding_files
from palm_ds.inference.embedder import Embedder, EmbeddingSettings
from palm_ds.inference.embedding_files import EmbeddingJob, embed_files
from palm_ds.inference.parts import OutputParts
from palm_ds.inference.trained_model import TrainedModel
from tests.inference.test_embedder import TEXTS, run

__all__ = ["run"]
LINES = [text or "cat" for text in TEXTS]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """texts.txt and rows.jsonl, embedded in chunks of 10 rows."""
    monkeypatch.setattr(embedding_files, "CHUNK", 10)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    rows = [{"id": f"r{n}", "body": text, "label": n % 2 or None} for n, text in enumerate(LINES)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


class Rank:
    """One of several processes that run one after another."""

    def __init__(self, rank: int, world: int):
        self.rank, self.world = rank, world

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.world


def written(folder: Path, name: str, embedder: Embedder, **job: Any) -> Path:
    output = folder / name
    given = {"inputs": [str(folder / "texts.txt")], "output": output} | job
    assert embed_files(embedder, EmbeddingJob(**given), model="model")
    assert not list(folder.glob(".*.parts"))
    return output


def test_vectors_in_input_order(run, folder: Path) -> None:
    embedder = TrainedModel.open(run).embedder()
    found = np.load(written(folder, "out/a.npy", embedder))
    assert found.dtype == np.float32
    assert np.abs(found - embedder.embed(TEXTS)).max() < 1e-5
    about = json.loads((folder / "out/a.npy.json").read_text())
    assert (about["rows"], about["size"], about["settings"]["pooling"]) == (62, 16, "mean")


def test_the_same_bytes_from_two_processes(run, folder: Path) -> None:
    embedder = TrainedModel.open(run).embedder()
    whole = written(folder, "a.npy", embedder).read_bytes()
    job = EmbeddingJob(inputs=[str(folder / "texts.txt")], output=folder / "b.npy")

    def no_progress(rows: int, of: int) -> None: ...

    with OutputParts.opened(job.output, ".npz", "") as parts:
        for rank in (1, 0):
            embedding_files._write_parts(embedder, TEXTS, parts, Rank(rank, 2), no_progress)
        table = embedding_files.open_table([str(folder / "texts.txt")])
        about = embedding_files._about(embedder, job, "", len(TEXTS))
        embedding_files._publish(parts, job, table, about, embedder)
    assert (folder / "b.npy").read_bytes() == whole


def test_smaller_types(run, folder: Path) -> None:
    embedder = TrainedModel.open(run).embedder()
    full = np.load(written(folder, "a.npy", embedder))
    half = np.load(written(folder, "half.npy", embedder, dtype="float16"))
    assert np.array_equal(half, full.astype(np.float16))
    small = np.load(written(folder, "small.npy", embedder, dtype="int8"))
    scales = np.array(json.loads((folder / "small.npy.json").read_text())["scales"])
    assert small.dtype == np.int8 and np.abs(small).max() == 127
    assert (np.abs(small * scales - full) <= scales / 2 + 1e-6).all()


def test_parquet_with_ids(run, folder: Path) -> None:
    embedder = TrainedModel.open(run).embedder()
    rows = {"inputs": [str(folder / "rows.jsonl")], "columns": {"text_a": "body"}}
    table = pq.read_table(written(folder, "a.parquet", embedder, **rows))
    assert table.column("id").to_pylist() == [f"r{n}" for n in range(62)]
    found = np.array(table.column("embedding").to_pylist(), np.float32)
    assert np.abs(found - embedder.embed(LINES)).max() < 1e-5
    assert json.loads(table.schema.metadata[b"palm_ds"])["size"] == 16


def test_pairs_of_texts(run, folder: Path) -> None:
    """The two texts of a row, found or named; one named column is of single texts."""
    rows = [{"text_a": "cat", "text_b": text} for text in LINES]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    embedder, given = TrainedModel.open(run).embedder(), {"inputs": [str(folder / "pairs.jsonl")]}
    pairs = embedder.embed([("cat", text) for text in LINES])
    assert np.abs(np.load(written(folder, "a.npy", embedder, **given)) - pairs).max() < 1e-5
    swapped = {**given, "columns": {"text_a": "text_b", "text_b": "text_a"}}
    wanted = embedder.embed([(text, "cat") for text in LINES])
    assert np.abs(np.load(written(folder, "b.npy", embedder, **swapped)) - wanted).max() < 1e-5
    output = str(folder / "c.npy")
    arguments = [str(run), "--input", *given["inputs"], "--output", output, "--column", "text_a"]
    assert COMMAND.main([*arguments, "--device", "cpu"]) == 0
    assert np.abs(np.load(output) - embedder.embed(["cat"])).max() < 1e-5
    with pytest.raises(UserError, match="--column text_a b c: expected one, or the two of pairs"):
        COMMAND.call([*arguments, "b", "c"])


def test_parquet_of_tokens(run, folder: Path) -> None:
    embedder = TrainedModel.open(run).embedder(EmbeddingSettings(tokens=True))
    found = pq.read_table(written(folder, "t.parquet", embedder)).column("embedding").to_pylist()
    wanted = embedder.embed_tokens(embedder.encode(TEXTS))
    assert [len(each) for each in found] == [len(each) for each in wanted]
    assert np.abs(np.array(found[5]) - wanted[5]).max() < 1e-5


def test_an_interrupted_run_is_continued(run, folder: Path, monkeypatch) -> None:
    embedder, calls = TrainedModel.open(run).embedder(), 0
    whole = written(folder, "a.npy", embedder).read_bytes()
    write = embedding_files._write_part

    def broken(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        write(*args)

    job = EmbeddingJob(inputs=[str(folder / "texts.txt")], output=folder / "b.npy")
    monkeypatch.setattr(embedding_files, "_write_part", broken)
    with pytest.raises(KeyboardInterrupt):
        embed_files(embedder, job, model="model")
    assert not job.output.exists()
    summary = embed_files(embedder, job, model="model")
    assert summary is not None and summary.continued == 30 and calls == 8
    assert job.output.read_bytes() == whole


def test_a_run_is_continued_whose_output_is_in_the_models_folder(run, folder, monkeypatch) -> None:
    shutil.copytree(run / "hf", folder / "model")
    job = EmbeddingJob(inputs=[str(folder / "texts.txt")], output=folder / "model/v.npy")
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(embedding_files, "_publish", lambda *_: (_ for _ in ()).throw(OSError))
        embed_files(TrainedModel.open(folder / "model").embedder(), job, model="model")
    summary = embed_files(TrainedModel.open(folder / "model").embedder(), job, model="model")
    assert summary is not None and summary.continued == 62


def test_parts_of_other_settings_are_not_continued(run, folder: Path, monkeypatch) -> None:
    job = EmbeddingJob(inputs=[str(folder / "texts.txt")], output=folder / "b.npy")
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(embedding_files, "_publish", lambda *_: (_ for _ in ()).throw(OSError))
        embed_files(TrainedModel.open(run).embedder(), job, model="model")
    other = TrainedModel.open(run).embedder(EmbeddingSettings(pooling="cls"))
    summary = embed_files(other, job, model="model")
    assert summary is not None and summary.continued == 0
    assert np.abs(np.load(job.output) - other.embed(TEXTS)).max() < 1e-5


@pytest.mark.parametrize(
    ("job", "tokens", "message"),
    [
        ({"output": "a.csv"}, False, "its suffix must be one of .npy, .parquet"),
        ({"output": "a.npy"}, True, "write a .parquet file"),
        ({"output": "a.parquet", "dtype": "int8"}, True, "int8 is for vectors of texts"),
        ({"output": "a.npy", "dtype": "int4"}, False, "dtype: no 'int4'; did you mean .int8."),
        ({"output": "a.npy", "columns": {"text_a": "x"}}, False, "no field `x`"),
        ({"output": "a.npy", "inputs": ["nothing.txt"]}, False, "nothing.txt: no such file"),
    ],
)
def test_what_cannot_be_written_is_named(run, folder, job, tokens, message) -> None:
    embedder = TrainedModel.open(run).embedder(EmbeddingSettings(tokens=tokens))
    given = {"inputs": [str(folder / "rows.jsonl")], "columns": {"text_a": "body"}} | job
    given["output"] = folder / given["output"]
    with pytest.raises(UserError, match=message):
        embed_files(embedder, EmbeddingJob(**given), model="model")
    assert not given["output"].exists()


def test_the_input_is_not_replaced(run, folder: Path) -> None:
    """It was, by its own vectors."""
    file = folder / "input.parquet"
    pq.write_table(pa.table({"text": TEXTS}), file)
    before = file.read_bytes()
    job = EmbeddingJob(inputs=[str(file)], output=folder / "." / "input.parquet")
    with pytest.raises(UserError, match="input.parquet: is also an input"):
        embed_files(TrainedModel.open(run).embedder(EmbeddingSettings()), job, model="model")
    assert file.read_bytes() == before


def test_nothing_is_left_of_a_run_that_could_not_begin(run, folder: Path) -> None:
    embedder = TrainedModel.open(run).embedder(EmbeddingSettings(prompt="\ud800"))
    job = EmbeddingJob(inputs=[str(folder / "texts.txt")], output=folder / "a.npy")
    with pytest.raises(UserError, match="text 0: lone surrogate at character 1"):
        embed_files(embedder, job, model="model")
    assert not list(folder.glob(".*.parts")) and not list(folder.glob("a.npy*"))


def test_the_command(run, folder: Path, capsys) -> None:
    (folder / "empty.txt").write_text("")
    call = [str(run), "--input", str(folder / "texts.txt"), "--output", str(folder / "c.npy")]
    assert COMMAND.main([*call, "--device", "cpu", "--layers=-2,-1", "--normalize"]) == 0
    assert "62 rows, 16 numbers each" in capsys.readouterr().out
    assert np.allclose(np.linalg.norm(np.load(folder / "c.npy"), axis=1), 1, atol=1e-5)
    with pytest.raises(UserError, match="--layers x: expected numbers"):
        COMMAND.call([*call, "--layers", "x"])
    with pytest.raises(UserError, match=r"empty.txt"):
        COMMAND.call([str(run), "--input", str(folder / "empty.txt"), *call[3:]])
