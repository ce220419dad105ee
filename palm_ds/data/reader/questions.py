"""SQuAD's format: articles of paragraphs of questions, with their places for messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from palm_ds.corpus.input.records import type_name

Found = tuple[str, dict[str, Any], str]  # place, values, and what is wrong with them


def questions(articles: list[Any]) -> Iterator[Found]:
    """One row per question: id, question, context, answers, impossible. v1.1 has no
    `is_impossible`; a file without any answers is for prediction."""
    rows = [row for number, article in enumerate(articles, 1) for row in _article(article, number)]
    answered = any(row[1].get("answers") is not None for row in rows)
    for place, values, bad in rows:
        if not answered:
            values.pop("answers", None)
            values.pop("impossible", None)
        yield place, values, bad


def _article(article: object, number: int) -> Iterator[Found]:
    place = f"article {number}"
    paragraphs = article.get("paragraphs") if isinstance(article, dict) else None
    if not isinstance(paragraphs, list):
        yield place, {}, "no list `paragraphs`"
        return
    for at, paragraph in enumerate(paragraphs, 1):
        yield from _paragraph(paragraph, f"{place}, paragraph {at}")


def _paragraph(paragraph: object, place: str) -> Iterator[Found]:
    if not isinstance(paragraph, dict) or not isinstance(paragraph.get("context"), str):
        yield place, {}, "no text `context`"
    elif not isinstance(paragraph.get("qas"), list):
        yield place, {}, "no list `qas`"
    else:
        for at, item in enumerate(paragraph["qas"], 1):
            yield _question(item, paragraph["context"], f"{place}, question {at}")


def _question(item: object, context: str, place: str) -> Found:
    if not isinstance(item, dict):
        return place, {}, f"expected an object, got a JSON {type_name(item)}"
    identity = item.get("id")
    if not isinstance(identity, str | int) or isinstance(identity, bool) or identity == "":
        return place, {}, "no `id`"
    values = {
        "id": identity,
        "question": item.get("question"),
        "context": context,
        "answers": item.get("answers"),
        "impossible": item.get("is_impossible", False),
    }
    return f"question {' '.join(str(identity).split())}", values, ""
