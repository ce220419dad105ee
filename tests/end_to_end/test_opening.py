"""A written folder opens in transformers, sentence-transformers and the servers that read its
files, with palm_ds's numbers: every kind of head, any pooling, texts up to the longest."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from tokenizers import processors

from palm_ds.cli.convert import COMMAND
from palm_ds.common.errors import UserError
from palm_ds.inference.embedder import EmbeddingSettings
from palm_ds.inference.fill_mask import Filler
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.multi_task_model import Model
from palm_ds.model.pooling import TextPooling
from palm_ds.text.tokenizer import wordpiece
from palm_ds.train.export import check_export, head_taken, info_of, write_hf, write_onnx
from palm_ds.train.setup.sources import open_data
from palm_ds.weights import weights_folder
from palm_ds.weights.convert.convert import ConversionOptions, convert
from palm_ds.weights.formats.weights_info import INFO, read_info
from tests.helpers.other_readers import TeiModel, as_old_vllm, as_tei, as_vllm, vllm_class
from tests.helpers.saved_model import MORE_TASKS, TASKS, recipe_of, save_model
from tests.helpers.text_tables import SPECIALS, WORDS, opened, small_tokenizer

BACKBONE: dict[str, Any] = {
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "max_positions": 64,
    "token_types": 2,
    "task_types": 4,
}
ROWS = {"mood": 1, "topic": 2, "size": 3, "pair": 1, "answer": 2}
ROWS |= {"names": 3, "choice": 1, "rank": 2, "words": 3}
"""{task: its row of the task embedding}"""
CLOSE: dict[str, Any] = {"abs": 1e-5}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of one model with a head of every kind."""
    tasks = {**TASKS, **MORE_TASKS}
    chosen = {name: {**task, "task_id": ROWS[name]} for name, task in tasks.items()}
    folder = tmp_path_factory.mktemp("opening") / "run"
    return save_model(folder, list(chosen), tasks=chosen, backbone=BACKBONE)


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """{task: the folder of its head}; `words` with the masked-LM head."""
    found = {}
    for name in ROWS:
        found[name] = tmp_path_factory.mktemp("exported") / name
        options = ConversionOptions(head=name, verify=False)
        if name == "words":
            options = ConversionOptions(task=name, verify=False)
        convert(run, found[name], "huggingface", options)
    return found


def predicted(run: Path, task: str) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Predictions for the rows of the task's file, and the rows."""
    asked = TrainedModel.open(run).predictor()
    (each,) = (x for x in asked.passes if task in [y.name for y in x.tasks])
    recipe = recipe_of(run)
    columns = recipe.sources[recipe.built_tasks[task].source].read.columns
    file = Path(recipe.sources[recipe.built_tasks[task].source].table)
    source = opened(file, columns=dict(columns))
    (chunk,) = asked.predict(each, asked.source(source.table))
    return list(chunk.predictions[task]), [source.row(n) for n in range(len(source))]


def pipeline(kind: str, folder: Path) -> Any:
    return transformers.pipeline(kind, model=str(folder), device="cpu")  # type: ignore[call-overload]


