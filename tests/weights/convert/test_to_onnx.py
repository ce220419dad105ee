"""ONNX files give what the checkpoint gives, however texts are padded, or are not written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.crf import CRFHead, viterbi
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.heads.outputs import HeadOutputs
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.multi_task_model import Model
from palm_ds.text.tokenizer import load_tokenizer
from palm_ds.weights.convert import onnx_parity, to_onnx
from palm_ds.weights.convert.convert import convert
from palm_ds.weights.convert.to_onnx import OnnxOptions, OnnxResult, OnnxRun, convert_to_onnx
from palm_ds.weights.formats.contents import NEXT_SENTENCE_CLASSES, CheckpointContents
from palm_ds.weights.formats.onnx import write
from palm_ds.weights.formats.onnx.description import read_description
from palm_ds.weights.formats.onnx.run import OnnxModel
from palm_ds.weights.formats.weights_info import WeightsInfo
from palm_ds.weights.weights_folder import save_weights
from tests.helpers.sampling import only
from tests.helpers.small_configs import SMALL, letters
from tests.helpers.word_encoders import KINDS
from tests.helpers.word_encoders import config as word_config
from tests.weights.formats.hf_models import make, save
from tests.weights.formats.huggingface.test_read import minilm

CONFIG = replace(SMALL, num_layers=1, activation="relu", task_types=3)
WORDS = letters("t")
HEADS = ("words", "kind", "size", "next", "tags", "answer")
ALLOWED = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 1], [1, 1, 1], [0, 1, 1]]).bool()
OUTPUTS = {
    "kind": HeadOutputs(labels=("a", "b", "c")),
    "size": HeadOutputs(problem_type="regression", mean=3.0, deviation=2.0),
    "next": HeadOutputs(labels=NEXT_SENTENCE_CLASSES),
    "answer": HeadOutputs(head_class="ForQuestionAnswering"),
}


@pytest.fixture(scope="module", autouse=True)
def operators_are_read_once() -> Iterator[None]:
    """torch would read the sources of its 500 operators for each export, which takes a second."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with pytest.MonkeyPatch.context() as patch:
        once = staticmethod(cache(ONNXRegistry.from_torchlib))
        patch.setattr(ONNXRegistry, "from_torchlib", once)
        yield


def noisy(model: Model) -> Model:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


@pytest.fixture(scope="module")
def model() -> Model:
    """ERNIE's relu, task embeddings, and a head of every kind."""
    backbone, size = build_encoder(CONFIG), CONFIG.hidden_size
    heads = {
        "words": MaskedLMHead(backbone),
        "kind": ClassHead(size, 3, pooled=True),
        "size": ClassHead(size, 1, pooled=True),
        "next": ClassHead(size, 2, pooled=True),
        "tags": CRFHead(size, 3),
        "answer": ClassHead(size, 2),
    }
    return noisy(Model(backbone, heads, {name: name for name in HEADS}))


def of_run(contents: CheckpointContents) -> OnnxRun:
    return OnnxRun(allowed={"tags": ALLOWED})


@pytest.fixture(scope="module")
def converted(model: Model, tmp_path_factory: pytest.TempPathFactory) -> OnnxResult:
    folder = tmp_path_factory.mktemp("onnx")
    info = WeightsInfo(
        backbone=CONFIG,
        task_ids={"kind": 1, "tags": 2},
        head_of={name: name for name in HEADS},
        token_heads=("answer",),
        heads=OUTPUTS,
    )
    save_weights(model, folder / "source", info, tokenizer=WORDS)
    options = OnnxOptions(heads=HEADS, precisions=("int8", "fp16"))
    return convert_to_onnx(folder / "source", folder / "out", options, of_run=of_run)


def graph_of(done: OnnxResult, precision: str = "fp32") -> OnnxModel:
    name = next(each.name for each in done.files if each.precision == precision)
    return OnnxModel(done.target / "onnx" / name, read_description(done.target))


