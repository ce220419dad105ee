"""Every real data set opens with the settings given here and has the published counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from palm_ds.common.config import parse
from palm_ds.data.reader import Table, TableSettings, open_table

CONLL = {"format": "conll"}
COLA = {"header": False, "columns": {"text_a": 3, "label": 1}}
MRPC = {"columns": {"text_a": "#1 String", "text_b": "#2 String", "label": "Quality"}}
SICK_TEXTS = {"text_a": "sentence_A", "text_b": "sentence_B", "id": "pair_ID"}
SICK = {"format": "tsv", "columns": {**SICK_TEXTS, "label": "entailment_judgment"}}
RELATEDNESS = {"format": "tsv", "columns": {**SICK_TEXTS, "label": "relatedness_score"}}
STSB = {"header": False, "columns": {"text_a": 0, "text_b": 1, "label": 2}}
CMRC = {"lost_answers": "keep"}
SENTIMENT = {"header": False, "columns": {"text_a": 0, "label": 1}}
MSRA = {"header": False, "columns": {"id": 0, "tokens": 1, "tags": 2}}
TNEWS = {"columns": {"label": "label_desc"}}
WSC = {"columns": {"text_b": ["target.span1_text", "target.span2_text"]}}
OCNLI = {"drop": {"label": ["-"]}}
QBQTC = {"columns": {"text_a": "query", "text_b": "title", "qid": "query"}}
FAQ = {"columns": {"text_a": "question", "text_b": "answer", "label": "source"}}
SIMILAR = {"columns": {"text_a": "question_1", "text_b": "question_2", "label": "similar"}}
DOCUMENTS = {"format": "smart", "columns": {"id": "I", "text_a": "W"}}
JUDGMENTS = {
    "format": "tsv",
    "header": False,
    "delimiter": " ",
    "columns": {"qid": 0, "id": 1, "label": 2},
}


@dataclass(frozen=True)
class Expected:
    """A data set: its file, its settings in a recipe, its rows and labels, and the notes about
    it."""

    file: str
    settings: Mapping[str, Any]
    rows: int
    labels: Mapping[str, int]
    noted: tuple[int, ...] = ()


def labels(**counts: int) -> dict[str, int]:
    return {name.lstrip("_"): count for name, count in counts.items()}


NLI = ("NEUTRAL", "ENTAILMENT", "CONTRADICTION")
WNUT = ("person", "location", "group", "corporation", "product", "creative-work")
SLOTS = ("people", "time", "date", "last_name", "first_name")
CLUENER = (
    "name", "organization", "position", "company", "address",
    "game", "government", "scene", "book", "movie",
)  # fmt: skip
NEWS = (
    "agriculture", "car", "culture", "edu", "entertainment", "finance", "game", "house",
    "military", "sports", "stock", "story", "tech", "travel", "world",
)  # fmt: skip


def each(names: Iterable[str], *counts: int) -> dict[str, int]:
    return dict(zip(names, counts, strict=True))


DATA = [
    Expected("en/sst2/train.tsv", {}, 60614, labels(_1=33828, _0=26786)),
    Expected("en/sst2/dev.tsv", {}, 6735, labels(_1=3741, _0=2994)),
    Expected("en/sst2/test.tsv", {}, 872, labels(_1=444, _0=428)),
    Expected("en/cola/in_domain_train.tsv", COLA, 8551, labels(_1=6023, _0=2528)),
    Expected("en/cola/in_domain_dev.tsv", COLA, 527, labels(_1=365, _0=162)),
    Expected("en/cola/out_of_domain_dev.tsv", COLA, 516, labels(_1=354, _0=162)),
    Expected("en/mrpc/msr-para-train.tsv", MRPC, 3576, labels(_1=2407, _0=1169)),
    Expected("en/mrpc/msr-para-val.tsv", MRPC, 500, labels(_1=346, _0=154)),
    Expected("en/mrpc/msr-para-test.tsv", MRPC, 1725, labels(_1=1147, _0=578)),
    Expected("en/sick/SICK_train.txt", SICK, 4500, each(NLI, 2536, 1299, 665)),
    Expected("en/sick/SICK_trial.txt", SICK, 500, each(NLI, 282, 144, 74)),
    Expected("en/sick/SICK_test_annotated.txt", SICK, 4927, each(NLI, 2793, 1414, 720)),
    Expected("en/restaurant8k/train_0.json", {}, 8198, each(SLOTS, 2164, 1972, 1721, 891, 887)),
    Expected("en/restaurant8k/test.json", {}, 3731, each(SLOTS, 983, 853, 802, 426, 413)),
    Expected("en/wnut17/wnut17train.conll", CONLL, 3394, each(WNUT, 660, 548, 264, 221, 142, 140)),
    Expected("en/wnut17/emerging.dev.conll", CONLL, 1009, each(WNUT, 470, 74, 39, 34, 114, 105)),
    Expected(
        "en/wnut17/emerging.test.annotated", CONLL, 1287, each(WNUT, 429, 150, 165, 66, 127, 142)
    ),
    # 1841 with the 145 -DOCSTART- lines
    Expected(
        "en/wikigold/wikigold.conll.txt",
        CONLL,
        1841 - 145,
        labels(LOC=1014, PER=934, ORG=898, MISC=712),
    ),
    Expected(
        "zh/cluener/train.json",
        {},
        10748,
        each(CLUENER, 3756, 3210, 3141, 2980, 2891, 2376, 1835, 1521, 1139, 1123),
    ),
    Expected(
        "zh/cluener/dev.json",
        {},
        1343,
        each(CLUENER, 465, 367, 433, 378, 373, 295, 247, 209, 154, 151),
    ),
    Expected("zh/msra_ner_sample/train.tsv", MSRA, 800, labels(LOC=603, ORG=386, PER=324)),
    Expected("zh/msra_ner_sample/dev.tsv", MSRA, 500, labels(LOC=437, ORG=250, PER=184)),
    Expected("zh/msra_ner_sample/test.tsv", MSRA, 500, labels(LOC=216, PER=178, ORG=166)),
    Expected(
        "zh/chnsenticorp_htl/ChnSentiCorp_htl_all.csv",
        {"columns": {"text_a": "review"}},
        7766,
        labels(_1=5322, _0=2444),
        (1,),
    ),
    Expected("zh/ernie_senti_demo/multi_train.tsv", SENTIMENT, 2000, labels(_0=1003, _1=997)),
    Expected("zh/ernie_senti_demo/multi_dev.tsv", SENTIMENT, 500, labels(_1=251, _0=249)),
    Expected("zh/ernie_senti_demo/multi_test.tsv", SENTIMENT, 500, labels(_1=251, _0=249)),
    Expected(
        "zh/fewclue_tnews/test_public.json", TNEWS, 2010, {f"news_{name}": 134 for name in NEWS}
    ),
    Expected("zh/fewclue_bustm/train_few_all.json", {}, 160, labels(_0=90, _1=70)),
    Expected("zh/fewclue_bustm/dev_few_all.json", {}, 160, labels(_0=82, _1=78)),
    Expected("zh/fewclue_bustm/test_public.json", {}, 1772, labels(_0=886, _1=886)),
    Expected("zh/fewclue_cluewsc/train_few_all.json", WSC, 160, labels(true=82, false=78)),
    Expected("zh/fewclue_cluewsc/dev_few_all.json", WSC, 159, labels(true=80, false=79)),
    Expected("zh/fewclue_cluewsc/test_public.json", WSC, 976, labels(true=488, false=488)),
    Expected(
        "zh/ocnli/train.10k.json",
        OCNLI,
        10000 - 15,
        labels(neutral=3434, entailment=3309, contradiction=3242),
        (15,),
    ),
    Expected(
        "zh/ocnli/dev.json",
        OCNLI,
        3000 - 50,
        labels(neutral=1103, entailment=947, contradiction=900),
        (50,),
    ),
    Expected("zh/qbqtc/dev.json", QBQTC, 20000, labels(_1=12592, _0=4894, _2=2514)),
    Expected("en/covid_faq/eval_question_similarity_en.csv", SIMILAR, 488, labels(_0=244, _1=244)),
    Expected(
        "en/cranfield/cranqrel.q001-150", JUDGMENTS, 1154, labels(_3=442, _2=259, _4=231, _1=222)
    ),
]


def counted(table: Table) -> Counter[str]:
    """Labels, spans or chunks of a table by name."""
    if "label" in table.columns:
        return Counter(table.column("label"))
    if "spans" in table.columns:
        return Counter(span["type"] for spans in table.column("spans") for span in spans)
    return Counter(kind for tags in table.column("tags") for kind in chunks(tags))


def chunks(tags: list[str]) -> list[str]:
    """The kinds of a sentence's chunks, by CoNLL's rules for B- and I-."""
    before = ["O", *tags[:-1]]
    return [
        tag[2:]
        for last, tag in zip(before, tags, strict=True)
        if tag[:2] == "B-" or (tag[:2] == "I-" and last[2:] != tag[2:])
    ]


def opened(shared: Path, file: str, settings: Mapping[str, Any]) -> Table:
    """As a recipe would open it: the settings are parsed."""
    path = shared / "data" / "finetune" / file
    return open_table(str(path), parse(TableSettings, settings, "sources.x"))


@pytest.mark.parametrize("data", DATA, ids=lambda data: data.file)
def test_rows_and_labels(data: Expected, shared: Path) -> None:
    table = opened(shared, data.file, data.settings)
    assert (len(table), counted(table)) == (data.rows, data.labels)
    assert [int(note.split(" x ")[0]) for note in table.notes] == list(data.noted)


READING = [
    ("en/xquad/xquad.en.articles00-35.json", 925, 925, 0),
    ("zh/xquad/xquad.zh.articles00-35.json", 925, 925, 0),
    ("zh/drcd/DRCD_dev.json", 3524, 7048, 0),
    ("zh/cmrc2018/cmrc2018_dev.json", 3219, 9657, 200),
    ("zh/cmrc2018/cmrc2018_trial.json", 1002, 1002, 5),
    ("../ernie/palm_test_data/mrqa_train.json", 99, 99, 0),
    ("../ernie/palm_test_data/mrqa_dev.json", 28, None, 0),
]


@pytest.mark.parametrize(("file", "rows", "answers", "moved"), READING)
def test_questions_and_answers(
    file: str, rows: int, answers: int | None, moved: int, shared: Path
) -> None:
    table = opened(shared, file, CMRC)
    assert table.columns == ("id", "question", "context", "answers", "impossible")
    found = [answer for some in table.column("answers") for answer in some]
    assert len(table) == rows and answers in (len(found), None)
    notes = [note for note in table.notes if " x answer" in note]
    assert sum(int(note.split(" x ")[0]) for note in notes) == moved
    for i in range(len(table)):
        row = table[i]
        assert row["impossible"] is False and row["answers"]
        for answer in row["answers"]:
            start, text = answer["start"], answer["text"]
            assert row["context"][start:].startswith(text) or text not in row["context"]
            assert (start == -1) == (text not in row["context"])
    assert table.where(0).endswith(f"{Path(file).name}, question {table[0]['id']}")


@pytest.mark.parametrize(
    ("file", "rows", "mean"), [("train", 5749, 2.70), ("dev", 1500, 2.36), ("test", 1379, 2.61)]
)
def test_scores(file: str, rows: int, mean: float, shared: Path) -> None:
    table = opened(shared, f"en/stsb/stsb-en-{file}.csv", STSB)
    scores = [float(label) for label in table.column("label")]
    assert len(scores) == rows and sum(scores) / rows == pytest.approx(mean, abs=0.005)


def test_relatedness(shared: Path) -> None:
    scores = opened(shared, "en/sick/SICK_train.txt", RELATEDNESS).column("label")
    assert len(scores) == 4500
    assert {1.0 <= float(score) <= 5.0 for score in scores} == {True}


def test_news(shared: Path) -> None:
    for name, rows in (("train", 1185), ("dev", 1098)):
        table = opened(shared, f"zh/fewclue_tnews/{name}_few_all.json", TNEWS)
        assert (len(table), len(counted(table))) == (rows, 15)
    unlabeled = opened(shared, "zh/fewclue_tnews/unlabeled.json", {})
    assert (len(unlabeled), unlabeled.columns) == (20000, ("text_a", "id"))


def test_ranking_by_query(shared: Path) -> None:
    groups = Counter(opened(shared, "zh/qbqtc/dev.json", QBQTC).column("qid"))
    assert len(groups) == 18802
    assert sum(size > 1 for size in groups.values()) == 1083


def test_answers_to_questions(shared: Path) -> None:
    table = opened(shared, "en/covid_faq/faq_covidbert.csv", FAQ)
    assert len(table) == 213
    assert sorted(counted(table).values(), reverse=True)[:3] == [111, 30, 30]


def test_documents_and_queries(shared: Path) -> None:
    documents = opened(shared, "en/cranfield/cran.all.1400", DOCUMENTS)
    assert len(documents) == 1400
    assert documents.notes[0].startswith("2 x empty text_a")
    queries = opened(shared, "en/cranfield/cran.qry", DOCUMENTS)
    assert len(queries) == 225
    both = {"format": "smart", "columns": {"id": "I", "text_a": ["T", "W"]}}
    first = opened(shared, "en/cranfield/cran.all.1400", both)[0]["text_a"]
    assert first.startswith("experimental investigation of the aerodynamics of a wing in a slip")


def test_tagged_sentences_keep_their_tokens(shared: Path) -> None:
    for file, tokens in (
        ("wnut17/wnut17train.conll", 62730),
        ("wnut17/emerging.dev.conll", 15733),
        ("wnut17/emerging.test.annotated", 23394),
        ("wikigold/wikigold.conll.txt", 39152 - 145),  # without the -DOCSTART- lines
    ):
        table = opened(shared, f"en/{file}", CONLL)
        assert sum(map(len, table.column("tokens"))) == tokens


def test_palms_own_files(shared: Path) -> None:
    for name, rows, columns in (
        ("mlm", 120, ("text_a",)),
        ("match", 100, ("text_a", "text_b", "label")),
        ("cls", 61, ("text_a", "label")),
    ):
        table = opened(shared, f"../ernie/palm_test_data/{name}4mrqa_train.tsv", {})
        assert (len(table), table.columns) == (rows, columns)
