"""SQuAD's format: articles of paragraphs of questions, with their places for messages; and
CMRC2018's own, passages of questions whose answers have no places."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from palm_ds.common.rows.lines import type_name

Found = tuple[str, dict[str, Any], str]  # place, values, and what is wrong with them


def is_questions(item: object) -> bool:
    """Whether an object of a file is an article of SQuAD's format, or a passage of CMRC2018's."""
    return isinstance(item, dict) and ("paragraphs" in item or "context_text" in item)


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
    if isinstance(article, dict) and "context_text" in article:
        yield from _paragraph(_squads(article), f"passage {number}")
        return
    place = f"article {number}"
    paragraphs = article.get("paragraphs") if isinstance(article, dict) else None
    if not isinstance(paragraphs, list):
        yield place, {}, "no list `paragraphs`"
        return
    for at, paragraph in enumerate(paragraphs, 1):
        yield from _paragraph(paragraph, f"{place}, paragraph {at}")


def _squads(passage: dict[str, Any]) -> dict[str, Any]:
    """CMRC2018's passage as a paragraph of SQuAD's format: an answer is where it first occurs."""
    context, items = passage["context_text"], passage.get("qas")
    if not isinstance(context, str) or not isinstance(items, list):
        return {"context": context, "qas": items}
    qas = []
    for item in items:
        if not isinstance(item, dict):
            qas.append(item)
            continue
        answers = item.get("answers")
        if isinstance(answers, list) and all(isinstance(answer, str) for answer in answers):
            answers = [
                {"text": answer, "answer_start": max(context.find(answer), 0)} for answer in answers
            ]
        named = {"id": item.get("query_id"), "question": item.get("query_text")}
        qas.append({**named, "answers": answers})
    return {"context": context, "qas": qas}


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
