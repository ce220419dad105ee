"""The page at /, in a real browser: every head of a model gives an answer that can be seen."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

from palm_ds.inference.embedder import EmbeddingSettings
from palm_ds.inference.embedding_files import EmbeddingJob, embed_files
from palm_ds.inference.search.add_files import embedding_of
from palm_ds.inference.search.index import create_index, open_index
from palm_ds.inference.search.texts import IndexedText
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.serve.client import ServingClient
from palm_ds.serve.forward import Scores
from palm_ds.serve.limits import ServingLimits
from palm_ds.serve.model_set import Served, open_set
from palm_ds.serve.scheduler import compute
from palm_ds.serve.served_model import ModelOptions
from palm_ds.serve.service import Service
from tests.helpers.browser import open_browser, phone
from tests.helpers.saved_model import TASKS, save_model
from tests.helpers.serving import listening

pytestmark = pytest.mark.slow
Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
TEXTS = ["good so good", "bad ?", "very very bad <b>x</b>"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("page")
    further = {
        "chunks": {"kind": "tagging", "source": "words"},
        "masking": {"kind": "masked_words", "source": "texts"},
        "likeness": {
            "kind": "regression",
            "source": "pairs",
            "texts": ["text_a", "text_b"],
            "scale": False,
        },
        "near": {"kind": "similarity", "source": "pairs"},
    }
    every = {name: dict(task) for name, task in TASKS.items()} | further
    run = save_model(folder / "run", tuple(every), tasks=every)
    file = folder / "texts.txt"
    file.write_text("\n".join(TEXTS) + "\n")
    job = EmbeddingJob(inputs=[str(file)], output=folder / "vectors.npy")
    embed_files(TrainedModel.open(run).embedder(EmbeddingSettings()), job, model=str(run))
    served = Served(models={"run": run}, options=ModelOptions(), index=folder / "vectors.npy")
    made = Service(open_set(served), served, ServingLimits())
    yield made
    made.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def pressed(browser, tab: str, **values: str):
    """The result after a tab was chosen, its fields filled in, and Run pressed."""
    browser.find_element("css selector", f"nav button[data-tab='{tab}']").click()
    for name, value in values.items():
        field = browser.find_element("name", name)
        field.clear()
        field.send_keys(value)
    browser.find_element("id", "run").click()
    browser.find_element("css selector", "#raw:not([hidden]), #problem:not([hidden])")
    problem = browser.find_element("id", "problem")
    assert not problem.is_displayed(), problem.text
    if folder := os.environ.get("PALM_SCREENSHOTS"):
        browser.save_screenshot(str(Path(folder) / f"{tab}.png"))
    return browser.find_element("id", "result")


def shown(result, selector: str) -> list[str]:
    return [each.text for each in result.find_elements("css selector", selector)]


def test_every_head_can_be_tried(service: Service, browser) -> None:
    with listening(service) as url:
        browser.get(url)
        result = pressed(browser, "search", query="very very bad <b>x</b>")
        assert shown(result, ".hit .text")[0] == TEXTS[2]  # as text, not as HTML
        assert shown(result, ".number")[0] == "1.000"

        result = pressed(browser, "task-run-mood", text="so good")
        assert sorted(shown(result, ".bar .name")) == ["bad", "fair", "good"]
        shares = [float(x.removesuffix(" %")) for x in shown(result, ".number")]
        assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(100, abs=0.2)
        widths = [each.size["width"] for each in result.find_elements("css selector", ".track i")]
        assert widths == sorted(widths, reverse=True) and widths[0] > 0

        assert len(shown(pressed(browser, "task-run-topic", text="so good"), ".bar")) == 2
        assert float(shown(pressed(browser, "task-run-size", text="so good"), ".value")[0])
        assert len(shown(pressed(browser, "task-run-pair", text="good", b="bad"), ".bar")) == 2
        for tab in ("task-run-likeness", "task-run-near"):
            (value,) = shown(pressed(browser, tab, text="good", b="bad"), ".value")
            assert isfinite(float(value))

        result = pressed(browser, "task-run-answer", question="good ?", context="a bad so good b")
        (answer,) = shown(result, "mark")
        assert answer and answer in "a bad so good b"
        assert shown(result, ".text") == ["a bad so good b"]

        result = pressed(browser, "task-run-chunks", text="good bad so")
        assert "".join(shown(result, ".text")).replace("X", "").split() == ["good", "bad", "so"]

        result = pressed(browser, "fill-mask", masked="so [MASK] .")
        assert len(shown(result, ".bar")) == 8

        result = pressed(browser, "embed", query="good", texts="bad\ngood\nso so")
        assert shown(result, ".hit .text")[0] == "good"


@pytest.fixture(scope="module")
def indexed(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The same models with an index of texts with titles and metadata."""
    (run,) = service.served.models.values()
    embedder = TrainedModel.open(run).embedder()
    folder = tmp_path_factory.mktemp("index") / "i"
    create_index(folder, embedding_of(embedder, run), embedder.size)
    texts = [
        IndexedText(id=str(n), text=text, title=f"n{n}", metadata={"even": n % 2 == 0})
        for n, text in enumerate(TEXTS * 3)
    ]
    with open_index(folder) as index:
        index.add(texts, embedder.embed([text.passage for text in texts]))
    served = Served(models={"run": run}, options=ModelOptions(), index=folder)
    made = Service(open_set(served), served, ServingLimits())
    yield made
    made.close()


