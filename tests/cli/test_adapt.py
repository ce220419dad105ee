"""`palm-ds adapt`: somebody's folder on one's own text, and back."""

from __future__ import annotations

import io
import json
import os
import random
import signal
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from palm_ds.cli.main import main
from palm_ds.common.config import read_yaml
from tests.helpers.modernbert import folder_with_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of DeepSpeed's
WORDS = ["river", "night", "morning", "road", "water", "letters", "group", "bread", "lamp", "song"]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
QUICK = ["--steps", "12", "--lr", "1e-2"]


def documents(seed: int, words: Sequence[str] = WORDS, count: int = 100) -> list[str]:
    rng = random.Random(seed)
    return [
        " ".join(
            f"The {' '.join(rng.choices(words, k=rng.randint(3, 7)))}."
            for _ in range(rng.randint(5, 9))
        )
        for _ in range(count)
    ]


def bert(folder: Path, kind: str = "BertForMaskedLM") -> Path:
    """A random BERT with the words of the texts."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join([*specials, "the", ".", *WORDS]) + "\n")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=17, **SIZES)
    getattr(transformers, kind)(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, and the folders of a BERT, a ModernBERT, and a BERT without a masked-LM head."""
    folder = tmp_path_factory.mktemp("adapt")
    (folder / "texts.txt").write_text("\n\n".join(documents(0)))
    (folder / "general.txt").write_text("\n\n".join(documents(1, WORDS[5:])))
    bert(folder / "bert")
    bert(folder / "headless", "BertModel")
    modern = {**SIZES, "local_attention": 16}
    folder_with_tokenizer(folder / "modernbert", documents(0), **modern)
    return folder


def adapt(place: Path, model: str, out: str, *more: str) -> int:
    words = [str(place / model), str(place / "texts.txt"), "--out", str(place / out)]
    return main(["adapt", *words, "--language", "en", *more])


def results(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out)