def scores_of(found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {each["label"]: each["score"] for each in found}


def test_every_folder_is_a_bert(exported: dict[str, Path]) -> None:
    kinds = {name: transformers.AutoConfig.from_pretrained(x) for name, x in exported.items()}
    assert {config.model_type for config in kinds.values()} == {"bert"}
    assert {name: config.architectures[0] for name, config in kinds.items()} == {
        **dict.fromkeys(("mood", "topic", "size", "pair", "rank"), "BertForSequenceClassification"),
        "answer": "BertForQuestionAnswering",
        "names": "BertForTokenClassification",
        "choice": "BertForMultipleChoice",
        "words": "BertForMaskedLM",
    }


@pytest.mark.parametrize("task", ["mood", "topic", "size", "pair", "rank"])
def test_text_classification(task: str, run: Path, exported: dict[str, Path]) -> None:
    ours, rows = predicted(run, task)
    given = [
        {"text": x["text_a"], "text_pair": x["text_b"]} if task in ("pair", "rank") else x["text_a"]
        for x in rows
    ]
    labels = getattr(TrainedModel.open(run).predictor().tasks[task], "labels", ())
    found = pipeline("text-classification", exported[task])(given, top_k=None)
    for mine, theirs in zip(ours, found, strict=True):
        scores = scores_of(theirs if isinstance(theirs, list) else [theirs])
        if task == "size":
            assert scores == pytest.approx({"LABEL_0": mine["value"]}, **CLOSE)
        elif task == "rank":
            wanted = 1 / (1 + np.exp(-mine["score"]))
            assert scores == pytest.approx({"LABEL_0": wanted}, **CLOSE)
        else:
            assert scores == pytest.approx(dict(zip(labels, mine["probs"], strict=True)), **CLOSE)


def test_a_run_joins_pairs_as_its_tokenizer_does(tmp_path: Path) -> None:
    """RoBERTa's: two separators, one token type; the run trains what hf/ is given."""
    tokenizer = small_tokenizer()
    ends = [(x, tokenizer.backend.token_to_id(x)) for x in ("[SEP]", "[CLS]")]
    tokenizer.backend.post_processor = processors.RobertaProcessing(*ends)
    run = save_model(tmp_path / "run", ["pair"], backbone=BACKBONE, tokenizer=tokenizer)
    folder = convert(run, tmp_path / "hf", "huggingface", ConversionOptions(head="pair")).target
    ours, rows = predicted(run, "pair")
    given = [{"text": x["text_a"], "text_pair": x["text_b"]} for x in rows]
    found = pipeline("text-classification", folder)(given, top_k=None)
    for mine, theirs in zip(ours, found, strict=True):
        assert scores_of(theirs) == pytest.approx(
            dict(zip("01", mine["probs"], strict=True)), **CLOSE
        )


def test_a_cross_encoder_scores_pairs(run: Path, exported: dict[str, Path]) -> None:
    ours, rows = predicted(run, "pair")
    model = CrossEncoder(str(exported["pair"]), device="cpu")
    found = model.predict([(x["text_a"], x["text_b"]) for x in rows], apply_softmax=True)
    assert np.abs(found - np.array([x["probs"] for x in ours])).max() < 1e-5


def test_a_cross_encoder_ranks(run: Path, exported: dict[str, Path]) -> None:
    """One score, whose sigmoid is the probability of "relevant"."""
    ours, rows = predicted(run, "rank")
    model = CrossEncoder(str(exported["rank"]), device="cpu")
    assert model.num_labels == 1
    pairs = [(x["text_a"], x["text_b"]) for x in rows]
    assert np.abs(model.predict(pairs) - [x["probs"][1] for x in ours]).max() < 1e-5
    plain = model.predict(pairs, activation_fn=torch.nn.Identity())
    assert np.abs(plain - [x["score"] for x in ours]).max() < 1e-5


def test_token_classification(run: Path, exported: dict[str, Path]) -> None:
    ours, rows = predicted(run, "names")
    tag = pipeline("token-classification", exported["names"])
    for mine, row in zip(ours, rows, strict=True):
        found = tag(" ".join(row["tokens"]), ignore_labels=[])
        # palm_ds writes B- where an entity begins, whatever the tag's prefix
        assert [x["entity"][-1] for x in found] == [tag[-1] for tag in mine["tags"]]
        assert [float(x["score"]) for x in found] == pytest.approx(mine["probs"], **CLOSE)


def test_question_answering(run: Path, exported: dict[str, Path]) -> None:
    """transformers 5 has no pipeline for it: the scores of its class."""
    ours, rows = predicted(run, "answer")
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(exported["answer"]).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported["answer"])
    compared = 0
    for mine, row in zip(ours, rows, strict=True):
        given = tokenizer(row["question"], row["context"], return_tensors="pt")
        if given["input_ids"].shape[1] > 32:  # palm_ds reads a longer one in windows of 32
            continue
        with torch.no_grad():
            scores = model(**given)
        inside = given["token_type_ids"][0].bool() & (given["input_ids"][0] != 3)
        sums = scores.start_logits[0][:, None] + scores.end_logits[0][None]
        allowed = torch.triu(inside[:, None] & inside[None])
        first, last = divmod(int(sums.masked_fill(~allowed, -np.inf).argmax()), len(inside))
        assert tokenizer.decode(given["input_ids"][0][first : last + 1]) == mine["text"]
        compared += 1
    assert compared