def test_switches_of_a_search(indexed: Service, browser) -> None:
    """What is shown is what the server answers to the same request."""
    with listening(indexed) as url, ServingClient(url) as client:
        browser.get(url)
        for switches in ([], ["hybrid"], ["hybrid", "rerank"]):
            for name in ("hybrid", "rerank"):
                box = browser.find_element("name", name)
                assert box.size["width"] < 30 and box.is_enabled()
                if box.is_selected() != (name in switches):
                    box.click()
            result = pressed(browser, "search", query="n7 very bad", filter='{"even": false}')
            wanted = client.search(
                "n7 very bad", filter={"even": False}, **dict.fromkeys(switches, True)
            )
            assert shown(result, ".hit b") == [each["title"] for each in wanted]
            assert shown(result, ".hit small") == ["even: false"] * len(wanted) != []
            assert shown(result, ".number") == [f"{each['score']:.3f}" for each in wanted]
            widths = [x.size["width"] for x in result.find_elements("css selector", ".track i")]
            assert max(widths) > (0 if not switches else 50)
        browser.find_element("css selector", "nav button[data-tab='task-run-mood']").click()
        browser.find_element("css selector", "nav button[data-tab='search']").click()
        assert all(browser.find_element("name", x).is_selected() for x in ("hybrid", "rerank"))
        result = pressed(browser, "search", query="very", filter='{"even": "no"}')
        assert shown(result, ".note") == ["no text found"]
        for wrong, line in (
            ("{even", "filter: not JSON"),
            ('{"a": {"=>": 1}}', "is not an operator"),
        ):
            field = browser.find_element("name", "filter")
            field.clear()
            field.send_keys(wrong, Keys.ENTER)
            problem = browser.find_element("css selector", "#problem:not([hidden])")
            assert line in problem.text
        browser.get_log("browser")


def test_a_text_stays_and_enter_searches(service: Service, browser) -> None:
    with listening(service) as url:
        browser.get(url)
        pressed(browser, "task-run-mood", text="so good")
        browser.find_element("css selector", "nav button[data-tab='task-run-topic']").click()
        assert browser.find_element("name", "text").get_attribute("value") == "so good"
        browser.find_element("css selector", "nav button[data-tab='search']").click()
        assert browser.find_element("id", "hint").get_attribute("textContent") == "Enter"
        browser.find_element("name", "query").send_keys("good", Keys.SHIFT, Keys.ENTER)
        assert browser.find_element("name", "query").get_attribute("value") == "good\n"
        browser.find_element("name", "query").send_keys(Keys.ENTER)
        browser.find_element("css selector", ".hit")
        assert browser.find_element("name", "query").get_attribute("value") == "good\n"
        browser.find_element("css selector", "nav button[data-tab='task-run-mood']").click()
        browser.find_element("name", "text").send_keys(Keys.ENTER)
        assert browser.find_element("name", "text").get_attribute("value") == "so good\n"
        browser.find_element("name", "text").send_keys(Keys.CONTROL, Keys.ENTER)
        browser.find_element("css selector", ".bar")


