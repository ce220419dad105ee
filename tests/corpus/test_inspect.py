"""How documents are displayed."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from palm_ds.common.errors import UserError
from palm_ds.corpus.inspect import as_record, as_text, heading, open_documents
from palm_ds.corpus.options import InputOptions, TextOptions
from palm_ds.corpus.prepare import PrepareOptions, prepare
from palm_ds.text.tokenizer import SPECIALS


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect")
    text = "They saw New York. The new machine learning is unlearnable.\n\n我们在北京学习。\n"
    (folder / "a.txt").write_text(text)
    words = [
        "they",
        "saw",
        "new",
        "york",
        ".",
        "the",
        "machine",
        "learning",
        "is",
        "un",
        "##learn",
        "##able",
    ]
    tokens = [*SPECIALS, *words, *"我们在北京学习。"]
    (folder / "vocab.txt").write_text("\n".join(tokens), "utf-8")
    (folder / "phrases.txt").write_text("machine learning\nnew york\n")
    options = PrepareOptions(
        tokenizer=str(folder / "vocab.txt"),
        text=TextOptions(lexicon_phrase=(str(folder / "phrases.txt"),)),
    )
    prepare(folder / "corpus", [str(folder / "a.txt")], options)
    return folder / "corpus"


def shown(corpus: Path, **options) -> str:
    console = Console(width=400, record=True, force_terminal=True, quiet=False)
    with console.capture() as capture:
        opened, found = open_documents(corpus, **options)
        console.print(heading(opened))
        for name, piece in found:
            console.print(as_text(name, piece, opened, opened.tokenizer()))
    return capture.get()


def plain(text: str) -> str:
    import re

    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_sentences_words_phrases_and_entities(corpus: Path) -> None:
    text = plain(shown(corpus, documents=2)).replace("·", "")
    assert "0  They saw [{New York}] ." in text
    assert "1  The new [machine learning] is unlearnable ." in text
    assert "2 documents" in text and "a.txt@0" in text


def test_colors_and_token_ends(corpus: Path) -> None:
    text = shown(corpus, documents=1)
    assert "\x1b[1;33m[{" in text  # a phrase and an entity, yellow
    assert "\x1b[1;36m[" in text  # a phrase, cyan
    assert "·" in plain(text)  # a word of several tokens


def test_selecting_documents(corpus: Path) -> None:
    text = plain(shown(corpus, documents=5, first=1))
    assert "a.txt@0" not in text and "a.txt@61" in text
    for options in ({"documents": 0}, {"documents": 1, "first": 2}, {"documents": 1, "first": -1}):
        with pytest.raises(UserError, match="--"):
            shown(corpus, **options)


def prepared(folder: Path, name: str, content: str, **options) -> Path:
    (folder / "vocab.txt").write_text("\n".join([*SPECIALS, *"abcdefgh.!"]), "utf-8")
    (folder / name).write_text(content)
    source = InputOptions(**options)
    tokenizer = str(folder / "vocab.txt")
    prepare(folder / "c", [str(folder / name)], PrepareOptions(tokenizer=tokenizer, input=source))
    return folder / "c"


def test_labels_of_pairs(tmp_path: Path) -> None:
    content = "text_a\ttext_b\tlabel\na b. C\td\tbut\ne\tf\tand\n"
    text = plain(shown(prepared(tmp_path, "a.tsv", content, format="pairs"), documents=2))
    assert "2 labels: and, but\n" in text
    assert "(5 tokens)  label but (1)\n   0  a b . C\n   1  d\n" in text
    assert "(2 tokens)  label and (0)\n   0  e\n   1  f\n" in text


def test_pairs_without_labels(tmp_path: Path) -> None:
    folder = prepared(tmp_path, "a.tsv", "q\tr\na\tb\n", format="pairs", pair_fields=("q", "r"))
    text = plain(shown(folder, documents=1))
    assert "pairs without label" in text and "(2 tokens)\n" in text


def test_speakers(tmp_path: Path) -> None:
    content = '{"id": "x", "turns": [["u", "a b."], ["s", "c"], ["u", "d"]]}'
    text = shown(prepared(tmp_path, "a.jsonl", content, format="dialogues"), documents=1)
    assert "before a turn its speaker's number" in plain(text)
    assert "   0  0: a b .\n   1  1: c\n   2  0: d\n" in plain(text)
    assert "\x1b[34m0: " in text and "\x1b[32m1: " in text


def test_titles(tmp_path: Path) -> None:
    content = '{"title": "A b! C", "text": "d e."}'
    text = plain(shown(prepared(tmp_path, "a.jsonl", content, title_field="title"), documents=1))
    assert "; # heading" in text and "   0  # a b ! c\n   1  d e .\n" in text.lower()


def test_a_corpus_of_ernie_lines(tmp_path: Path) -> None:
    line = "2 5 6 3 7 3;0 0 0 0 1 1;0 1 2 3 4 5;-1 0 1 -1 0 -1;1"
    text = plain(shown(prepared(tmp_path, "a", line, format="ernie"), documents=1))
    assert "label 1  words masked whole: 100 %\n   0  a·b\n   1  c\n" in text


def test_a_document_as_plain_values(corpus: Path) -> None:
    opened, found = open_documents(corpus, documents=1)
    name, piece = next(found)
    record = as_record(name, piece, opened.tokenizer())
    assert record["id"] == "a.txt@0" and record["tokens"][:4] == ["they", "saw", "new", "york"]
    assert record["annotations"]["entity"][:5] == [0, 0, 1, 2, 0]
