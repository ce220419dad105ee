"""A tokenizer in the layout of ERNIE tiny's release, trained on a few sentences."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping
from pathlib import Path

from palm_ds.text.tokenizer import SPECIALS

TEXTS = [
    "自然语言处理是人工智能的一个方向",
    "预训练语言模型ERNIE 2.0 学习知识",
    "这是个测试样例",
    "深度学习 框架 PaddlePaddle支持 多任务学习。",
    "语言模型学习语言，语言是人的语言。",
    "The model reads 语言 and text",
]
DICTIONARY = {
    *(
        "自然语言处理",
        "自然语言",
        "自然",
        "语言",
        "处理",
        "人工智能",
        "人工",
        "智能",
        "一个",
        "方向",
    ),
    *("预训练", "训练", "语言模型", "模型", "学习", "知识", "测试", "样例", "深度学习", "框架"),
    *("支持", "任务", "多任务", "ERNIE", "Model"),
}


FRONT = ("[PAD]", "[UNK]", "[MASK]", "[CLS]", "[UNUSED]", "[SEP]", "<unk>")
"""What PaddleHub's vocab.txt begins with."""


def write_release(
    folder: Path, config: Mapping[str, object] | None = None, *, hub: bool = False
) -> Path:
    """vocab.txt with pieces and ids, subword/ with model and dictionary; `config`:
    tokenizer_config.json. `hub`: as PaddleHub has it, all in one folder and without ids."""
    import sentencepiece as spm

    model = io.BytesIO()
    spaced = [" ".join(_cut(text)).lower() for text in TEXTS]
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([*spaced, *(text.lower() for text in TEXTS)]),
        model_writer=model,
        vocab_size=170,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    pieces = spm.SentencePieceProcessor(model_proto=model.getvalue())
    names = [pieces.id_to_piece(i) for i in range(pieces.get_piece_size())][3:]
    lines = [f"{token}\t{n}\n" for n, token in enumerate([*SPECIALS, *reversed(names)])]
    if hub:
        lines = [f"{token}\n" for token in (*FRONT, *names)]
    inner = folder if hub else folder / "subword"
    inner.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("".join(lines), "utf-8")
    (inner / "spm_cased_simp_sampled.model").write_bytes(model.getvalue())
    (inner / "dict.wordseg.pickle").write_bytes(pickle.dumps(DICTIONARY, 2))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _cut(text: str) -> list[str]:
    """The words of the dictionary, longest first, and the characters between."""
    words = []
    while text:
        found = next((text[:n] for n in (5, 4, 3, 2) if text[:n] in DICTIONARY), text[0])
        words.append(found)
        text = text[len(found) :]
    return words
