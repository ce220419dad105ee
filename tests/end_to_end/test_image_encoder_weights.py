"""Encoders of texts and images: the outputs that ERNIE's own programs gave, and their files after a
way through ours."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from palm_ds.cli.main import main
from palm_ds.model.encoder.encoder import Encoder, build_encoder
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.inputs.regions import PackedRegions
from palm_ds.model.multi_task_model import Model
from palm_ds.tasks.multi_label import MultiLabel
from palm_ds.tasks.multiple_choice import MultipleChoice
from palm_ds.tasks.ranking import Ranking
from palm_ds.tasks.referring_expressions import ReferringExpressions
from palm_ds.weights.convert.convert import ConversionOptions, convert
from palm_ds.weights.formats.open import open_checkpoint
from palm_ds.weights.formats.paddle.variable_files import write_variable
from palm_ds.weights.formats.runnable import load_encoder
from palm_ds.weights.weights_folder import load_weights
from tests.helpers.text_tables import make_task

STRICT = ConversionOptions(strict=True, verify=False)
Arrays = Mapping[str, np.ndarray]


class Case(NamedTuple):
    """An image beside a text, and what is expected of it."""

    text: PackedText
    tokens: np.ndarray  # (tokens, hidden)
    regions: np.ndarray  # (regions, hidden)


def arrays_of(name: str, shared: Path) -> Arrays:
    """Without the last axis that static graphs give ids."""
    arrays = dict(np.load(shared / "oracle" / name / "io.npz"))
    return {x: y.squeeze(-1) if y.shape[-1] == 1 else y for x, y in arrays.items()}


def computed(encoder: Encoder, cases: list[Case]) -> tuple[torch.Tensor, torch.Tensor]:
    """(vectors, where each text begins) of all texts in one row."""
    lengths = [len(case.text.input_ids) for case in cases]
    row = Batch.from_rows([[case.text for case in cases]], length=sum(lengths) + 3, pad=0)
    with torch.no_grad():
        return encoder(row)[0], torch.tensor(np.cumsum([0, *lengths[:-1]]))


def check(encoder: Encoder, cases: list[Case], arrays: Arrays, kind: str, match: str) -> None:
    """The vectors, what the poolers make of the first token and region, and their product."""
    vectors, starts = computed(encoder, cases)
    firsts = starts + torch.tensor([len(case.tokens) for case in cases])
    for case, start, first in zip(cases, starts, firsts, strict=True):
        assert same(encoder.of_texts(vectors[start:first]), case.tokens)
        assert same(encoder.of_regions(vectors[first : first + len(case.regions)]), case.regions)
    with torch.no_grad():
        texts = encoder.pooler(encoder.of_texts(vectors[starts]))
        images = encoder.image_pooler(encoder.of_regions(vectors[firsts]))
        assert same(texts, arrays[f"out_{kind}pooled_text"])
        assert same(images, arrays[f"out_{kind}pooled_image"])
        if match:
            assert same(encoder.match(vectors[torch.cat([firsts, starts])]), arrays[match])


def same(found: torch.Tensor, expected: np.ndarray) -> bool:
    return found.shape == expected.shape and np.abs(found.numpy() - expected).max() < 2e-5


def unimo_case(arrays: Arrays, row: int, kind: str) -> Case:
    """UNIMO's order is regions, tags, text; ours text, tags, regions."""
    regions = arrays["in_image_embedding"].shape[1]
    tags = arrays["in_obj_ids"].shape[1] if kind == "vol" else 0
    real = arrays[f"in_mask_{kind}"][row].max(0) > 0
    seen, tagged, text = np.split(real, [regions, regions + tags])
    ids = [arrays["in_src_ids"][row][text], arrays["in_obj_ids"][row][:tags][tagged]]
    counts = [*map(len, ids), int(seen.sum())]
    features, locations = arrays["in_image_embedding"][row], arrays["in_image_loc"][row]
    out = np.split(arrays[f"out_{kind}_output"][row], [regions, regions + tags])
    return Case(
        PackedText(
            input_ids=np.concatenate([*ids, np.zeros(counts[2], np.int64)]),
            token_type_ids=np.zeros(sum(counts), np.int64),
            position_ids=np.concatenate(
                [np.arange(counts[0]), np.arange(counts[1]), np.zeros(counts[2], np.int64)]
            ),
            regions=PackedRegions(
                features=features[seen],
                locations=locations[seen],
                places=sum(counts[:2]) + np.arange(counts[2]),
            ),
        ),
        tokens=np.concatenate([out[2][text], out[1][tagged]]),
        regions=out[0][seen],
    )


@pytest.mark.parametrize("kind", ["vl", "vol"])
def test_unimo_computes_as_ernies_program_on_images(kind: str, shared: Path) -> None:
    """Regions and a text, or also object tags."""
    arrays = arrays_of("unimo", shared)
    encoder = load_encoder(open_checkpoint(shared / "oracle/unimo"))
    cases = [unimo_case(arrays, row, kind) for row in range(2)]
    check(encoder, cases, arrays, f"{kind}_", "out_vl_match_mul" if kind == "vl" else "")


