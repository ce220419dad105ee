"""What clients get over HTTP: the same numbers as from the commands, and one form of error."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import palm_ds as palm
from palm_ds.inference.embedder import EmbeddingSettings
from palm_ds.inference.fill_mask import as_record
from palm_ds.inference.predict_files import PredictionJob, predict_files
from palm_ds.inference.trained_model import TrainedModel
from tests.helpers.saved_model import pairs, questions, tagged, texts, write_rows
from tests.helpers.serving import Local, local, opened


@pytest.fixture(scope="module")
def server(tasks_run: Path, words_run: Path) -> Iterator[Local]:
    with local(*opened(tasks=tasks_run, words=words_run)) as found:
        yield found


def filled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if all(row.values())]


ROWS = {
    "mood": filled([{"text_a": row["text_a"]} for row in texts(30)]),
    "topic": filled([{"text_a": row["text_a"]} for row in texts(30)]),
    "size": filled([{"text_a": row["text_a"]} for row in texts(30)]),
    "pair": filled([{"text_a": r["text_a"], "text_b": r["text_b"]} for r in pairs(20)]),
    "rank": filled([{"text_a": r["text_a"], "text_b": r["text_b"]} for r in pairs(20)]),
    "answer": [{"question": r["question"], "context": r["context"]} for r in questions(6)],
    "chunks": [{"tokens": row["tokens"]} for row in tagged(10)],
}


def from_files(run: Path, task: str, folder: Path) -> list[dict[str, Any]]:
    """What `palm-ds predict` writes for the rows of a task."""
    folder.mkdir()
    predictor = TrainedModel.open(run).predictor([task])
    file = write_rows(folder / "rows.jsonl", ROWS[task])
    job = PredictionJob(inputs=[str(file)], output=folder / "out")
    predict_files(predictor, job)
    found = folder / "out" / f"{task}.predictions.json"
    if task == "answer":
        found = folder / "out" / f"{task}.rows.json"
    lines = [json.loads(line) for line in found.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("index", "id")} for line in lines]


def check_same(found: Any, wanted: Any) -> None:
    """Equal, numbers to rounding."""
    if isinstance(wanted, float):
        assert found == pytest.approx(wanted, abs=2e-5)
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            check_same(found[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            check_same(a, b)
    else:
        assert found == wanted


@pytest.mark.parametrize("task", ROWS)
def test_predictions_are_those_of_the_command(
    task: str, server: Local, tasks_run: Path, tmp_path: Path
) -> None:
    found = server.answer(f"/predict/{task}", {"inputs": ROWS[task]})
    assert found["model"] == "tasks"
    check_same(found["predictions"], from_files(tasks_run, task, tmp_path / "files"))


def test_predictions_do_not_depend_on_what_shares_the_batch(server: Local) -> None:
    """All tasks, embeddings and single texts at the same time."""
    alone = {
        (task, n): server.answer(f"/predict/{task}", {"inputs": [row]})["predictions"][0]
        for task, rows in ROWS.items()
        for n, row in enumerate(rows[:4])
    }
    vector = server.answer("/embed", {"texts": ["good bad"]})["embeddings"]

    async def together(client: httpx.AsyncClient) -> list[httpx.Response]:
        asked = [client.post(f"/predict/{t}", json={"inputs": [ROWS[t][n]]}) for t, n in alone]
        asked += [client.post("/embed", json={"texts": ["good bad"]})]
        return await asyncio.gather(*asked)

    *answers, last = server.run(together)
    for answer, wanted in zip(answers, alone.values(), strict=True):
        check_same(answer.json()["predictions"][0], wanted)
    check_same(last.json()["embeddings"], vector)
    shared = server.service.metrics.text().decode()
    count = next(x for x in shared.splitlines() if x.startswith("palm_ds_batch_requests_count"))
    total = next(x for x in shared.splitlines() if x.startswith("palm_ds_batch_requests_sum"))
    assert float(total.split()[-1]) > float(count.split()[-1])  # some passes had several requests


def test_texts_pairs_and_the_tables_own_columns(server: Local) -> None:
    whole = server.answer("/predict/mood", {"inputs": [{"text_a": "so good"}]})["predictions"]
    assert server.answer("/predict/mood", {"inputs": ["so good"]})["predictions"] == whole
    assert (
        server.answer("/predict/mood", {"inputs": [{"sentence": "so good"}]})["predictions"]
        == whole
    )
    row = {"text_a": "good", "text_b": "bad"}
    pair = server.answer("/predict/pair", {"inputs": [row]})["predictions"]
    assert server.answer("/predict/pair", {"inputs": [["good", "bad"]]})["predictions"] == pair
    labeled = {"text_a": "so good", "label": "no class"}  # labels are not read
    assert server.answer("/predict/mood", {"inputs": [labeled]})["predictions"] == whole


def test_truncated_texts_are_counted(server: Local) -> None:
    found = server.answer("/predict/mood", {"inputs": ["good " * 99, "bad"]})
    assert found["truncated"] == 1
    found = server.answer("/embed", {"texts": ["good " * 99, "bad"]})
    assert (found["truncated"], found["tokens"]) == (1, [64, 3])


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "pooler"])
def test_vectors_are_those_of_the_embedder(server: Local, tasks_run: Path, pooling: str) -> None:
    given = ["good", "bad so very good ? " * 3, "a b c"]
    found = server.answer("/embed", {"texts": given, "pooling": pooling})["embeddings"]
    wanted = TrainedModel.open(tasks_run).embedder(EmbeddingSettings(pooling=pooling)).embed(given)
    assert np.abs(np.array(found) - wanted).max() < 1e-5


@pytest.mark.parametrize("concat", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_vectors_of_layers_are_those_of_the_embedder(
    server: Local, tasks_run: Path, pooling: str, concat: bool
) -> None:
    given, layers = ["good", "bad so very good ?"], (0, 1, -1)
    asked = {"pooling": pooling, "concat": concat}
    found = server.answer("/embed", {"texts": given, "layers": layers, **asked})["embeddings"]
    settings = EmbeddingSettings(layers=layers, **asked)
    wanted = TrainedModel.open(tasks_run).embedder(settings).embed(given)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_layers_and_tokens_are_those_of_transformers(
    server: Local, tasks_run: Path, tmp_path: Path
) -> None:
    """Of texts and of ids, in one pass with other requests."""
    from transformers import AutoModel

    palm.load(tasks_run).save_pretrained(tmp_path)
    theirs = AutoModel.from_pretrained(tmp_path).eval()
    texts = ["good", "bad so very good ?"]
    ids = [x["ids"] for x in server.answer("/tokenize", {"texts": texts})["results"]]
    states = []
    for each in ids:
        with torch.no_grad():
            made = theirs(torch.tensor([each]), output_hidden_states=True).hidden_states
        states.append(torch.cat(made).numpy())  # (1 + layers, tokens, hidden)

    async def together(client: httpx.AsyncClient) -> list[Any]:
        body = {"layers": [0, 1, -1], "concat": True}
        bodies = [
            {"texts": texts, "tokens": True, **body},
            {"input_ids": ids, "tokens": True, "encoding_format": "base64", **body},
            {"texts": texts, **body},
            {"texts": texts, "layers": [1, 2], "pooling": "cls", "normalize": True},
            {"texts": texts},
        ]
        answers = await asyncio.gather(*(client.post("/embed", json=body) for body in bodies))
        return [answer.json() for answer in answers]

    of_tokens, of_ids, pooled, averaged, plain = server.run(together)
    assert (of_tokens["size"], averaged["size"]) == (3 * 16, 16)
    for n, (state, coded) in enumerate(zip(states, of_ids["embeddings"], strict=True)):
        whole = np.concatenate(state, 1)
        np.testing.assert_allclose(of_tokens["embeddings"][n], whole, atol=1e-5)
        found = np.frombuffer(base64.b64decode(coded), "<f4").reshape(-1, 48)
        np.testing.assert_allclose(found, whole, atol=1e-5)
        np.testing.assert_allclose(pooled["embeddings"][n], whole.mean(0), atol=1e-5)
        mean = state[1:, 0].mean(0)
        np.testing.assert_allclose(
            averaged["embeddings"][n], mean / np.linalg.norm(mean), atol=1e-5
        )
        np.testing.assert_allclose(plain["embeddings"][n], state[-1].mean(0), atol=1e-5)


@pytest.mark.parametrize(("task", "texts"), [("mood", ["so good"]), ("pair", ["good", "bad so"])])
def test_ids_are_predicted_as_their_texts(server: Local, task: str, texts: list[str]) -> None:
    row = dict(zip(("text_a", "text_b"), texts, strict=False))
    wanted = server.answer(f"/predict/{task}", {"inputs": [row]})["predictions"]
    found = [x["ids"] for x in server.answer("/tokenize", {"texts": texts})["results"]]
    ids = found[0] + [x for each in found[1:] for x in each[1:]]
    types = [0] * len(found[0]) + [1] * (len(ids) - len(found[0]))
    body = {"input_ids": [ids], "token_type_ids": [types]}
    check_same(server.answer(f"/predict/{task}", body)["predictions"], wanted)


def test_an_answer_has_a_bound(words_run: Path) -> None:
    models, served = opened(words=words_run)
    with local(models, served, max_numbers=64) as small:
        small.answer("/embed", {"texts": ["so"] * 4})
        status, message = small.refusal("/embed", {"texts": ["so"] * 5})
        assert (status, message[:24]) == (413, "5 vectors of 16 numbers;")
        assert small.refusal("/embed", {"texts": ["so good"] * 2, "tokens": True})[0] == 413


def test_vectors_in_openais_form(server: Local) -> None:
    given = ["good bad", "so"]
    plain = server.answer("/embed", {"texts": given, "model": "words"})["embeddings"]
    found = server.answer("/v1/embeddings", {"input": given, "model": "words", "user": "me"})
    assert [each["index"] for each in found["data"]] == [0, 1]
    assert [each["embedding"] for each in found["data"]] == plain
    assert found["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    coded = server.answer(
        "/v1/embeddings", {"input": given, "model": "words", "encoding_format": "base64"}
    )
    vectors = [np.frombuffer(base64.b64decode(x["embedding"]), "<f4") for x in coded["data"]]
    assert np.abs(np.stack(vectors) - np.array(plain)).max() < 1e-6
    short = server.answer("/v1/embeddings", {"input": "so", "model": "words", "dimensions": 3})
    check_same(short["data"][0]["embedding"], plain[1][:3])
    ids = server.answer("/tokenize", {"texts": given, "model": "words"})["results"]
    as_ids = server.answer(
        "/v1/embeddings", {"input": [each["ids"] for each in ids], "model": "words"}
    )
    check_same([each["embedding"] for each in as_ids["data"]], plain)
    one = server.answer("/v1/embeddings", {"input": ids[1]["ids"], "model": "words"})
    check_same(one["data"][0]["embedding"], plain[1])


def test_masked_words_are_those_of_the_command(server: Local, words_run: Path) -> None:
    given = ["so [MASK] .", "a [MASK] [MASK] good"]
    found = server.answer("/fill-mask", {"texts": given, "top": 3})["results"]
    filler = TrainedModel.open(words_run).filler()
    wanted = [as_record(filler, text, filler.fill(text, top=3)) for text in given]
    check_same(found, wanted)


def test_documents_are_ranked_by_a_head_or_by_vectors(server: Local) -> None:
    body = {"query": "so good ?", "documents": ["bad", "very good", "good ? so good"]}
    found = server.answer("/rerank", body)
    assert found["task"] == "rank"
    rows = [{"text_a": body["query"], "text_b": text} for text in body["documents"]]
    made = server.answer("/predict/rank", {"inputs": rows})["predictions"]
    probs = [each["probs"][1] for each in made]
    assert [x["index"] for x in found["results"]] == np.argsort(-np.array(probs)).tolist()
    assert server.answer("/rerank", body | {"top_n": 1})["results"] == found["results"][:1]
    near = server.answer("/rerank", body | {"use": "vectors", "model": "words"})["results"]
    texts = {"texts": [body["query"], *body["documents"]], "model": "words", "normalize": True}
    vectors = np.array(server.answer("/embed", texts)["embeddings"])
    cosines = vectors[1:] @ vectors[0]
    for each in near:
        assert each["relevance_score"] == pytest.approx(cosines[each["index"]], abs=1e-5)


def test_tokens_have_their_characters(server: Local) -> None:
    (found,) = server.answer("/tokenize", {"texts": ["so goods"], "model": "words"})["results"]
    assert found["tokens"] == ["[CLS]", "so", "good", "##s", "[SEP]"]
    assert found["spans"] == [[0, 0], [0, 2], [3, 7], [7, 8], [0, 0]]


# ---- refusals ----

DEEP: Any = "x"
for _ in range(300):
    DEEP = [DEEP]
REFUSED = [
    ("/predict/moods", {"inputs": ["x"]}, 404, "no task 'moods'; did you mean \"mood\"?"),
    ("/predict/mood", {"inputs": ["x"], "model": "other"}, 404, "model 'other' is not served"),
    ("/predict/mood", {"inputs": ["x"], "model": "words"}, 404, "no task 'mood' in model 'words'"),
    ("/predict/mood", {"inputs": []}, 422, "inputs: empty"),
    ("/predict/mood", {"inputs": ["x", " \n"]}, 422, "inputs[1]: the text is empty"),
    ("/predict/mood", {"inputs": ["x" * 1_000_000]}, 413, "inputs[0]: 1,000,000 characters"),
    ("/predict/mood", {"inputs": ["x"] * 300}, 413, "inputs: 300 texts; at most 256"),
    ("/predict/mood", {"input": ["x"]}, 422, 'the body: no key `input`; did you mean "inputs"?'),
    (
        "/predict/mood",
        {"texts": ["x"]},
        422,
        "no key `texts`; known: input_ids, inputs, model, token",
    ),
    ("/predict/mood", {"inputs": ["x"], "\x9b" * 99: 1}, 422, "no key `\\x9b\\x9b"),
    ("/predict/mood", {"inputs": ["x"], "input_ids": [[2]]}, 422, "input_ids: inputs are given"),
    ("/predict/mood", {"input_ids": [[2, 99999]]}, 422, "input_ids[0]: an id is not in 0 to"),
    ("/predict/mood", {"input_ids": [[2] * 33]}, 422, "input_ids[0]: 33 ids; the model reads 32"),
    ("/predict/mood", {"input_ids": [[2]] * 300}, 413, "input_ids: 300 texts; at most 256"),
    ("/predict/chunks", {"input_ids": [[2, 5, 3]]}, 422, "input_ids: ids are read by tasks that"),
    ("/embed", {"token_type_ids": [[0]]}, 422, "token_type_ids: of input_ids, which are not"),
    ("/embed", {"input_ids": [[2, 3]], "token_type_ids": [[0]]}, 422, "token_type_ids: other"),
    ("/embed", {"input_ids": [[2]], "token_type_ids": [[2]]}, 422, "token_type_ids[0]: a type is"),
    ("/embed", {"texts": ["x"], "layers": [3]}, 422, "layers: 3: tasks has 2; 0 are the embed"),
    ("/embed", {"texts": ["x"], "layers": []}, 422, "layers: List should have at least 1 item"),
    ("/embed", {"texts": ["x"], "layers": [1], "pooling": "pooler"}, 422, "layers: the pooler"),
    (
        "/embed",
        {"texts": ["x"], "tokens": True, "pooling": "cls"},
        422,
        "pooling, tokens: vectors",
    ),
    ("/predict/mood", {"inputs": [{"text_a": None}]}, 422, "inputs[0]: text_a"),
    ("/predict/pair", {"inputs": ["x"]}, 422, "text_b"),
    ("/predict/answer", {"inputs": ["x"]}, 422, "context"),
    (
        "/predict/mood",
        {"inputs": ["x", 5]},
        422,
        "inputs[1]: expected a text or a list of texts or",
    ),
    ("/v1/embeddings", {"input": [True]}, 422, "input: expected a text or a list of texts or a "),
    ("/embed", {"texts": ["x", 5]}, 422, "texts[1]: expected a text or a pair of texts"),
    ("/embed", {"texts": [5], "layers": "x"}, 422, "texts[0]: expected a text or a pair of texts"),
    ("/embed", {"texts": [["x", 5]]}, 422, "texts[0]: expected a text or a pair of texts"),
    ("/embed", {"texts": [["x"]]}, 422, "texts[0]: expected a text or a pair of texts"),
    ("/embed", {"texts": [["x"] * 3]}, 422, "texts[0]: expected a text or a pair of texts"),
    ("/embed", {"texts": ["x", ["y", " "]]}, 422, "texts[1][1]: the text is empty"),
    ("/embed", {"texts": [["x\0", "y"]]}, 422, "texts[0][0]: NUL at character 2"),
    ("/embed", {"texts": ["x"], "dimensions": 10**4000}, 422, "dimensions: 10000"),
    ("/predict/answer", {"inputs": [["a", "b", "c"]]}, 422, "inputs[0]: 3 texts; the task reads"),
    ("/predict/mood", {"inputs": [["a", "b", "c"]]}, 422, "inputs[0]: 3 texts; the task reads"),
    ("/predict/mood", {"inputs": [{"text_a": DEEP}]}, 422, "inputs[0]: nested too deeply"),
    ("/embed", {"texts": ["x"] * 9, "prompt": "x" * 9999}, 422, "prompt: String should have"),
    ("/v1/embeddings", {"input": [10**40]}, 422, "input[0]: an id is not in 0 to"),
    ("/embed", {"texts": ["x"], "dimensions": 99}, 422, "dimensions: 99: vectors of tasks have 16"),
    ("/embed", {"texts": ["x"], "pooling": "sum"}, 422, "pooling"),
    ("/v1/embeddings", {"input": [[1, 99999]]}, 422, "input[0]: an id is not in 0 to"),
    ("/v1/embeddings", {"input": [[]]}, 422, "input[0]: no ids"),
    ("/v1/embeddings", {"input": [[2] * 65]}, 422, "input[0]: 65 ids; the model reads 64"),
    ("/v1/embeddings", {"input": ""}, 422, "input[0]: the text is empty"),
    ("/fill-mask", {"texts": ["x"], "model": "tasks"}, 404, "no masked-LM head in tasks"),
    ("/fill-mask", {"texts": ["[MASK] x", "x"]}, 422, "texts[1]: there is no [MASK]"),
    ("/rerank", {"query": "x", "documents": ["y"], "model": "words"}, 404, "no head that scores"),
    ("/rerank", {"query": "x", "documents": ["y"], "task": "mood"}, 422, "of kind classification"),
    (
        "/v1/rerank",
        {"query": "x", "documents": [{"txt": "y"}]},
        422,
        "documents[0]: expected a text or an object with a `text`",
    ),
    ("/rerank", {"query": "", "documents": ["y"]}, 422, "query: the text is empty"),
    ("/search", {"query": "x"}, 404, "no search index; start the server with --index"),
    ("/index", {"texts": [{"text": "x"}]}, 403, "only a server with a token adds to an index"),
    ("/index", {"texts": [{"text": "x", "x": 1}]}, 422, "texts[0]: no key `x`; known: id, "),
    ("/index", {"texts": [{"text": "x", "id": 5}]}, 422, "texts[0].id: Input should be a valid s"),
    ("/index", {"texts": [{"text": "x"}, {}]}, 422, "texts[1].text: Field required"),
    ("/reload", {}, 403, "only a server with a token reloads over HTTP"),
    ("/nothing", {}, 404, "POST /nothing: no such path"),
    ("/health", {}, 405, "POST /health: the method must be GET or HEAD; /docs lists all"),
    ("/v1/models", {}, 405, "the method must be GET"),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), REFUSED)
def test_refusals_have_one_form(
    server: Local, path: str, body: Any, status: int, message: str
) -> None:
    found, line = server.refusal(path, body)
    assert found == status
    assert message in line
    assert "\n" not in line and not line.endswith(" or ") and len(line) < 510
    assert server.service.in_work == 0


@pytest.mark.parametrize(
    ("body", "kind", "line"),
    [
        (b'{"texts": [', "application/json", "the body: not JSON: Expecting value at character 12"),
        (b'{"texts": ["\xff"]}', "application/json", "the body: not JSON: byte 13 is not UTF-8"),
        (b'{"texts": ["a"]}', "text/plain", "the body: send JSON with the header Content-Type: "),
        (b'{"texts": ["so\\ud800"]}', "application/json", "text 0: lone surrogate at character 3"),
        (
            b'{"texts": ["a"], "\\ud800": 1}',
            "application/json",
            "the body: no key `\\ud800`; known: ",
        ),
        (b"texts=a", "application/x-www-form-urlencoded", "the body: send JSON with the header "),
    ],
)
def test_a_body_that_is_no_json(server: Local, body: bytes, kind: str, line: str) -> None:
    async def ask(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/embed", content=body, headers={"content-type": kind})

    found = server.run(ask)
    assert found.status_code == 422
    assert found.json()["error"]["message"].startswith(line)


def test_of_two_models_with_the_same_task_one_must_be_named(tasks_run: Path) -> None:
    with local(*opened(a=tasks_run, b=tasks_run)) as server:
        status, line = server.refusal("/predict/mood", {"inputs": ["x"]})
        assert (status, line) == (409, "'mood' is a task of 'a' or 'b': name the `model`")
        found = server.answer("/predict/mood", {"inputs": ["x"], "model": "b"})
        assert found["model"] == "b"


# ---- the server itself ----


def test_health_readiness_and_what_there_is(server: Local) -> None:
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/ready").json() == {"status": "ready"}
    found = server.get("/info").json()["models"]
    assert [each["name"] for each in found] == ["tasks", "words"]
    assert {each["name"]: each["kind"] for each in found[0]["tasks"]}["chunks"] == "tagging"
    assert [each["fill_mask"] for each in found] == [False, True]
    assert [x["id"] for x in server.get("/v1/models").json()["data"]] == ["tasks", "words"]
    server.service.draining = True
    try:
        assert server.get("/ready").status_code == 503
        assert server.get("/health").status_code == 200
        refused = server.post("/embed", {"texts": ["x"]})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    finally:
        server.service.draining = False


def test_metrics_are_prometheus_metrics(server: Local) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    server.answer("/embed", {"texts": ["good"]})
    found = server.get("/metrics")
    assert found.headers["content-type"].startswith("text/plain")
    families = {each.name: each for each in text_string_to_metric_families(found.text)}
    requests = {
        (x.labels["endpoint"], x.labels["status"]): x.value
        for x in families["palm_ds_requests"].samples
        if x.name.endswith("_total")
    }
    assert requests["embed", "200"] >= 1
    assert families["palm_ds_texts_in_work"].samples[0].value == 0


def test_the_interface_describes_itself_without_other_servers(server: Local) -> None:
    api = server.get("/openapi.json").json()
    paths = {"/predict/{task}", "/embed", "/fill-mask", "/rerank", "/tokenize", "/v1/embeddings"}
    assert paths <= api["paths"].keys()
    for path in ("/", "/docs", "/static/app.js", "/static/docs.js", "/static/style.css"):
        found = server.get(path)
        assert found.status_code == 200
        assert "'self'" in found.headers["content-security-policy"]
        for line in found.text.splitlines():
            assert "http://" not in line and "https://" not in line, line
        assert server.get(path, headers={"range": "bytes=x"}).text == found.text
    assert server.get("/static/../app.py").status_code == 404
    assert server.get("/static/index.html").status_code == 404


def test_what_drawn_requests_found(server: Local) -> None:
    """Each of these was an error of the server, or accepted."""
    cut = server.answer("/embed", {"texts": ["so", "bad"], "dimensions": 3, "normalize": False})
    assert np.shape(cut["embeddings"]) == (2, 3)
    found = server.answer("/fill-mask", {"texts": ["so [MASK]\x1a"]})  # nothing follows the mask
    assert len(found["results"][0]["masks"]) == 1
    assert server.refusal("/embed", {"texts": ["x"], "normalize": 0})[0] == 422
    status, message = server.refusal("/embed", {"texts": ["x", "so\0"]})
    assert (status, message) == (422, "texts[1]: NUL at character 3")
    _, message = server.refusal("/predict/mood", {"inputs": ["x"], "model": "words"})
    assert message == "no task 'mood' in model 'words'; none has a task on rows"
