"""The examples that run an ONNX folder: in Python without torch, and in C++."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from palm_ds.inference.trained_model import TrainedModel
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.crf import CRFHead
from palm_ds.model.heads.heads import ClassHead
from palm_ds.model.heads.outputs import HeadOutputs
from palm_ds.model.multi_task_model import Model
from palm_ds.text.tokenizer import Tokenizer, load_tokenizer
from palm_ds.weights.convert.to_onnx import convert_to_onnx
from palm_ds.weights.formats.onnx.description import read_description
from palm_ds.weights.formats.onnx.run import OnnxModel
from palm_ds.weights.formats.weights_info import WeightsInfo
from palm_ds.weights.weights_folder import save_weights
from tests.helpers.small_configs import SMALL

FOLDER = Path(__file__).resolve().parents[2] / "tools" / "onnx"
HEADER = Path(__file__).parent / "onnxruntime"
"""A part of ONNX Runtime's header: its Python package has none."""
TEXTS = ["the cat sat on the mat", "cat", "", "a query : on a mat the cats sat " * 9]
WITHOUT_TORCH = """
import runpy, sys
class Refused:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("torch", "transformers", "palm_ds"):
            raise ImportError(f"{name} is not needed")
sys.meta_path.insert(0, Refused())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def pieces() -> Tokenizer:
    """A SentencePiece tokenizer."""
    import io

    import sentencepiece as spm

    from palm_ds.text.tokenizer import sentencepiece

    model = io.BytesIO()
    spm.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
        sentence_iterator=iter(TEXTS * 4),
        model_writer=model,
        vocab_size=30,
        hard_vocab_limit=False,
        user_defined_symbols=["[PAD]", "[CLS]", "[SEP]", "[MASK]"],
        minloglevel=2,
    )
    return sentencepiece(model.getvalue(), origin="trained")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """source/ and out/: a classifier, a tagger with a CRF, answers in a text, and a SentencePiece
    tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("examples"), pieces()
    config = replace(SMALL, vocab_size=tokenizer.size, max_positions=40, task_types=0)
    config = replace(config, num_layers=1)  # each takes a second to export
    torch.manual_seed(2)
    heads = {"mood": ClassHead(16, 2, pooled=True), "names": CRFHead(16, 3)}
    heads["answer"] = ClassHead(16, 2)
    model = Model(build_encoder(config), heads, {name: name for name in heads})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    outputs = {
        "mood": HeadOutputs(labels=("bad", "good")),
        "names": HeadOutputs(labels=("B", "I", "O")),
    }
    outputs["answer"] = HeadOutputs(head_class="ForQuestionAnswering")
    head_of = {name: name for name in heads}
    info = WeightsInfo(backbone=config, head_of=head_of, token_heads=("answer",), heads=outputs)
    save_weights(model, folder / "source", info, tokenizer=tokenizer)
    convert_to_onnx(folder / "source", folder / "out")
    return folder


def output_of(folder: Path, *arguments: str) -> list[dict]:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(FOLDER / "run.py"), str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_python_without_torch(converted: Path) -> None:
    """SentencePiece ids from tokenizer.json, truncated, padded: predictions as with our tokenizer
    and each text alone."""
    out = converted / "out"
    found = output_of(out, *TEXTS)
    assert [each["text"] for each in found] == TEXTS
    graph, tokenizer = (
        OnnxModel(out / "onnx" / "model.onnx", read_description(out)),
        load_tokenizer(out),
    )
    for line, (ids, _) in zip(found, tokenizer.encode_texts(TEXTS), strict=True):
        known = tokenizer.vocabulary
        row = np.array([[known.cls, *ids[:38], known.sep]])
        scores = graph.run({"input_ids": row, "attention_mask": np.ones_like(row)})["logits_mood"][
            0
        ]
        shares = np.exp(scores) / np.exp(scores).sum()
        assert list(line["mood"].values()) == pytest.approx(shares.tolist(), abs=1e-5)
        assert list(line["mood"]) == ["bad", "good"]
        assert all(tag in "BIO" for _, tag in line["names"])
    assert len(found[0]["names"]) == 6, "a tag for each word"
    (pair,) = output_of(out, "--pair", "cat", "the cat sat on a mat")
    assert pair["answer"] and pair["answer"] in "the cat sat on a mat"
    (nothing,) = output_of(out, "--pair", "cat", "")
    assert nothing["answer"] == ""  # a traceback: max() of no spans