def ours(model: Model, ids: torch.Tensor, segments: torch.Tensor, task: int) -> dict[str, Any]:
    """What palm_ds computes of one text."""
    text = PackedText(input_ids=ids.numpy(), token_type_ids=segments.numpy(), task_id=task)
    batch = Batch.from_rows([[text]], length=len(ids), pad=CONFIG.pad)
    with torch.no_grad():
        last = model.backbone(batch)[0]
        pooled = model.backbone.pooler(last[:1])
        heads: dict[str, Any] = dict(model.heads.items())
        crf = heads["tags"]
        emissions = crf.emissions(last)
        steps = crf.crf.transitions.masked_fill(~ALLOWED, -1e4)
        return {
            "last_hidden_state": last,
            "pooler_output": pooled[0],
            "sentence_embedding": last.mean(0),
            "logits_words": heads["words"].logits(last),
            "logits_kind": heads["kind"].logits(pooled)[0],
            "logits_size": heads["size"].logits(pooled)[0] * 2.0 + 3.0,
            "logits_next": heads["next"].logits(pooled)[0].flip(-1),
            "logits_tags": emissions,
            "start_logits_answer": heads["answer"].logits(last)[:, 0],
            "end_logits_answer": heads["answer"].logits(last)[:, 1],
            "tags_tags": viterbi(emissions, steps, torch.zeros(len(ids), dtype=torch.int64)),
        }


TOKENS = (
    *("last_hidden_state", "logits_words", "logits_tags", "tags_tags"),
    *("start_logits_answer", "end_logits_answer"),
)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("texts", [1, 5])
def test_padding_changes_nothing(model, converted, texts: int, side: str) -> None:
    rng = torch.Generator().manual_seed(texts)
    longest = CONFIG.max_length
    lengths = [longest, 2, 3, 7, longest - 1][:texts]
    values = {
        name: torch.zeros(texts, longest, dtype=torch.int64)
        for name in converted.description.inputs
    }
    rows = []
    for number, length in enumerate(lengths):
        at = slice(0, length) if side == "right" else slice(longest - length, longest)
        ids = torch.randint(1, CONFIG.vocab_size or 1, (length,), generator=rng)
        segments = torch.randint(0, CONFIG.token_types, (length,), generator=rng)
        values["input_ids"][number, at], values["token_type_ids"][number, at] = ids, segments
        values["attention_mask"][number, at] = values["word_mask"][number, at] = 1
        values["task_type_ids"][number] = number % 3
        rows.append((at, ours(model, ids, segments, number % 3)))
    found = graph_of(converted).run({name: x.numpy() for name, x in values.items()})
    assert list(found) == list(converted.description.outputs)
    for number, (at, wanted) in enumerate(rows):
        for name, value in wanted.items():
            got = found[name][number]
            got = (
                got[at]
                if len(got) == longest and value.shape[:1] != got.shape[:1] or name in TOKENS
                else got
            )
            np.testing.assert_allclose(got, value.numpy(), atol=2e-5, err_msg=name)


def test_a_folder_says_what_is_in_it(converted: OnnxResult) -> None:
    about = json.loads((converted.target / "palm_ds_onnx.json").read_text())
    assert about["inputs"] == [
        *("input_ids", "attention_mask", "token_type_ids", "task_type_ids", "word_mask")
    ]
    assert about["opset"] == 18 and about["max_length"] == CONFIG.max_length
    heads = about["heads"]
    assert {name: head["task_id"] for name, head in heads.items()} == {
        **dict.fromkeys(HEADS, 0),
        **{"kind": 1, "tags": 2},
    }
    assert heads["kind"]["labels"] == ["a", "b", "c"]
    assert heads["next"]["labels"] == ["the next", "another text"], "in the order of the scores"
    assert heads["tags"]["tags"] == "tags_tags"
    assert list(about["files"]) == [f"onnx/{each.name}" for each in converted.files]
    assert all(each["parity"]["passed"] for each in about["files"].values())
    graph = onnx.load(converted.target / "onnx" / "model.onnx")
    onnx.checker.check_model(graph)
    assert [(x.domain, x.version) for x in graph.opset_import] == [("", 18)]
    stored = {x.key: x.value for x in graph.metadata_props}
    assert json.loads(stored["palm_ds"])["outputs"] == about["outputs"]
    dims = [
        [d.dim_param or d.dim_value for d in x.type.tensor_type.shape.dim]
        for x in graph.graph.input
    ]
    assert dims == [["batch", "length"]] * len(about["inputs"])
    assert str(Path(__file__).parents[3]) not in str(graph), "no path of this machine"
    again = load_tokenizer(converted.target)
    assert again.fingerprint == WORDS.fingerprint