def error(capsys: pytest.CaptureFixture[str], place: Path, *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        adapt(place, *words)
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert "Traceback" not in "".join(lines)
    return lines[-1]


@pytest.mark.parametrize(
    ("model", "family"),
    [
        pytest.param("bert", "Bert", marks=pytest.mark.exhaustive),  # as the runs below
        ("modernbert", "ModernBert"),
    ],
)
def test_it_learns_and_goes_back_as_it_came(
    place: Path, model: str, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--general", str(place / "general.txt"), *QUICK]
    assert adapt(place, model, f"{model}-run", *given, "--json") == 0
    found = results(capsys)
    losses = found["losses"]
    assert losses.keys() == {"own text", "general text"} and found["steps"] == 12
    for loss in losses.values():
        assert loss["after"] < loss["before"] and loss["tokens"] > 20
    recipe = read_yaml(place / f"{model}-run/adapt.yaml")
    assert list(recipe["sources"]["text"]["mix"].values()) == [0.8, 0.2]
    made: Any = transformers.AutoModelForMaskedLM
    before, opened = (made.from_pretrained(x) for x in (place / model, place / f"{model}-run/hf"))
    assert type(opened).__name__ == f"{family}ForMaskedLM"
    now, then = opened.state_dict(), before.state_dict()
    shapes = {name: value.shape for name, value in then.items()}
    assert shapes.items() <= {name: value.shape for name, value in now.items()}.items()
    changed = [name for name in then if not torch.equal(then[name], now[name])]
    assert any("layers." in name or "layer." in name for name in changed)


def test_it_starts_from_the_folder_with_its_head(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One step that is too small to change anything."""
    assert adapt(place, "bert", "still", "--steps", "1", "--lr", "1e-12", "--json") == 0
    loss = results(capsys)["losses"]["own text"]
    assert loss["after"] == pytest.approx(loss["before"], abs=1e-5)


def test_a_folder_without_a_head_gets_one(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert adapt(place, "headless", "headed", "--steps", "2") == 0
    said = capsys.readouterr().out
    assert "headless: has no masked-LM head; a new one is trained" in said.replace("\n", "")
    made: Any = transformers.AutoModelForMaskedLM
    _, info = made.from_pretrained(place / "headed/hf", output_loading_info=True)
    assert not info["missing_keys"]


@pytest.fixture(scope="module")
def alone(place: Path) -> dict[str, Any]:
    """The results of a run whose recipe was trained by `pretrain`."""
    said = io.StringIO()
    with redirect_stdout(said):
        assert adapt(place, "bert", "alone", *QUICK, "--recipe_only") == 0
        assert "adapt.yaml; train it with `palm-ds pretrain " in said.getvalue()
        words = [str(place / "alone/adapt.yaml"), "--deepspeed_config", "cpu"]
        assert main(["pretrain", *words, "--run_dir", str(place / "alone")]) == 0
    with redirect_stdout(io.StringIO()) as result:
        assert adapt(place, "bert", "alone", *QUICK, "--json") == 0
    return json.loads(result.getvalue())


@pytest.mark.slow
def test_the_same_command_continues_and_then_has_finished(
    place: Path,
    alone: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from palm_ds.train.loop.loop import Loop

    step = Loop.train_step

    def interrupted(self: Loop, number: int, *args: Any, **more: Any) -> Any:
        if number == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, number, *args, **more)

    stopping = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in stopping}
    with monkeypatch.context() as patched:
        patched.setattr(Loop, "train_step", interrupted)
        assert adapt(place, "bert", "stopped", *QUICK) == 75
    for number, handler in handlers.items():  # a program would have ended
        signal.signal(number, handler)
    assert not (place / "stopped/hf").exists()
    capsys.readouterr()
    assert adapt(place, "bert", "stopped", *QUICK, "--json") == 0
    assert results(capsys)["losses"] == alone["losses"]
    assert adapt(place, "bert", "stopped", *QUICK) == 0
    assert "finished: 12 steps" in capsys.readouterr().out
    last = error(capsys, place, "bert", "stopped", "--steps", "30")
    assert "adapt.yaml: is not the recipe of this command (" in last


@pytest.mark.slow
def test_the_recipe_alone_trains_as_any(place: Path, alone: dict[str, Any]) -> None:
    recipe = yaml.safe_load((place / "alone/adapt.yaml").read_text())
    assert recipe["tasks"]["sentence_reordering"]["most"] == 2  # token types of BERT
    assert [*recipe["stages"][0].values()] == [6, 3, 3] and recipe["optimizer"]["lr"] == 1e-2
    loss = alone["losses"]["own text"]
    assert loss["after"] < loss["before"]


def test_a_prepared_corpus_is_taken_as_it_is(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = place / "prepared"
    words = [str(corpus), str(place / "texts.txt"), "--tokenizer", str(place / "bert")]
    assert main(["prepare", *words]) == 0
    out = str(place / "from_prepared")
    assert main(["adapt", str(place / "bert"), str(corpus), "--out", out, "--recipe_only"]) == 0
    recipe = read_yaml(Path(out) / "adapt.yaml")
    assert recipe["sources"] == {"text": {"corpus": str(corpus)}}
    assert not (Path(out) / "corpus").exists()
    other = [str(place / "modernbert"), str(corpus), "--out", str(place / "other")]
    with pytest.raises(SystemExit):
        main(["adapt", *other])
    assert "prepared with a tokenizer other than" in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(SystemExit):
        main(["adapt", *other, "--language", "en", "--lower", "--workers", "2"])
    said = "error: --language, --lower, --workers: a prepared corpus is taken as it is; remove"
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing", "x"], "nothing: no such file or folder"),
        (["bert", "bert"], "bert: is the model itself; choose another folder"),
        (["bert", "x", "--steps", "0"], "--steps: expected a number above 0, got 0"),
        (["bert", "x", "--lr", "2"], "--lr: expected a number below 1, got 2"),
        (
            ["bert", "x", "--general_share", "1"],
            "--general_share: expected a number below 1, got 1",
        ),
        (["bert", "x", "--general_share", "0.3"], "--general_share: needs --general, the text"),
        (["bert", "x", "--deepspeed_config", "cpx"], "no shipped DeepSpeed file has this name"),
        (["bert", "x", "--general", "absent.txt"], "absent.txt"),
        (["bert", "x", "--step", "3"], '--step; did you mean "--steps"?'),
    ],
)
def test_mistakes(
    place: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error(capsys, place, *words)


def test_a_folder_of_another_run_is_not_written_to(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "other_run").mkdir()
    (place / "other_run/recipe.yaml").write_text("seed: 1\n")
    last = error(capsys, place, "bert", "other_run")
    assert last.endswith("other_run: holds another run; choose another folder")
    assert [x.name for x in (place / "other_run").iterdir()] == ["recipe.yaml"]


def test_several_processes_train_the_recipe(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert "give --recipe_only, then train" in error(capsys, place, "bert", "several")
    assert not (place / "several").exists()