def test_a_graph_without_vectors(converted: Path, tmp_path: Path) -> None:
    """As that of a SPLADE, or of a model whose vectors depend on a Dense."""
    out = shutil.copytree(converted / "out", tmp_path / "out")
    about = json.loads((out / "palm_ds_onnx.json").read_text())
    about |= {"embedding": None, "outputs": [x for x in about["outputs"] if "embedding" not in x]}
    model = onnx.load(out / "onnx/model.onnx")
    kept = [x for x in model.graph.output if x.name in about["outputs"]]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    onnx.save(model, out / "onnx/model.onnx")
    (out / "palm_ds_onnx.json").write_text(json.dumps(about))
    assert list(output_of(out, "cat")[0]) == ["text", "mood", "names"]
    (out / "palm_ds_onnx.json").write_text(json.dumps(about | {"heads": {}}))
    done = subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), str(out), "cat"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.endswith("its graph has no head for this, and no sentence_embedding\n")


def test_its_vectors_are_those_of_palm_ds_embed(converted: Path) -> None:
    run = runpy.run_path(str(FOLDER / "run.py"))
    found = run["OnnxFolder"](converted / "out").vectors(TEXTS)
    assert (
        np.abs(found - TrainedModel.open(converted / "source").embedder().embed(TEXTS)).max() < 1e-5
    )


def test_only_vectors_are_of_texts_cut_at_their_length(converted: Path, tmp_path: Path) -> None:
    """A run may train vectors of short texts, and classes of long ones."""
    out = shutil.copytree(converted / "out", tmp_path / "out")
    about = json.loads((out / "palm_ds_onnx.json").read_text())
    about["embedding"]["max_length"] = 6
    (out / "palm_ds_onnx.json").write_text(json.dumps(about))
    run = runpy.run_path(str(FOLDER / "run.py"))
    usual, short = (run["OnnxFolder"](folder) for folder in (converted / "out", out))
    assert short.predict(TEXTS, "mood") == usual.predict(TEXTS, "mood")
    cut = usual.run(usual.encode(TEXTS, 6), ["sentence_embedding"])["sentence_embedding"]
    assert np.array_equal(short.vectors(TEXTS), cut)
    assert not np.allclose(cut[-1], usual.vectors(TEXTS)[-1])


def test_cpp(converted: Path, tmp_path: Path) -> None:
    """Built with the compiler found here, against the library of the Python package."""
    if not (shutil.which("cmake") and shutil.which("c++")):
        pytest.skip("needs cmake and a C++ compiler")
    libraries = sorted((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"))
    if not libraries:
        pytest.skip("this onnxruntime has no shared library")
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (tmp_path / name).symlink_to(libraries[0])
    settings = [
        f"-DONNXRUNTIME_HEADERS={HEADER}",
        f"-DONNXRUNTIME_LIBRARY={tmp_path / 'libonnxruntime.so'}",
        "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror",
    ]
    build = tmp_path / "build"
    for command in (["cmake", "-S", FOLDER, "-B", build, *settings], ["cmake", "--build", build]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    out = converted / "out"
    graph = OnnxModel(out / "onnx" / "model.onnx", read_description(out))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = [str(build / "run_onnx"), str(out / "onnx" / "model.onnx")]
        paths = {"LD_LIBRARY_PATH": str(tmp_path)}
        return subprocess.run([*program, *arguments], capture_output=True, text=True, env=paths)

    for output in ("logits_mood", "sentence_embedding", "tags_names"):
        ids = [[1, 7, 8, 9, 2], [1, 6, 2]]
        arguments = [*map(str, ids[0]), ",", *map(str, ids[1])]
        done = run(output, *arguments)
        assert done.returncode == 0, done.stderr
        lines = [[float(x) for x in line.split()] for line in done.stdout.splitlines()]
        for text, line in zip(ids, lines, strict=True):
            given = np.array([text])
            words = np.array([[0, *[1] * (len(text) - 2), 0]])
            values = {"input_ids": given, "attention_mask": given * 0 + 1, "word_mask": words}
            wanted = graph.run(values)[output][0].tolist()
            assert line[: len(wanted)] == pytest.approx(wanted, abs=1e-5)
    for arguments in ([], ["nothing", "1", "2"], ["logits_mood", "x"]):
        done = run(*arguments)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