@pytest.mark.parametrize("how", ["button", "escape", "other head"])
def test_what_is_computed_can_be_cancelled(
    service: Service, browser, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    ended = threading.Event()

    def held(*values: Any) -> list[Scores]:
        ended.wait(30)
        return compute(*values)

    monkeypatch.setattr("palm_ds.serve.scheduler.compute", held)
    with listening(service) as url:
        browser.get(url)
        browser.find_element("css selector", "nav button[data-tab='task-run-mood']").click()
        browser.find_element("id", "run").click()
        assert browser.find_element("css selector", "#running progress").is_displayed()
        assert browser.find_element("id", "seconds").text.endswith(" s")
        assert not browser.find_element("id", "run").is_displayed()
        if how == "button":
            browser.find_element("id", "cancel").click()
        elif how == "escape":
            browser.find_element("name", "text").send_keys(Keys.ESCAPE)
        else:
            browser.find_element("css selector", "nav button[data-tab='task-run-size']").click()
        browser.find_element("css selector", "#running[hidden]")
        stated = browser.find_element("id", "time").text
        assert stated == ("" if how == "other head" else "cancelled")
        assert not browser.find_element("id", "problem").is_displayed()
        ended.set()
        browser.find_element("id", "run").click()
        browser.find_element("css selector", ".card")


@pytest.mark.parametrize("dark", [False, True])
def test_on_a_phone(service: Service, browser, dark: bool) -> None:
    """Nothing scrolls sideways but the list of heads, and a hit has the width of its card."""
    with listening(service) as url, phone(browser, dark=dark):
        browser.get(url)
        result = pressed(browser, "search", query="very")
        page = "return document.documentElement.scrollWidth"
        assert browser.execute_script(page) == 390
        for text in result.find_elements("css selector", ".hit .text"):
            assert text.size["width"] > 280
        color = browser.find_element("css selector", "body").value_of_css_property("background")
        red = int(re.findall(r"\d+", color)[0])
        assert (red < 60) == dark


def test_mistakes_are_shown_and_nothing_comes_from_elsewhere(service: Service, browser) -> None:
    with listening(service) as url:
        browser.get(url)
        browser.find_element("css selector", "nav button[data-tab='fill-mask']").click()
        browser.find_element("name", "masked").clear()
        browser.find_element("id", "run").click()
        problem = browser.find_element("css selector", "#problem:not([hidden])")
        assert problem.text == "texts[0]: the text is empty"
        browser.get(url + "/docs")
        paths = [each.text for each in browser.find_elements("css selector", "summary code")]
        assert "/predict/{task}" in paths and "/v1/embeddings" in paths
        entries = [
            json.loads(each["message"])["message"] for each in browser.get_log("performance")
        ]
        sent = [
            x["params"]["request"]["url"] for x in entries if x["method"].endswith("WillBeSent")
        ]
        here = ("http://127.0.0.1:", "data:", "chrome:", "chrome-untrusted:")
        elsewhere = [x for x in sent if not x.startswith(here)]
        assert sent and elsewhere == []
        log = [each["message"] for each in browser.get_log("browser") if each["level"] == "SEVERE"]
        assert [line for line in log if "status of 422" not in line] == []


def test_a_token_is_asked_for(service: Service, browser) -> None:
    with listening(service, token="secret") as url:
        browser.get(url)
        field = browser.find_element("css selector", "#token-field:not([hidden]) input")
        assert "Bearer" in browser.find_element("id", "problem").text
        field.send_keys("secret\t")
        assert shown(pressed(browser, "task-run-mood", text="so good"), ".bar .name")
        browser.get_log("browser")
