"""Masked words: the same guesses from every kind of folder, equal to Hugging Face's."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from palm_ds.common.errors import UserError
from palm_ds.corpus.store import open_corpus
from palm_ds.corpus.writer import write_corpus
from palm_ds.data.sources.corpus import split_corpus
from palm_ds.inference.fill_mask import (
    MASK,
    Filler,
    as_record,
    as_text,
)
from palm_ds.inference.trained_model import TrainedModel, examples
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.multi_task_model import Model
from palm_ds.text.tokenizer import SPECIALS, Tokenizer, wordpiece
from palm_ds.text.train_tokenizer import train_tokenizer
from palm_ds.weights.model_folder import open_model
from palm_ds.weights.weights_folder import WeightsInfo, export_hf, save_weights
from tests.helpers.small_corpus import write_small_corpus

WORDS = [
    "the",
    "capital",
    "of",
    "france",
    "is",
    "paris",
    ".",
    "un",
    "##able",
    *"北京是中国的首都。",
]
TOKENIZER = wordpiece([*SPECIALS, *dict.fromkeys(WORDS)], lower=True)
CONFIG = EncoderConfig(
    vocab_size=TOKENIZER.size,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    max_positions=16,
    task_types=4,
    layer_norm_eps=1e-5,
)
TASK_IDS = {"distance": 0, "masking": 1, "phrases": 2}
CAPITAL = "The capital of [MASK] is Paris."


def make_model(config: EncoderConfig = CONFIG, *, words: bool = True) -> Model:
    torch.manual_seed(3)
    backbone = build_encoder(config)
    heads: dict[str, torch.nn.Module] = {"distance": ClassHead(16, 3, pooled=True)}
    if words:
        heads |= {name: MaskedLMHead(backbone) for name in ("masking", "phrases")}
    net = Model(backbone, heads, {name: name for name in heads}).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return net


def save(
    folder: Path,
    net: Model,
    config: EncoderConfig = CONFIG,
    tokenizer: Tokenizer = TOKENIZER,
    export_task: str = "",
) -> None:
    """weights/ and hf/ of a finished run."""
    ids = TASK_IDS if config.task_types else dict.fromkeys(TASK_IDS, 0)
    info = WeightsInfo(backbone=config, task_ids=ids, head_of=net.head_of, export_task=export_task)
    save_weights(net, folder / "weights", info, tokenizer=tokenizer)
    export_hf(net, folder / "hf", config=config, tokenizer=tokenizer, task_id=ids["masking"])


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save(folder, make_model())
    return folder


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, task_types=0)], ids=["ernie", "bert"])
def test_probabilities_equal_hugging_faces(tmp_path: Path, config: EncoderConfig) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    save(tmp_path, make_model(config), config)
    theirs = AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    inputs = AutoTokenizer.from_pretrained(tmp_path / "hf")(CAPITAL, return_tensors="pt")
    with torch.no_grad():
        wanted = theirs(**inputs).logits[0, 4].softmax(-1)
    for name in ("", "weights", "hf"):
        filler = TrainedModel.open(tmp_path / name).filler()
        filled = filler.fill(CAPITAL, top=100)
        assert filled.ids.tolist() == inputs["input_ids"][0].tolist()
        (hidden,) = filled.hidden
        assert filler.probabilities(filled.ids, np.array([4])).allclose(wanted, atol=1e-6)
        got = dict(hidden.guesses)
        assert hidden.position == 4 and len(got) == TOKENIZER.size - len(SPECIALS)
        assert torch.tensor(list(got.values())).allclose(wanted[list(got)], atol=1e-6)
        assert [p for _, p in hidden.guesses] == sorted(got.values(), reverse=True)


def test_special_tokens_are_never_proposed(run_folder: Path) -> None:
    """An untrained model proposed [PAD] and [MASK] as any other token."""
    filler = TrainedModel.open(run_folder).filler()
    (hidden,) = filler.fill(CAPITAL, top=TOKENIZER.size).hidden
    proposed = TOKENIZER.tokens([word for word, _ in hidden.guesses])
    assert len(proposed) > 5 and not {*SPECIALS} & {*proposed}


def test_a_task_has_its_own_embedding_and_head(run_folder: Path) -> None:
    def guesses(task: str) -> Filler:
        return TrainedModel.open(run_folder).filler(task)

    assert (guesses("").task, guesses("").task_id) == ("masking", 1)
    assert (guesses("distance").task_id, guesses("phrases").task_id) == (0, 2)
    seen = {
        task: TrainedModel.open(run_folder).filler(task).fill(CAPITAL, top=3).hidden[0].guesses
        for task in TASK_IDS
    }
    assert len({str(guess) for guess in seen.values()}) == 3
    net = make_model()
    own = guesses("distance").model.heads["masking"]
    assert torch.equal(own.dense.weight, net.heads["masking"].dense.weight)  # type: ignore
    own = guesses("phrases").model.heads["phrases"]
    assert torch.equal(own.dense.weight, net.heads["phrases"].dense.weight)  # type: ignore


def test_export_task_is_the_default(tmp_path: Path) -> None:
    net = make_model()
    save(tmp_path, net, export_task="phrases")
    filler = TrainedModel.open(tmp_path).filler()
    assert (filler.task, filler.task_id, list(filler.model.heads)) == ("phrases", 2, ["phrases"])
    assert TrainedModel.open(tmp_path).filler("masking").task_id == 1


def test_masks_are_predicted_independently(run_folder: Path) -> None:
    filler = TrainedModel.open(run_folder).filler()
    both = filler.fill("the [MASK] of [MASK]", top=4)
    assert [hidden.position for hidden in both.hidden] == [2, 4]
    alone = [filler.probabilities(both.ids, np.array([at])) for at in (2, 4)]
    for hidden, wanted in zip(both.hidden, alone, strict=True):
        words = wanted[0, TOKENIZER.vocabulary.regular]
        assert [p for _, p in hidden.guesses] == pytest.approx(words.topk(4).values.tolist())


def test_chinese_text_has_one_token_per_character(run_folder: Path) -> None:
    filled = TrainedModel.open(run_folder).filler().fill("北京是[MASK]国的首[MASK]。", top=2)
    seen = "".join(TOKENIZER.tokens(filled.ids[1:-1]))
    assert seen == "北京是[MASK]国的首[MASK]。"
    assert [hidden.position for hidden in filled.hidden] == [4, 8]


@pytest.mark.parametrize(
    ("text", "word", "seen", "truths"),
    [
        ("The capital is Paris.", "Paris", "the capital is [MASK].", ["paris"]),
        ("unable paris, PARIS", "paris", "unable [MASK] [UNK] [MASK]", ["paris"] * 2),
        ("is unable", "unable", "is [MASK] [MASK]", ["un", "##able"]),
        ("is un unable", "un", "is [MASK] unable", ["un"]),
        ("the paris [MASK]", "paris", "the [MASK] [MASK]", ["paris", None]),
        ("北京是首都", "首都", "北 京 是 [MASK] [MASK]", ["首", "都"]),
    ],
)
def test_hiding_a_word(
    run_folder: Path, text: str, word: str, seen: str, truths: list[str | None]
) -> None:
    filler = TrainedModel.open(run_folder).filler()
    filled = filler.fill(text, top=2, hide=word)
    assert TOKENIZER.decode(filled.ids[1:-1], skip_special=False) == seen
    was = [TOKENIZER.tokens([h.truth])[0] if h.truth >= 0 else None for h in filled.hidden]
    assert was == truths
    for hidden, truth in zip(filled.hidden, truths, strict=True):
        all_of_it = filler.probabilities(filled.ids, np.array([hidden.position]))[0]
        wanted = float(all_of_it[hidden.truth]) if truth else 0.0
        assert hidden.truth_probability == pytest.approx(wanted, rel=1e-5)


SENTENCEPIECE_TEXTS = ["the man is here", "a man, the is. mankind", "北京是首都。"] * 40


def test_a_mask_between_sentencepieces(tmp_path: Path) -> None:
    """The text around a mask has the same pieces as without one."""
    tokenizer = train_tokenizer(SENTENCEPIECE_TEXTS, kind="sentencepiece", vocab_size=100)
    config = replace(CONFIG, vocab_size=tokenizer.size, max_positions=40)
    save(tmp_path, make_model(config), config, tokenizer)
    filler = TrainedModel.open(tmp_path).filler()

    def tokens(text: str, **options: str) -> list[str]:
        return tokenizer.tokens(filler.fill(text, top=1, **options).ids[1:-1])

    mask = tokenizer.roles["mask"]
    assert tokens("the man [MASK] here") == [
        *tokenizer.tokens(tokenizer.encode_texts(["the man"])[0][0]),
        mask,
        *tokenizer.tokens(tokenizer.encode_texts(["here"])[0][0]),
    ]
    assert tokens("the [MASK], man")[-2].startswith(",") or "," in tokens("the [MASK], man")
    assert tokens("北[MASK]是首都。")[-5:] == [mask, "是", "首", "都", "。"]
    assert tokens(f"the man {mask}") == tokens("the man [MASK]")
    whole = tokenizer.tokens(tokenizer.encode_texts(["the man is here"])[0][0])
    hidden = tokens("the man is here", hide="man")
    assert len(hidden) == len(whole) and hidden.count(mask) >= 1
    assert [t for t in hidden if t != mask] == [
        t for t, h in zip(whole, hidden, strict=True) if h != mask
    ]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("The capital.", {}, "there is no [MASK] in 'The capital.'; write [MASK]"),
        ("The capital.", {"hide": "Paris"}, "the word 'Paris' is not in 'The capital.'"),
        ("The capitals", {"hide": "capital"}, "the word 'capital' is not in"),
        ("[MASK] " + "the " * 20, {}, "23 tokens in '[MASK] the the"),
        ("", {}, "there is no [MASK] in ''"),
        ("a \ud800 [MASK]", {}, "a text is not Unicode"),
    ],
)
def test_invalid_texts(run_folder: Path, text: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        TrainedModel.open(run_folder).filler().fill(text, top=2, **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert "--hide" not in str(caught.value), "a client of the server has no such option"


def test_a_text_of_maximum_length(run_folder: Path) -> None:
    filled = TrainedModel.open(run_folder).filler().fill("[MASK] " + "the " * 13, top=2)
    assert len(filled.ids) == CONFIG.max_positions


def broken_folders(folder: Path, run_folder: Path) -> dict[str, tuple[Path, str]]:
    """Folders without a usable model, and the error for each."""
    save(folder / "no_head", make_model(words=False))
    unfinished = folder / "unfinished"
    unfinished.mkdir()
    lines = [{"kind": "step", "step": step} for step in (10, 1200)]
    (unfinished / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    known = folder / "known"
    shutil.copytree(unfinished, known)
    (known / "recipe.yaml").write_text("tasks: {words: {}}\nstages: [{words: 5000}]\n")
    fresh = folder / "fresh"
    fresh.mkdir()
    (fresh / "recipe.yaml").write_text("seed: 1\n")
    cut = folder / "cut" / "weights"
    shutil.copytree(run_folder / "weights", cut)
    data = (run_folder / "weights/weights.safetensors").read_bytes()
    (cut / "weights.safetensors").write_bytes(data[: len(data) // 2])
    return {
        "no head": (folder / "no_head", "no masked-LM head"),
        "no head, exported": (folder / "no_head/hf", "no masked-LM head"),
        "unfinished": (unfinished, "not finished (1,200 steps done) and has no model yet"),
        "known": (known, "not finished (1,200 of 5,000 steps done)"),
        "fresh": (fresh, "not finished (no step logged)"),
        "cut": (folder / "cut", "weights.safetensors: cannot be read"),
        "nothing": (folder / "nothing", "no such file or folder"),
        "empty": (folder, "not a checkpoint of a known format"),
    }


def test_folders_without_a_model(tmp_path: Path, run_folder: Path) -> None:
    for name, (folder, message) in broken_folders(tmp_path, run_folder).items():
        with pytest.raises(UserError) as caught:
            TrainedModel.open(folder).filler()
        assert message in str(caught.value) and "\n" not in str(caught.value), name


def test_the_tokenizer_of_another_model(run_folder: Path, tmp_path: Path) -> None:
    """Its ids would be rows that the model does not have."""
    folder = tmp_path / "hf"
    shutil.copytree(run_folder / "hf", folder)
    (folder / "tokenizer.json").unlink()
    more = [*SPECIALS, *(f"word{i}" for i in range(5_000))]
    (folder / "vocab.txt").write_text("\n".join(more))
    for use in (TrainedModel.filler, TrainedModel.embedder):
        with pytest.raises(UserError, match=r"has 5,005 tokens, .* belongs to another model$"):
            use(TrainedModel.open(folder))


def test_an_unknown_task(run_folder: Path) -> None:
    with pytest.raises(UserError, match='--task distanc: no such task.*did you mean "distance"'):
        TrainedModel.open(run_folder).filler("distanc")
    with pytest.raises(UserError, match="hf; it names no tasks"):
        TrainedModel.open(run_folder / "hf").filler("distance")


def test_which_heads_predict_words(run_folder: Path, tmp_path: Path) -> None:
    assert open_model(run_folder / "weights").masked_lm_heads == ["masking", "phrases"]
    assert len(open_model(run_folder / "hf").masked_lm_heads) == 1


def test_output_as_text_and_as_json(run_folder: Path) -> None:
    filler = TrainedModel.open(run_folder).filler()
    filled = filler.fill("the capital of [MASK] is Paris", top=2, hide="Paris")
    shown = as_text(filler, filled)
    first, one, two = shown.plain.split("\n")
    assert first == "the capital of [MASK] is [MASK]"
    assert one.startswith("  1  ") and two.startswith("  2  ") and one.count("%") == 2
    assert "(it was: paris," in two and "it was" not in one
    console = Console(force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(shown)
    assert "\x1b[1;33m[MASK]" in capture.get()
    record = json.loads(json.dumps(as_record(filler, "a text", filled)))
    assert record["text"] == "a text" and record["task"] == "masking"
    first, second = record["masks"]
    assert first["position"] == 4 and "was" not in first and second["was"] == "paris"
    assert first["guesses"][0]["probability"] >= first["guesses"][1]["probability"] > 0
    assert TOKENIZER.tokens([first["guesses"][0]["id"]]) == [first["guesses"][0]["token"]]


def test_examples_of_a_run_that_has_just_ended(tmp_path: Path) -> None:
    corpus = write_small_corpus(tmp_path / "corpus", documents=12)
    source, _ = split_corpus(corpus, 0.0, ())
    config = replace(CONFIG, vocab_size=corpus.vocabulary.size, max_positions=40)
    save(tmp_path, make_model(config), config, corpus.tokenizer())
    lines = examples(tmp_path / "hf", source)
    assert len(lines) == 3 and lines == examples(tmp_path / "hf", source)
    for line in lines:
        text, said = line.split("  ->  ")
        assert text.count(MASK) == 1 and said.count("%") == 3 and 'it was "w' in said
    save(tmp_path / "none", make_model(words=False))
    assert examples(tmp_path / "none/hf", source) == []


def test_sentences_of_unknown_words_are_no_examples(tmp_path: Path) -> None:
    """They ended a run that was finished with a traceback."""
    ids = np.full(40, SPECIALS.index("[UNK]"))
    starts = (np.arange(40) % 10 == 0).astype(np.uint8)
    annotations = {"sentence": starts, "word": np.ones(40, np.uint8)}
    annotations |= {kind: np.zeros(40, np.uint8) for kind in ("phrase", "entity")}
    tokenizer = wordpiece([*SPECIALS, "w0"], lower=False)
    write_corpus(tmp_path / "corpus", [("unknown", ids, annotations)], tokenizer)
    corpus = open_corpus(tmp_path / "corpus")
    config = replace(CONFIG, vocab_size=corpus.vocabulary.size, max_positions=40)
    save(tmp_path, make_model(config), config, corpus.tokenizer())
    assert examples(tmp_path / "hf", split_corpus(corpus, 0.0, ())[0]) == []