def vil_case(arrays: Arrays, row: int) -> Case:
    text, seen = arrays["in_input_mask"][row] > 0, arrays["in_image_mask"][row] > 0
    regions = np.zeros(int(seen.sum()), np.int64)
    features, locations = arrays["in_image_embeddings"][row], arrays["in_image_loc"][row]
    return Case(
        PackedText(
            input_ids=np.append(arrays["in_src_ids"][row][text], regions),
            token_type_ids=np.append(arrays["in_sent_ids"][row][text], regions),
            position_ids=np.append(np.arange(text.sum()), regions),
            regions=PackedRegions(
                features=features[seen],
                locations=locations[seen],
                places=text.sum() + np.arange(len(regions)),
            ),
        ),
        tokens=arrays["out_text_output"][row][text],
        regions=arrays["out_image_output"][row][seen],
    )


def test_ernie_vil_computes_as_ernies_program(shared: Path) -> None:
    arrays = arrays_of("ernie_vil", shared)
    encoder = load_encoder(open_checkpoint(shared / "oracle/ernie_vil"))
    cases = [vil_case(arrays, row) for row in range(2)]
    check(encoder, cases, arrays, "", "out_match_mul")


@pytest.mark.parametrize("name", ["unimo", "ernie_vil"])
def test_there_and_back_the_files_are_the_same(
    name: str, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shared / "oracle" / name
    convert(source, tmp_path / "ours", "palm_ds", STRICT)
    convert(tmp_path / "ours", tmp_path / "theirs", "paddle", STRICT)
    before, after = source / "params", tmp_path / "theirs/params"
    found = filecmp.dircmp(before, after)
    assert not found.left_only and not found.right_only
    assert filecmp.cmpfiles(before, after, found.common, shallow=False)[1:] == ([], [])
    assert open_checkpoint(tmp_path / "theirs").config == open_checkpoint(source).config
    for folder in (source, tmp_path / "ours"):
        assert main(["show", str(folder)]) == 0
        text = capsys.readouterr().out
        assert "'region_size': 20" in text and f"kind {name}" in text


# Heads of fine-tuning --------------------------------------------------------------------------

CO, REGION = 32, 16  # widths of what poolers return, and of regions
_HEADS = {
    "vqa_fc_w_0": (CO, 12),
    "vqa_fc_b_0": (12,),
    "vqa_fc_w_1": (12, 7),
    "vqa_fc_b_1": (7,),
    "match_fc.w_0": (CO, 1),
    "match_fc.b_0": (1,),
    "vcr_fc.w_0": (CO, 1),
    "vcr_fc.b_0": (1,),
    "cls_seq_label_vl_out_w": (REGION, 1),
    "cls_seq_label_vl_out_b": (1,),
}


@pytest.fixture
def fine_tuned(shared: Path, tmp_path: Path) -> tuple[Path, Arrays]:
    """ERNIE-ViL with the heads that its fine-tuning adds, and these heads."""
    folder = tmp_path / "theirs"
    shutil.copytree(shared / "oracle/ernie_vil", folder)
    rng = np.random.default_rng(5)
    heads = {name: rng.normal(size=shape).astype(np.float32) for name, shape in _HEADS.items()}
    for name, values in heads.items():
        write_variable(folder / "params" / name, torch.from_numpy(values))
    return folder, heads


def test_heads_of_ernies_fine_tuning_are_read(
    fine_tuned: tuple[Path, Arrays], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through our own format, by heads of tasks of these names; their scores in numpy."""
    folder, heads = fine_tuned
    convert(folder, tmp_path / "ours", "palm_ds", STRICT)
    contents = open_checkpoint(tmp_path / "ours")
    config = contents.config
    common = {"images": True, "region_size": 20, "labels": list("abcdefg"), "hidden_layer": 12}
    tasks: list[Any] = [
        make_task(MultiLabel, "vqa", **common),
        make_task(Ranking, "match", images=True, region_size=20, loss="circle"),
        make_task(MultipleChoice, "vcr", images=True, region_size=20),
        make_task(ReferringExpressions, "referring_expressions", region_size=20),
    ]
    backbone = build_encoder(config)
    model = Model(
        backbone, {x.name: x.head(backbone) for x in tasks}, {x.name: x.name for x in tasks}
    )
    report = load_weights(contents, model)
    assert not report.newly_initialized and not report.unused, report
    rng = np.random.default_rng(6)
    pooled, regions = (rng.normal(size=(3, n)).astype(np.float32) for n in (CO, REGION))
    inside = np.maximum(pooled @ heads["vqa_fc_w_0"] + heads["vqa_fc_b_0"], 0)
    expected = {
        "vqa": inside @ heads["vqa_fc_w_1"] + heads["vqa_fc_b_1"],
        "match": pooled @ heads["match_fc.w_0"] + heads["match_fc.b_0"],
        "vcr": pooled @ heads["vcr_fc.w_0"] + heads["vcr_fc.b_0"],
        "referring_expressions": regions @ heads["cls_seq_label_vl_out_w"]
        + heads["cls_seq_label_vl_out_b"],
    }
    for name, scores in expected.items():
        head: Any = model.heads[name]
        given = torch.from_numpy(regions if name.startswith("referring") else pooled)
        groups = [torch.zeros(3, dtype=torch.int64)] * head.grouped
        with torch.no_grad():
            assert np.allclose(head.logits(head.hidden_rows(given), *groups), scores, atol=1e-4)
    assert main(["show", str(folder)]) == 0
    assert "vqa (7 classes of whole texts)" in capsys.readouterr().out
