"""The heads of a transformers folder predict what transformers does: here RoBERTa's, whose
tokenizer puts two separators between two texts and gives both one token type."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import transformers
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from palm_ds.api.loaded_model import load
from palm_ds.common.errors import UserError
from palm_ds.data.tasks.interfaces import ImportedHead
from palm_ds.data.tasks.task import find, fine_tuning_kinds
from palm_ds.weights.convert.to_onnx import OnnxOptions, convert_to_onnx

PAIRS = [("so good", "x"), ("", "very bad"), ("a " * 9, "so bad ? " * 20), ("good " * 40, "bad")]
CLASSES = {
    "sequence": transformers.RobertaForSequenceClassification,
    "choice": transformers.RobertaForMultipleChoice,
    "answer": transformers.RobertaForQuestionAnswering,
}


def roberta(folder: Path, head: str, **config: Any) -> Path:
    """A random RoBERTa of 46 positions with a head, and its byte-level tokenizer."""
    known = {x: i for i, x in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])}
    known |= {x: len(known) + i for i, x in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    backend = Backend(models.BPE(known, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    backend.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    tokenizer = transformers.RobertaTokenizer(tokenizer_object=backend, model_max_length=44)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    small: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"type_vocab_size": 1, "initializer_range": 0.3, "intermediate_size": 32}
    model = CLASSES[head](
        transformers.RobertaConfig(
            vocab_size=len(known),
            max_position_embeddings=46,
            pad_token_id=1,
            bos_token_id=0,
            eos_token_id=2,
            **{**small, **config},
        )
    )
    model.save_pretrained(folder)
    return folder


def predicted(folder: Path, rows: Any) -> list[dict[str, Any]]:
    (predictions,) = load(folder).predict(rows).values()
    return predictions


@pytest.mark.parametrize("types", [1, 2])
def test_pairs_are_joined_with_two_separators(types: int, tmp_path: Path) -> None:
    folder = roberta(tmp_path / "hf", "sequence", type_vocab_size=types, num_labels=3)
    pipeline: Any = transformers.pipeline
    classify = pipeline("text-classification", model=str(folder), device="cpu")
    given = [{"text": a, "text_pair": b} for a, b in PAIRS]
    theirs = classify(given, top_k=None, truncation=True)
    for mine, found in zip(predicted(folder, PAIRS), theirs, strict=True):
        scores = {each["label"]: each["score"] for each in found}
        probs = [scores[f"LABEL_{number}"] for number in range(3)]
        assert mine["probs"] == pytest.approx(probs, abs=1e-5)


def test_the_only_one_of_several_labels_has_a_probability(tmp_path: Path) -> None:
    more = {"num_labels": 1, "problem_type": "multi_label_classification"}
    folder = roberta(tmp_path / "hf", "sequence", **more)
    pipeline: Any = transformers.pipeline
    (theirs,) = pipeline("text-classification", model=str(folder), device="cpu")(["so good"])
    (mine,) = predicted(folder, ["so good"])
    assert mine["probs"] == pytest.approx([theirs["score"]], abs=1e-5)


def test_several_numbers_are_refused_in_one_line(tmp_path: Path) -> None:
    folder = roberta(tmp_path / "hf", "sequence", num_labels=3, problem_type="regression")
    with pytest.raises(UserError, match="'classifier' predicts 3 numbers .problem_type regression"):
        predicted(folder, ["so good"])


def test_choices_follow_two_separators(tmp_path: Path) -> None:
    folder = roberta(tmp_path / "hf", "choice")
    model = CLASSES["choice"].from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    choices = ["so good", "bad ?", "x"]
    given = tokenizer(["a x"] * 3, choices, padding=True, return_tensors="pt")
    with torch.no_grad():
        wanted = model(**{name: x[None] for name, x in given.items()}).logits.softmax(-1)[0]
    (mine,) = predicted(folder, [{"text_a": "a x", "choices": choices}])
    assert mine["probs"] == pytest.approx(wanted.tolist(), abs=1e-5)


def test_a_context_follows_two_separators(tmp_path: Path) -> None:
    """Every span of the context competes, and palm_ds finds the one of transformers' scores."""
    folder = roberta(tmp_path / "hf", "answer")
    model = CLASSES["answer"].from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    question, context = "good", "so very bad a x good"
    given = tokenizer(question, context, return_tensors="pt")
    with torch.no_grad():
        scores = model(**given)
    first = given["input_ids"].shape[1] - 1 - len(context)  # a token for each character
    sums = scores.start_logits[0][:, None] + scores.end_logits[0][None]
    sums = sums[first:-1, first:-1].masked_fill(
        ~torch.ones(len(context), len(context)).triu().bool(), -np.inf
    )
    start, end = divmod(int(sums.argmax()), len(context))
    (mine,) = predicted(folder, [{"question": question, "context": context}])
    assert mine["text"].strip() == context[start : end + 1].strip()


@pytest.mark.exhaustive  # test_onnx_scores.py has texts and pairs by default
def test_onnx_reads_the_same_pairs(tmp_path: Path) -> None:
    """The graph, given the ids of the written tokenizer, against palm_ds."""
    runtime: Any = pytest.importorskip("onnxruntime")
    folder = roberta(tmp_path / "hf", "sequence", num_labels=2, num_hidden_layers=1)
    convert_to_onnx(folder, tmp_path / "onnx", OnnxOptions(verify=False))
    session = runtime.InferenceSession(str(tmp_path / "onnx/onnx/model.onnx"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "onnx")
    for pair, mine in zip(PAIRS, predicted(folder, PAIRS), strict=True):
        given = tokenizer(*pair, truncation=True, return_tensors="np")
        (logits,) = session.run(["logits"], dict(given))
        assert logits[0].tolist() == pytest.approx(mine["logits"], abs=1e-5)


def test_one_task_decodes_each_head_of_transformers() -> None:
    found = [find(kind).imports for kind in fine_tuning_kinds()]
    assert sorted(filter(None, found)) == sorted(get_args(ImportedHead))