def test_multiple_choice(run: Path, exported: dict[str, Path]) -> None:
    ours, rows = predicted(run, "choice")
    model = transformers.AutoModelForMultipleChoice.from_pretrained(exported["choice"]).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported["choice"])
    for mine, row in zip(ours, rows, strict=True):
        texts = [row["text_a"]] * 3, row["choices"]
        given = tokenizer(*texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            scores = model(**{name: x[None] for name, x in given.items()}).logits
        assert scores.softmax(-1)[0].tolist() == pytest.approx(mine["probs"], **CLOSE)


def without_special_tokens(found: list[dict[str, Any]], filler: Filler) -> list[dict[str, Any]]:
    """transformers proposes them, too."""
    return [each for each in found if each["token"] in filler.tokenizer.vocabulary.regular]


def test_fill_mask_up_to_the_longest_text(run: Path, exported: dict[str, Path]) -> None:
    filler = TrainedModel.open(run).filler("words")
    fill = pipeline("fill-mask", exported["words"])
    for text in ("so [MASK] .", "so " * 61 + "[MASK]"):
        (hidden,) = filler.fill(text, top=5).hidden
        found = without_special_tokens(fill(text, top_k=20), filler)
        found = [(each["token"], each["score"]) for each in found[:5]]
        assert [token for token, _ in found] == [token for token, _ in hidden.guesses]
        wanted = [share for _, share in hidden.guesses]
        assert [share for _, share in found] == pytest.approx(wanted, **CLOSE)


def test_features(run: Path, exported: dict[str, Path]) -> None:
    texts = ["so good", "a very bad x ?", "so " * 62]
    settings = EmbeddingSettings(tokens=True, task="words")
    embedder = TrainedModel.open(run).embedder(settings)
    ours = embedder.embed_tokens(embedder.encode(texts))
    extract = pipeline("feature-extraction", exported["words"])
    for mine, text in zip(ours, texts, strict=True):
        assert np.abs(mine - np.array(extract(text)[0])).max() < 1e-5


@pytest.mark.parametrize("task", list(ROWS))
def test_the_example_of_the_card_runs(
    task: str, exported: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    card = (exported[task] / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", card, re.S)
    monkeypatch.chdir(exported[task])
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


# ---- encoders: vectors of texts ----

TOKENIZER = wordpiece([*SPECIALS, *WORDS], lower=True)
ENCODERS = {
    "bert": EncoderConfig(**BACKBONE, vocab_size=TOKENIZER.size),
    "roberta": EncoderConfig(
        **{**BACKBONE, "task_types": 0, "max_positions": 65, "token_types": 1},
        vocab_size=TOKENIZER.size,
        position_offset=1,
    ),
    "modernbert": EncoderConfig.from_dict(
        {**BACKBONE, "kind": "modernbert", "token_types": 1, "vocab_size": TOKENIZER.size},
        "backbone",
    ),
}
POOLINGS = {
    "mean": TextPooling(),
    "cls": TextPooling(pooling="cls", normalize=True, trained=True, prompts={"query": "so "}),
    "short": TextPooling(max_length=9, trained=True),
}


def encoder_folder(
    folder: Path, family: str, pooling: TextPooling, layers: int = BACKBONE["num_layers"]
) -> Path:
    config = replace(ENCODERS[family], num_layers=layers)
    torch.manual_seed(2)
    model = Model(build_encoder(config), {}, {}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    info = weights_folder.WeightsInfo(backbone=config, task_ids={"a": 2}, export_task="a")
    weights_folder.save_weights(
        model, folder / "weights", info, tokenizer=TOKENIZER, pooling=pooling
    )
    row = 2 if config.task_types else 0
    hf = dict(config=config, tokenizer=TOKENIZER, family=family, task_id=row, pooling=pooling)
    weights_folder.export_hf(model, folder / "hf", **hf)  # type: ignore[arg-type]
    return folder


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("kind", POOLINGS)
def test_sentence_transformers_gives_the_same_vectors(
    kind: str, family: str, tmp_path: Path
) -> None:
    """Also of texts of 61 to 66 tokens with [CLS] and [SEP], where the encoder reads 64."""
    folder = encoder_folder(tmp_path, family, POOLINGS[kind])
    texts = ["", "so good", "very bad ?", *("so " * n for n in (59, 60, 61, 62, 63, 64, 200))]
    model = SentenceTransformer(str(folder / "hf"), device="cpu")
    assert model.max_seq_length == (9 if kind == "short" else 64)
    theirs = model.encode(texts)
    for place in ("weights", "hf"):  # a run's weights know their pooling too
        ours = TrainedModel.open(folder / place).embedder().embed(texts)
        assert np.abs(ours - theirs).max() < 1e-5
    if prompts := POOLINGS[kind].prompts:
        asked = EmbeddingSettings(prompt=prompts["query"])
        ours = TrainedModel.open(folder / "hf").embedder(asked).embed(texts)
        assert np.abs(ours - model.encode(texts, prompt_name="query")).max() < 1e-5


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("kind", POOLINGS)
def test_servers_read_its_pooling_and_length(kind: str, family: str, tmp_path: Path) -> None:
    folder = encoder_folder(tmp_path, family, POOLINGS[kind]) / "hf"
    pooling = POOLINGS[kind].pooling
    length = 9 if kind == "short" else 64
    assert as_tei(folder) == TeiModel("embedding", pooling, length, 0)
    assert as_vllm(folder) == (pooling.upper(), kind == "cls", length)
    assert as_old_vllm(folder) == pooling.upper()
    assert vllm_class(folder) == "embed"


def test_vllm_reads_the_encoder_of_a_masked_lm(run: Path, tmp_path: Path) -> None:
    """Its registry has no BertForMaskedLM; the encoder alone opens, with the same vectors."""
    for name, head_class in (("words", ""), ("alone", "Model")):
        options = ConversionOptions(task="words", head_class=head_class)
        done = convert(run, tmp_path / name, "huggingface", options)
        assert done.parity and done.parity.passed
    with pytest.raises(AssertionError, match="BertForMaskedLM is not supported"):
        vllm_class(tmp_path / "words")
    assert vllm_class(tmp_path / "alone") == "embed"
    assert any(name.startswith("heads.words") for name in done.report.lost)
    one, other = (
        transformers.AutoModel.from_pretrained(tmp_path / name) for name in ("words", "alone")
    )
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
    with pytest.raises(UserError, match="head_class: Model is the encoder without a head"):
        convert(
            run,
            tmp_path / "no",
            "huggingface",
            ConversionOptions(head="mood", head_class="Model"),
        )


def test_servers_read_heads(exported: dict[str, Path]) -> None:
    kinds = {"mood": "classifier", "pair": "classifier", "size": "reranker", "rank": "reranker"}
    for task, kind in kinds.items():
        found = as_tei(exported[task])
        assert (found.kind, found.max_input_length) == (kind, 64)
        assert vllm_class(exported[task]) == "classify"
        assert not (exported[task] / "modules.json").exists()  # it is no encoder of texts
    assert as_tei(exported["words"]) == TeiModel("embedding", "mean", 64, 0)


def test_what_sentence_transformers_saves_opens_in_servers(tmp_path: Path) -> None:
    """It writes no flags: a conversion adds them."""
    folder = encoder_folder(tmp_path, "bert", POOLINGS["cls"])
    model = SentenceTransformer(str(folder / "hf"), device="cpu")
    model.max_seq_length = 12
    model.save(str(tmp_path / "saved"))
    with pytest.raises(KeyError):
        as_tei(tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "again", "huggingface")
    assert as_tei(tmp_path / "again") == TeiModel("embedding", "cls", 12, 0)
    convert(tmp_path / "saved", tmp_path / "ours")
    texts = ["so good", "so " * 90]
    again = SentenceTransformer(str(tmp_path / "again"), device="cpu").encode(texts)
    assert np.abs(model.encode(texts) - again).max() < 1e-6
    for place in ("saved", "again", "ours"):
        ours = TrainedModel.open(tmp_path / place).embedder().embed(texts)
        assert np.abs(model.encode(texts) - ours).max() < 1e-5


# ---- onnx/ next to the weights ----


def run_graph(folder: Path, name: str, given: Mapping[str, Any], output: str) -> np.ndarray:
    """An output of a graph, called as Optimum does: with what the tokenizer gives."""
    session = onnxruntime.InferenceSession(str(folder / "onnx" / name))
    values = {x.name: np.asarray(given[x.name]) for x in session.get_inputs()}
    (found,) = session.run([output], values)
    return np.asarray(found)


def test_onnx_gives_the_vectors_of_its_folder(tmp_path: Path, capsys) -> None:
    """What sentence-transformers' `backend="onnx"` reads: `last_hidden_state`, for
    its pooling. The backend itself needs optimum-onnx, which wants transformers 4."""
    source = encoder_folder(tmp_path, "bert", POOLINGS["cls"], layers=1)  # seconds to export each
    folder = tmp_path / "with_onnx"
    asked = ["--to", "huggingface", "--onnx", "fp32,int8", "--json"]
    assert COMMAND.call([str(source / "weights"), str(folder), *asked]) == 0
    said = json.loads(capsys.readouterr().out)["onnx"]
    sizes = {x.name: x.stat().st_size for x in (folder / "onnx").iterdir()}
    assert sizes.keys() == {"model.onnx", "model_int8.onnx"} and said["why_none"] is None
    assert {name: each["bytes"] for name, each in said["files"].items()} == sizes
    assert all(each["parity"]["passed"] for each in said["files"].values())
    texts = ["so good", "very bad ? " * 9]
    model = SentenceTransformer(str(folder), device="cpu")
    given = model.tokenizer(texts, padding=True, truncation=True, return_tensors="np")
    last = run_graph(folder, "model.onnx", given, "last_hidden_state")
    whole = {"token_embeddings": torch.from_numpy(last)}
    whole["attention_mask"] = torch.from_numpy(given["attention_mask"])
    pooled = model[2](model[1](whole))["sentence_embedding"].numpy()
    vectors = run_graph(folder, "model.onnx", given, "sentence_embedding")
    for found in (pooled, vectors):
        assert np.abs(found - model.encode(texts)).max() < 1e-5
    small = run_graph(folder, "model_int8.onnx", given, "sentence_embedding")
    assert (small * vectors).sum(1).min() > 0.95


def test_a_run_writes_onnx_of_its_head(tmp_path: Path, caplog) -> None:
    """By default; other weights in the same folder do not keep it."""
    tasks = {"rank": {**MORE_TASKS["rank"], "task_id": 1}}
    run = save_model(tmp_path / "run", ["rank"], tasks=tasks, backbone=BACKBONE)
    recipe, asked = recipe_of(run), TrainedModel.open(run).predictor()
    info = info_of(recipe, asked.model, steps=2)
    written = (tmp_path / "hf", recipe, info, asked.model.state_dict(), open_data(recipe))
    write_hf(*written, steps=2)
    lines = write_onnx(tmp_path / "hf", recipe)
    said = next(lines)  # before it begins
    assert re.fullmatch(
        rf"writing {tmp_path}/hf/onnx, which takes about \d+ s; .*leaves it out", said
    )
    assert not (tmp_path / "hf/onnx").exists()
    (line,) = lines
    text = rf"ONNX: {re.escape(str(tmp_path))}/hf/onnx/model.onnx, [\d.]+ KB; largest difference "
    assert re.match(text, line)
    assert [x.name for x in (tmp_path / "hf/onnx").iterdir()] == ["model.onnx"]
    ours, rows = predicted(run, "rank")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    pairs = [x["text_a"] for x in rows], [x["text_b"] for x in rows]
    given = tokenizer(*pairs, padding=True, return_tensors="np")
    logits = run_graph(tmp_path / "hf", "model.onnx", given, "logits")
    assert np.abs(logits[:, 0] - [x["score"] for x in ours]).max() < 1e-5
    write_hf(*written, steps=2)
    assert not list((tmp_path / "hf").rglob("*onnx*"))
    assert list(write_onnx(tmp_path / "hf", replace(recipe, export_onnx=()))) == []
    asked_for = replace(recipe, export_onnx=("fp32",))
    assert list(write_onnx(tmp_path / "none", asked_for)) == []  # a finished run continues
    assert "export_onnx: nothing was written: " in caplog.text


def test_a_missing_package_is_one_line_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    recipe = SimpleNamespace(export_onnx=("fp32",))
    line = r"^export_onnx needs onnx and onnxscript and onnxruntime: pip install 'palm_ds\[onnx\]'$"
    with pytest.raises(UserError, match=line):
        check_export(recipe)  # type: ignore[arg-type]


# ---- the folder that a run writes ----


def test_a_run_writes_the_task_that_trains_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = {"mood": {**TASKS["mood"], "task_id": 1}}
    named = {"datasets": ["owner/news"]}
    run = save_model(tmp_path / "run", ["mood"], tasks=tasks, backbone=BACKBONE, **named)
    recipe, asked = recipe_of(run), TrainedModel.open(run).predictor()
    state, data = asked.model.state_dict(), open_data(recipe)
    info = info_of(recipe, asked.model, steps=2)
    assert head_taken(recipe, state)
    kind = type(recipe.built_tasks["mood"])
    pooling = TextPooling(pooling="cls", normalize=True, trained=True)
    scores = {"mood": {"accuracy": 0.75}}
    write_hf(tmp_path / "head", recipe, info, state, data, steps=2, scores=scores)
    monkeypatch.setattr(kind, "text_pooling", lambda self: pooling)
    write_hf(tmp_path / "vectors", recipe, info, state, data, steps=2)
    card = (tmp_path / "head/README.md").read_text()
    assert "pipeline_tag: text-classification" in card and "- `mood`: accuracy 0.75" in card
    assert "\ndatasets:\n- owner/news\n" in card
    assert "- `mood`: classification" in card and str(tmp_path) not in card
    assert as_vllm(tmp_path / "vectors") == ("CLS", True, 64)
    card = (tmp_path / "vectors/README.md").read_text()
    assert card.startswith("---\nlibrary_name: sentence-transformers\npipeline_tag: sentence-simil")
    assert "- text-embeddings-inference" in card
    settings = EmbeddingSettings(pooling="cls", normalize=True, task="mood")
    ours = TrainedModel.open(run).embedder(settings).embed(["so good"])
    theirs = SentenceTransformer(str(tmp_path / "vectors"), device="cpu").encode(["so good"])
    assert np.abs(ours - theirs).max() < 1e-5


@pytest.mark.parametrize("family", ["bert", "ernie"])
def test_the_recipe_chooses_the_family(family: str, tmp_path: Path) -> None:
    tasks = {"words": {**MORE_TASKS["words"], "task_id": 2}}
    changes: dict[str, Any] = {"tasks": tasks, "backbone": BACKBONE, "export_family": family}
    run = save_model(tmp_path / "run", ["words"], **changes)
    recipe, filler = recipe_of(run), TrainedModel.open(run).filler()
    info = read_info(run / "weights" / INFO)
    state = filler.model.state_dict()
    write_hf(tmp_path / "hf", recipe, info, state, open_data(recipe), steps=2)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    assert (config.model_type, small_tokenizer().size) == (family, config.vocab_size)
    (hidden,) = filler.fill("so [MASK] .", top=5).hidden
    found = pipeline("fill-mask", tmp_path / "hf")("so [MASK] .", top_k=20)
    wanted = [share for _, share in hidden.guesses]
    scores = [each["score"] for each in without_special_tokens(found, filler)[:5]]
    assert scores == pytest.approx(wanted, **CLOSE)
