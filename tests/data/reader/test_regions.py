"""The layouts of image regions are the same regions, and mistakes in them are one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.data.reader import Table, TableSettings, open_table
from palm_ds.data.reader.regions import ImageRegions
from palm_ds.data.sources.table import TableSource
from palm_ds.tasks.shared.image_text import image_numbers
from tests.helpers.small_images import BOXES, FEATURES, encoded, image_rows
from tests.helpers.text_tables import opened, small_tokenizer

IMAGE = image_rows(1)[0]["pic"]
ARRAYS = {key: np.array(IMAGE[key], np.float32) for key in ("boxes", "features", "classes")}
SIZE = {"width": IMAGE["width"], "height": IMAGE["height"]}


def same(one: ImageRegions, other: ImageRegions) -> bool:
    assert one.classes is not None and other.classes is not None
    return (
        np.array_equal(one.features, other.features)
        and np.array_equal(one.locations, other.locations)
        and np.array_equal(one.classes, other.classes)
    )


def read(value: Any, **settings: Any) -> ImageRegions:
    table = opened_with([value], **settings)
    assert table.region_count(0) == BOXES
    return table.regions(0)


def opened_with(values: Sequence[Any], **settings: Any) -> Table:
    """A table with these images."""
    rows = [{"text_a": "x", "pic": value} for value in values]
    return Table.from_rows(rows, TableSettings(columns={"image": "pic"}, **settings))


def line(name: str, values: dict[str, np.ndarray] = ARRAYS, count: int = BOXES) -> str:
    cells = [name, SIZE["width"], SIZE["height"], count, *map(encoded, values.values())]
    return "\t".join(map(str, cells)) + "\n"


def test_the_layouts_are_the_same_regions(tmp_path: Path) -> None:
    expected = read(IMAGE)
    boxes = ARRAYS["boxes"] / np.array([100, 90, 100, 90], np.float32)
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    assert np.allclose(expected.locations, np.column_stack([boxes, area]), atol=1e-7)
    assert np.array_equal(expected.features, ARRAYS["features"])
    assert same(read({**SIZE, **{key: encoded(x) for key, x in ARRAYS.items()}}), expected)

    names = {"image_w": 100, "image_h": 90, "bbox": ARRAYS["boxes"], "x": ARRAYS["features"]}
    np.savez(tmp_path / "7.npz", **names, probs=ARRAYS["classes"], num_bbox=3)
    assert same(read(str(tmp_path / "7.npz")), expected)
    (tmp_path / "features.tsv").write_text(line("6") + "\n" + line("a 7"))
    files = {"images": [str(tmp_path / "feat*.tsv")]}
    assert same(read("a 7", **files), expected) and same(read(6, **files), expected)

    cells = {"w": 100, "h": 90, **{key: encoded(x) for key, x in ARRAYS.items()}}
    (tmp_path / "t.tsv").write_text(
        "\t".join(["text_a", *cells]) + "\n" + "\t".join(["x", *map(str, cells.values())]) + "\n"
    )
    table = open_table(str(tmp_path / "t.tsv"), TableSettings(columns={"image": list(cells)}))
    assert same(table.regions(0), expected)
    (tmp_path / "r.jsonl").write_text(json.dumps({"text_a": "x", "pic": "7.npz"}) + "\n")
    table = open_table(str(tmp_path / "r.jsonl"), TableSettings(columns={"image": "pic"}))
    assert same(table.regions(0), expected)  # beside the table
    datasets.Dataset.from_list([{"text_a": "x", "pic": IMAGE}]).save_to_disk(tmp_path / "d")
    table = open_table(str(tmp_path / "d"), TableSettings(columns={"image": "pic"}))
    assert same(table.regions(0), expected)


def test_a_column_of_that_name_is_no_image_unless_said_so() -> None:
    rows = [{"text_a": "x", "image": {"bytes": "..."}}]
    assert Table.from_rows(rows).columns == ("text_a",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 0}, "width: '0' is not a number of pixels"),
        ({"width": 10**400}, "is not a number of pixels"),
        ({"boxes": [[0, 0, 1, 10**400]]}, "boxes: neither lists of numbers nor base64"),
        ({"boxes": [[1, 2, 3]]}, "boxes: 3 numbers; each box has 4"),
        ({"boxes": [[5, 5, 1, 9]], "features": [[1]]}, "box 1 ends before it begins"),
        ({"features": [[1.0, 2.0]] * 2}, "features: 4 numbers, not a multiple of the 3 boxes"),
        ({"features": "???"}, "features: neither lists of numbers nor base64"),
        ({"features": np.full((3, 2), 1 + 2j)}, "features: neither lists of numbers"),
        ({"features": [[float("nan")]] * 3}, "features: has a NaN"),
        ({"classes": [[-1.0, 2.0]] * 3}, "classes: not a distribution"),
        ({"boxes": None}, "no boxes or bbox; it has"),
    ],
)
def test_mistakes_name_the_row(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=r"^rows\[0\]: ") as error:
        read({**IMAGE, **changes})
    assert message in str(error.value)


UNIMO = "7;1;0;0 12 2;0 0 0;2 3 4;-1;100;90;1;AAAA;AAAA;x;y\n"
"""As its reader of visual entailment takes them."""


def test_a_table_of_unimos_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(UNIMO * 2)
    with pytest.raises(UserError, match="has no column 'image'; it has a line of UNIMO's"):
        opened(tmp_path / "t.txt").need("image", "x")
    (tmp_path / "t.tsv").write_text(UNIMO * 2)
    with pytest.raises(UserError, match="no column `a`; it has a line of UNIMO's"):
        opened(tmp_path / "t.tsv", columns={"image": "a"})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("data.mdb", "data.mdb: its values are pickles, .* write lines of name, width, height"),
        ("x.lmdb", "x.lmdb: its values are pickles"),
        (".", "a folder; name its files, such as"),
        ("none.tsv", "none.tsv: no such file"),
    ],
)
def test_what_is_no_file_of_lines(name: str, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "x.lmdb"
    folder.mkdir()
    (folder / "data.mdb").write_bytes(b"x")
    path = folder / name if name == "data.mdb" else tmp_path / name
    with pytest.raises(UserError, match=message):
        read("a", images=[str(path)])


def test_mistakes_in_files_name_their_line(tmp_path: Path) -> None:
    file = tmp_path / "f.tsv"
    files = {"images": [str(file)]}
    for text, message in (
        ("a\tb\n", "f.tsv:1: 2 cells"),
        (UNIMO, "f.tsv:1: a line of UNIMO's, .* write a table of the texts"),
        (line("a") * 2, "f.tsv:2: another image is called 'a'"),
        (line("a").replace("\t3\t", "\tx\t"), "f.tsv:1: 'x' is not a number of boxes"),
        (line("ab"), "no 'a'"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=message):
            read("a", **files)
    for value, message in (
        (None, "image is empty"),
        ("7", "no '7': give the files with images as `im"),
    ):
        with pytest.raises(UserError, match=message):
            read(value)
    (tmp_path / "x.npz").write_bytes(b"no archive")
    with pytest.raises(UserError, match=r"x\.npz: not a \.npz file"):
        read(str(tmp_path / "x.npz"))


def test_a_line_with_more_boxes_than_it_says(tmp_path: Path) -> None:
    file = tmp_path / "f.tsv"
    file.write_text(line("a", count=2))
    table = opened_with(["a"], images=[str(file)])
    with pytest.raises(UserError, match="'a' in .*f.tsv: 2 is its number of boxes, but 3 follow"):
        table.regions(0)


def test_a_file_that_changes_after_its_names_were_read(tmp_path: Path) -> None:
    file = tmp_path / "f.tsv"
    file.write_text(line("a") + line("b"))
    table = opened_with(["b"], images=[str(file)])
    assert table.region_count(0) == BOXES
    file.write_text(line("a much longer name") + line("b"))
    with pytest.raises(UserError, match=r"f\.tsv has changed since its names were read"):
        table.regions(0)


def test_equal_names_in_different_folders_are_different_images(tmp_path: Path) -> None:
    tables = []
    for folder, features in (("one", 1.0), ("other", 2.0)):
        (tmp_path / folder).mkdir()
        values = {**ARRAYS, "features": np.full_like(ARRAYS["features"], features)}
        np.savez(tmp_path / folder / "7.npz", **SIZE, **values)
        tables.append(tmp_path / folder / "rows.jsonl")
        tables[-1].write_text((json.dumps({"text_a": "x", "pic": "7.npz"}) + "\n") * 2)
    table = open_table([str(each) for each in tables], TableSettings(columns={"image": "pic"}))
    assert [table.regions(i).features.mean() for i in range(4)] == [1, 1, 2, 2]
    source = TableSource(table, np.arange(4), small_tokenizer(), "tables")
    assert image_numbers(source).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damaged_archives(tmp_path: Path, save: Callable[..., None]) -> None:
    """Each is read, or refused in one line."""
    file, refused = tmp_path / "x.npz", 0
    save(file, **SIZE, **ARRAYS)
    whole, rng = file.read_bytes(), np.random.default_rng(0)
    for cut in [0, 20, *rng.integers(0, len(whole), 10)]:
        file.write_bytes(whole[:cut])
        with pytest.raises(UserError, match=r"x\.npz: (not a|cannot be read)"):
            read(str(file))
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[rng.integers(len(whole))] ^= rng.integers(1, 256)
        file.write_bytes(damaged)
        try:
            read(str(file))
        except UserError as error:
            refused += 1
            assert str(error).startswith("rows[0]: ")
    assert refused > 100
    assert read(IMAGE).features.shape[1] == FEATURES