def test_smaller_files_are_measured(converted: OnnxResult) -> None:
    errors = {}
    for each in converted.files:
        assert each.parity is not None and each.parity.passed
        assert each.agreement.keys() == {"words", "kind", "next", "tags", "answer"}
        errors[each.precision] = each.parity.worst.largest
    assert errors["fp32"] < 1e-5 * 20 < errors["fp16"] < errors["int8"]
    sizes = [each.bytes for each in converted.files]
    assert sizes == [
        (converted.target / "onnx" / each.name).stat().st_size for each in converted.files
    ]


def test_a_file_that_differs_too_much_is_refused(converted, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(onnx_parity.TOLERANCE, "int8", 1e-4)
    monkeypatch.setattr(write, "write_fp32", _copy_of(converted))
    with pytest.raises(
        UserError, match=r"the outputs of model_int8.onnx differ, so nothing was wr"
    ):
        _again(converted, tmp_path / "out", precisions=("int8",))
    assert not any(tmp_path.iterdir())


def test_a_wrong_graph_is_refused(converted, tmp_path, monkeypatch) -> None:
    def wrong(contents: object, description: object, path: Path, allowed: object) -> None:
        graph = onnx.load(converted.target / "onnx" / "model.onnx")
        for each in graph.graph.initializer:
            if each.name.endswith("position.weight"):
                values = onnx.numpy_helper.to_array(each).copy()
                values[-1, 0] += 0.01  # seen by the longest text only
                each.CopyFrom(onnx.numpy_helper.from_array(values, each.name))
                break
        else:
            raise AssertionError("no such weights")
        onnx.save(graph, path)

    monkeypatch.setattr(write, "write_fp32", wrong)
    with pytest.raises(UserError, match=rf"model.onnx differ.*single \({CONFIG.max_length} to"):
        _again(converted, tmp_path / "out")
    assert not any(tmp_path.iterdir())


def _copy_of(done: OnnxResult) -> Any:
    def copy(contents: object, description: object, path: Path, allowed: object) -> None:
        path.write_bytes((done.target / "onnx" / "model.onnx").read_bytes())

    return copy


def _again(done: OnnxResult, target: Path, **options: Any) -> OnnxResult:
    made = OnnxOptions(heads=HEADS, **options)
    return convert_to_onnx(done.source, target, made, of_run=of_run)


@pytest.mark.parametrize(
    ("config", "family"),
    [
        (CONFIG, "bert"),
        (replace(CONFIG, position_offset=1), "roberta"),
        (replace(CONFIG, kind="modernbert", token_types=1), "modernbert"),
    ],
)
def test_config_json_is_that_of_transformers(
    config: EncoderConfig, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task embedding is in the graph, whatever the encoder."""
    backbone = build_encoder(config)
    model = Model(backbone, {"words": MaskedLMHead(backbone)}, {"words": "words"})
    info = WeightsInfo(backbone=config, head_of={"words": "words"})
    save_weights(model, tmp_path / "source", info)
    monkeypatch.setattr(to_onnx, "_write_files", lambda *_: [])
    convert_to_onnx(tmp_path / "source", tmp_path / "out")
    about = json.loads((tmp_path / "out/config.json").read_text())
    assert (about["model_type"], about["vocab_size"]) == (family, config.vocab_size)


def test_large_weights_lie_next_to_the_graph(converted, tmp_path, monkeypatch) -> None:
    """A file above 2 GB cannot be written here: the limit is lowered."""
    monkeypatch.setattr(write, "MOST_BYTES", 5_000)
    path = tmp_path / "model.onnx"
    write.save_graph(onnx.load(converted.target / "onnx" / "model.onnx"), path)
    about = converted.description
    write.write_fp16(path, tmp_path / "model_fp16.onnx", about)
    write.write_int8(path, tmp_path / "model_int8.onnx", write.INT8_FORMS[0])
    ids = np.arange(1, 9).reshape(1, 8)
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    for precision, name in (
        ("fp32", "model.onnx"),
        ("fp16", "model_fp16.onnx"),
        ("int8", "model_int8.onnx"),
    ):
        assert precision == "int8" or (tmp_path / f"{name}.data").is_file()
        found = OnnxModel(tmp_path / name, about).run(given)["logits_kind"]
        assert np.abs(found - graph_of(converted, precision).run(given)["logits_kind"]).max() < 0.1


# ---- against transformers ----


def test_a_hugging_face_classifier_gives_what_transformers_gives(tmp_path: Path) -> None:
    """RoBERTa: positions from 2, one token type, sentence-transformers' files, opset 20."""
    names = dict(enumerate("xyz"))
    about: dict[str, Any] = {"num_labels": 3, "id2label": names, "type_vocab_size": 1}
    theirs = make("roberta", "ForSequenceClassification", **about)
    source = save(theirs, tmp_path / "source")
    (source / "1_Pooling").mkdir()
    kind = "sentence_transformers.models."
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{kind}Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{kind}Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{kind}Normalize"},
    ]
    (source / "modules.json").write_text(json.dumps(modules))
    pooling = {"word_embedding_dimension": 16, "pooling_mode_max_tokens": True}
    (source / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    done = convert_to_onnx(source, tmp_path / "out", OnnxOptions(opset=20))
    assert done.files[0].parity and "transformers" in done.files[0].parity.sides[0]
    assert done.description.inputs == ("input_ids", "attention_mask")
    assert done.description.heads["classifier"].labels == ("x", "y", "z")
    assert transformers.AutoConfig.from_pretrained(done.target).id2label == names
    ids = torch.tensor([[0, 5, 6, 7, 8, 9, 2], [0, 4, 2, 1, 1, 1, 1], [0, 2, 1, 1, 1, 1, 1]])
    mask = (ids != 1).long()
    with torch.no_grad():
        wanted = theirs(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    found = graph_of(done).run({"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
    last = wanted.hidden_states[-1]
    vectors = F.normalize(last.masked_fill(mask[..., None] == 0, -1e9).amax(1))
    real = mask.bool().numpy()
    np.testing.assert_allclose(found["logits"], wanted.logits, atol=1e-5)
    np.testing.assert_allclose(found["last_hidden_state"][real], last[real], atol=1e-5)
    np.testing.assert_allclose(found["sentence_embedding"], vectors, atol=1e-5)


def test_masked_lm_heads_are_exported_if_there_is_no_other(tmp_path: Path) -> None:
    config = replace(CONFIG, task_types=0)
    backbone = build_encoder(config)
    heads = {name: MaskedLMHead(backbone) for name in ("words", "spans")}
    model = noisy(Model(backbone, heads, {name: name for name in heads}))
    info = WeightsInfo(backbone=config, head_of={name: name for name in heads})
    save_weights(model, tmp_path / "source", info, tokenizer=WORDS)
    done = convert_to_onnx(tmp_path / "source", tmp_path / "out")
    assert done.files[0].parity and not done.report.lost
    ids = np.array([[1, 7, 9, 12, 2]])
    out = graph_of(done).run({"input_ids": ids, "attention_mask": np.ones_like(ids)})
    text = PackedText(input_ids=ids[0], token_type_ids=np.zeros(5, np.int64))
    last = backbone(Batch.from_rows([[text]], length=5, pad=config.pad))[0]
    for name, head in heads.items():
        wanted = head.logits(last).detach()
        np.testing.assert_allclose(out[f"logits_{name}"][0], wanted, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_real_weights(tmp_path: Path) -> None:
    done = convert_to_onnx(minilm(), tmp_path / "out", OnnxOptions(precisions=("fp16", "int8")))
    fp32, fp16, int8 = (each.bytes for each in done.files)
    assert fp16 < 0.51 * fp32 and int8 < 0.26 * fp32
    embedder = TrainedModel.open(minilm()).embedder()
    texts = ["A man is eating food.", "Two dogs run; 2023."]
    ids = [each.input_ids for each in embedder.encode(texts)]
    shape = (len(ids), max(map(len, ids)))
    given = {name: np.zeros(shape, np.int64) for name in ("input_ids", "attention_mask")}
    for row, each in enumerate(ids):
        given["input_ids"][row, : len(each)], given["attention_mask"][row, : len(each)] = each, 1
    vectors = embedder.embed(texts)
    for precision, least in (("fp32", 0.999999), ("fp16", 0.9999), ("int8", 0.97)):
        found = torch.from_numpy(graph_of(done, precision).run(given)["sentence_embedding"])
        close = F.cosine_similarity(found, torch.from_numpy(vectors))
        assert close.min() > least, (precision, close)


# ---- what is refused ----


def custom(folder: Path, name: str, **options: Any) -> Path:
    kind = f"tests.helpers.own_encoder.{name}"
    config = replace(CONFIG, task_types=0, kind=kind, options=options)
    model = noisy(Model(build_encoder(config), {}, {}))
    save_weights(model, folder / name, WeightsInfo(backbone=config), tokenizer=WORDS)
    return folder / name


def test_custom_encoders_are_tried(tmp_path: Path) -> None:
    """One that torch can trace is exported and compared; another ends in a line."""
    done = convert_to_onnx(custom(tmp_path, "PreNorm", scale=0.5), tmp_path / "out")
    assert done.description.custom and done.files[0].parity
    with pytest.raises(UserError, match=r"torch cannot export its encoder, tests.*Failing"):
        failing = custom(tmp_path, "Failing")
        convert_to_onnx(failing, tmp_path / "no", OnnxOptions(verify=False))
    assert not (tmp_path / "no").exists()


@pytest.mark.exhaustive
def test_a_custom_encoder_whose_graph_is_wrong_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the outputs of model.onnx differ"):
        convert_to_onnx(custom(tmp_path, "Mean"), tmp_path / "no")
    assert not (tmp_path / "no").exists()


REFUSED = {
    "an unknown head": (dict(heads=("kinds",)), r'head: no \'kinds\'; did you mean "kind"'),
    "an unknown precision": (
        dict(precisions=("int4",)),
        r'precision: no .int4.; did you mean "int8"',
    ),
    "an old opset": (dict(opset=11), "opset: 11; expected 18 to 23"),
    "an unknown task": (dict(task="kinds"), "task: no task 'kinds'"),
    "no texts": (dict(texts=()), "texts: empty"),
    "strict": (dict(heads=("kind",), strict=True), "strict: heads.* would be skipped"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_options_end_in_a_line(converted: OnnxResult, tmp_path: Path, case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        convert_to_onnx(converted.source, tmp_path / "out", OnnxOptions(**options))
    assert not any(tmp_path.iterdir())


def test_missing_packages_are_named(converted: OnnxResult, tmp_path: Path, monkeypatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnxscript" else real(name)
    )
    with pytest.raises(UserError, match=r"needs onnxscript: pip install 'palm_ds\[onnx\]'"):
        convert_to_onnx(converted.source, tmp_path / "out")


def test_a_damaged_file_ends_in_a_line(converted: OnnxResult, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(UserError, match=r"model.onnx: ONNX Runtime cannot load it"):
        OnnxModel(tmp_path / "model.onnx", converted.description)
    with pytest.raises(UserError, match=r"has no palm_ds_onnx.json"):
        read_description(tmp_path)


# ---- encoders that are not transformers ----


@pytest.mark.parametrize("kind", only([], KINDS))
def test_word_encoders_are_exported(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"cnn": {"windows": [2, 3], "pool": 2}}.get(kind, {})
    numbers = word_config(kind, vocab_size=32, max_positions=20, embedding_size=6, **options)
    backbone = build_encoder(numbers)
    heads = {"kind": ClassHead(16, 3, pooled=True), "words": MaskedLMHead(backbone)}
    model = noisy(Model(backbone, heads, {name: name for name in heads}))
    info = WeightsInfo(backbone=numbers, head_of={name: name for name in heads})
    save_weights(model, tmp_path / "source", info, tokenizer=WORDS)
    done = convert_to_onnx(tmp_path / "source", tmp_path / "out", OnnxOptions(heads=("kind",)))
    graph = graph_of(done)
    ids = np.array([[1, 7, 9, 12, 2, 0, 0], [0, 0, 0, 1, 8, 8, 2]])  # padded on either side
    out = graph.run({"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64)})
    for row, last in zip(ids, out["last_hidden_state"], strict=True):
        text = PackedText(input_ids=row[row > 0], token_type_ids=np.zeros(sum(row > 0), np.int64))
        alone = backbone(Batch.from_rows([[text]], length=sum(row > 0), pad=0))[0]
        np.testing.assert_allclose(last[row > 0], alone.detach(), atol=1e-5)
    with pytest.raises(UserError, match=f"huggingface has no {kind} encoder; convert to palm_ds"):
        convert(tmp_path / "source", tmp_path / "hf", "huggingface")


def test_an_encoder_of_very_short_texts_is_exported(tmp_path: Path) -> None:
    """Shorter ones than the texts that torch traces it with for others."""
    numbers = word_config("bag_of_words", vocab_size=32, max_positions=6)
    save_weights(
        noisy(Model(build_encoder(numbers), {}, {})),
        tmp_path / "source",
        WeightsInfo(backbone=numbers, head_of={}),
        tokenizer=WORDS,
    )
    done = convert_to_onnx(tmp_path / "source", tmp_path / "out")
    assert done.description.max_length == 6
