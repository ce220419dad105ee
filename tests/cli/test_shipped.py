"""Recipes and DeepSpeed files by name, in a checkout and in a wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from palm_ds.cli import recipes, shipped
from palm_ds.common.errors import UserError
from palm_ds.common.messages import only_warnings, plain_messages


def test_all_files_of_the_checkout_are_found(root: Path) -> None:
    names = {
        str(p.relative_to(root / "launch/recipes")) for p in root.glob("launch/recipes/**/*.yaml")
    }
    assert set(shipped.recipes()) == names and "finetune/rte.yaml" in names
    assert set(shipped.ds_configs()) == {p.name for p in root.glob("ds_configs/*.json")}


def test_a_wheel_has_them_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "palm_ds/shipped/recipes/finetune/a.yaml"
    inside.parent.mkdir(parents=True)
    inside.write_text("# A recipe.\n")
    folders = {
        "recipes": (tmp_path / "palm_ds/shipped/recipes", tmp_path),
        "ds_configs": (tmp_path / "x",),
    }
    monkeypatch.setattr(shipped, "_FOLDERS", folders)
    assert shipped.recipes() == {"finetune/a.yaml": inside}
    assert shipped.ds_configs() == {}


@pytest.mark.parametrize(
    "name",
    ["finetune/rte.yaml", "finetune/rte", "rte.yaml", "rte", "launch/recipes/finetune/rte.yaml"],
)
def test_a_name_means_the_shipped_file(
    name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped.find_recipe(name) == str(root / "launch/recipes/finetune/rte.yaml")
    assert capsys.readouterr().err.startswith(f"note: {name}: the shipped recipe ")


@pytest.mark.parametrize(
    "launched",
    [
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
    ],
)
def test_one_process_of_a_launcher_names_the_shipped_file(
    launched: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    shipped.find_recipe("rte")
    assert capsys.readouterr().err == ""


def test_quiet_leaves_the_note_out(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    with plain_messages():
        only_warnings()
        shipped.find_ds_config("cpu.json")
    assert capsys.readouterr() == ("", "")


def test_a_file_that_exists_comes_first(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cpu.json").write_text("{}")
    assert shipped.find_ds_config("cpu.json") == "cpu.json"
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("embeded.yaml", 'embeded.yaml: no such file, .*; did you mean "embedded.yaml"'),
        ("data/own.yaml", "data/own.yaml: no such file, .*; `palm-ds recipes` lists them"),
    ],
)
def test_an_unknown_name(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        shipped.find_recipe(name)


def test_copies(tmp_path: Path, root: Path) -> None:
    assert shipped.copy("cpu", str(tmp_path)) == tmp_path / "cpu.json"
    assert shipped.copy("cpu", f"{tmp_path}/made/") == tmp_path / "made/cpu.json"
    copied = shipped.copy("finetune/rte.yaml", f"{tmp_path}/new/mine.yaml")
    assert copied.read_text() == (root / "launch/recipes/finetune/rte.yaml").read_text()
    with pytest.raises(UserError, match=r"cpu\.json: already exists"):
        shipped.copy("cpu", str(tmp_path))
    with pytest.raises(UserError, match='no shipped file has this name; did you mean "small.yaml"'):
        shipped.copy("smal.yaml", str(tmp_path))
    with pytest.raises(UserError, match="cannot be written"):
        shipped.copy("small", f"{tmp_path}/cpu.json/mine.yaml")


def test_every_shipped_file_describes_itself_in_a_line() -> None:
    for path in [*shipped.recipes().values(), *shipped.ds_configs().values()]:
        for short in (False, True):
            text = shipped.description(path, short=short)
            assert len(text) > 10 and "\n" not in text and "#" not in text, path
            assert text.count("(") == text.count(")") and not text.endswith(("al.", "...")), path


BODY = "of a body of eight layers of 256 for short rows"


@pytest.mark.parametrize(
    ("sentence", "text"),
    [
        (f"Mine {BODY}: 8 x 256", ""),
        (f"Mine {BODY} (Doe et al. 2021; values of f.py): 8", f"Mine {BODY} (Doe et al. 2021)"),
        (f"Mine {BODY}: of that: {'and ' * 9}", f"Mine {BODY}: of that"),
        (
            f"Mine {BODY} for short rows of long texts: 8 x 256",
            f"Mine {BODY} for short rows of long texts",
        ),
        (f"Mine {BODY} {BODY}", ""),
        (f"Mine: {BODY} {BODY}", ""),
    ],
)
def test_a_long_description_ends_where_it_explains(
    sentence: str, text: str, tmp_path: Path
) -> None:
    """`...` in the middle of a sentence stood for what nobody could read."""
    file, sentence = tmp_path / "mine.yaml", sentence.strip()
    file.write_text(f"# {sentence.replace(' body', chr(10) + '# body')}. Then.\n")
    assert shipped.description(file) == sentence
    assert shipped.description(file, short=True) == (text or sentence)


def test_the_list_is_whole_in_a_pipe_and_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    recipes.COMMAND.main([])
    piped = capsys.readouterr().out
    assert piped.splitlines()[1].endswith("six that build an example and label it as a whole")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    recipes.COMMAND.main([])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and "..." not in piped + "\n".join(lines)
    assert [line.split()[-1] for line in lines[1:3]] == ["documents,", "English"]
    assert lines[2].startswith(" " * 44 + "in")
