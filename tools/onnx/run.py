"""Runs a folder of `palm-ds convert --to onnx` without torch: numpy, tokenizers, onnxruntime.

python tools/onnx/run.py FOLDER "a text" "another"           one line of JSON for each text
python tools/onnx/run.py FOLDER --file model_int8.onnx ...   another of its files
python tools/onnx/run.py FOLDER --pair "a question" "a text"
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnxruntime
from tokenizers import Encoding, Tokenizer


class OnnxFolder:
    """A graph with its tokenizer."""

    def __init__(self, folder: Path, file: str = "model.onnx", threads: int = 0):
        self.about = json.loads((folder / "palm_ds_onnx.json").read_text("utf-8"))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        path = str(folder / "onnx" / file)
        self.session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()

    def encode(self, texts: list[Any], longest: int = 0) -> list[Encoding]:
        """Texts, or pairs of texts, as ids with their special tokens, at most `longest`, or as many
        as the encoder reads."""
        self.tokenizer.enable_truncation(longest or self.about["max_length"])
        return self.tokenizer.encode_batch(texts)

    def run(self, encoded: list[Encoding], outputs: list[str] | None = None) -> dict[str, Any]:
        """{output: array} of a batch, padded to its longest text."""
        longest = max(len(each.ids) for each in encoded)
        shape = (len(encoded), longest)
        values = {name: np.zeros(shape, np.int64) for name in self.about["inputs"]}
        values["input_ids"] += self.about["pad"]
        for row, each in enumerate(encoded):
            at = slice(0, len(each.ids))
            values["input_ids"][row, at] = each.ids
            values["attention_mask"][row, at] = 1
            if "token_type_ids" in values:
                values["token_type_ids"][row, at] = each.type_ids
            if "word_mask" in values:
                values["word_mask"][row, at] = word_starts(each)
        names = outputs or self.about["outputs"]
        return dict(zip(names, self.session.run(names, values), strict=True))

    def vectors(self, texts: list[str]) -> np.ndarray:
        """(texts, hidden): the embeddings of texts."""
        encoded = self.encode(texts, self.about["embedding"]["max_length"])
        return self.run(encoded, ["sentence_embedding"])["sentence_embedding"]

    def predict(self, texts: list[Any], head: str) -> list[Any]:
        """A head's prediction for each text or pair: {class: probability}, a number, the tags of
        words with a CRF, the classes of tokens, or the answer in the second text of a pair."""
        about, encoded = self.about["heads"][head], self.encode(texts)
        names = [about["tags"]] if about["tags"] else about["outputs"]
        found = self.run(encoded, names)
        if len(names) == 2:
            return [
                _answer(text[-1], each, start, end)
                for text, each, start, end in zip(
                    texts, encoded, found[names[0]], found[names[1]], strict=True
                )
            ]
        scores = np.stack([found[name] for name in names], -1)
        if about["reads"] == "tokens":
            return [
                _tokens(values[: len(each.ids), 0], each, about)
                for values, each in zip(scores, encoded, strict=True)
            ]
        return [_meaning(row[:, 0], about) for row in scores]


def word_starts(encoding: Encoding) -> list[int]:
    """1 at the first token of each word of the first text."""
    words = [None, *encoding.word_ids[:-1]]
    return [
        int(word is not None and word != before)
        for before, word in zip(words, encoding.word_ids, strict=True)
    ]


def _meaning(scores: np.ndarray, about: dict[str, Any]) -> Any:
    """{class: probability}, or the number."""
    if len(scores) == 1:
        return float(scores[0])
    if about["problem_type"] == "multi_label_classification":
        shares = 1 / (1 + np.exp(-scores))
    else:
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
    names = about["labels"] or [str(number) for number in range(len(scores))]
    return dict(zip(names, shares.tolist(), strict=True))


def _tokens(values: np.ndarray, encoding: Encoding, about: dict[str, Any]) -> Any:
    """[(first token, tag)] of the words with a CRF, else [(token, best class)]."""
    labels, tokens = about["labels"], encoding.tokens
    if about["tags"]:
        words = [number for number, tag in enumerate(values) if tag >= 0]
        return [(tokens[n], labels[values[n]] if labels else int(values[n])) for n in words]
    best = values.argmax(-1).tolist()
    return list(zip(tokens, [labels[x] for x in best] if labels else best, strict=True))


def _answer(text: str, encoding: Encoding, start: np.ndarray, end: np.ndarray) -> str:
    """The part of the second text with the highest start + end score, of at most 30 tokens; empty
    if the input has none of the text."""
    inside = [n for n, sequence in enumerate(encoding.sequence_ids) if sequence == 1]
    spans = [(a, b) for a in inside for b in inside if a <= b < a + 30]
    if not spans:
        return ""
    first, last = max(spans, key=lambda span: start[span[0]] + end[span[1]])
    return text[encoding.offsets[first][0] : encoding.offsets[last][1]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs a folder of palm-ds convert --to onnx.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--file", default="model.onnx")
    parser.add_argument("--pair", action="store_true", help="the texts are one pair")
    args = parser.parse_args()
    if args.pair and len(args.texts) != 2:
        parser.error(f"--pair: expected two texts, got {len(args.texts)}")
    model = OnnxFolder(args.folder, args.file)
    texts = [tuple(args.texts)] if args.pair else args.texts
    heads = {n: x for n, x in model.about["heads"].items() if args.pair or len(x["outputs"]) == 1}
    found = {name: model.predict(texts, name) for name in heads}
    if not found and (args.pair or not model.about["embedding"]):
        parser.error(f"{args.folder}: its graph has no head for this, and no sentence_embedding")
    vectors = None if found else model.vectors(args.texts)
    for number, text in enumerate(texts):
        line: dict[str, Any] = {"text": text} | {name: x[number] for name, x in found.items()}
        if vectors is not None:
            line["vector"] = [round(float(x), 6) for x in vectors[number]]
        print(json.dumps(line, ensure_ascii=False))


if __name__ == "__main__":
    main()
