"""Outputs in parts: which ones are kept, and that one command at a time writes them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from palm_ds.common.errors import UserError
from palm_ds.inference.parts import OutputParts, model_files


class Two:
    """Two processes; rank 0 says `said`."""

    world = 2

    def __init__(self, rank: int, said: str = "") -> None:
        self.rank, self.said = rank, said

    def gather(self, value: Any) -> list[Any]:
        return [value if self.rank == 0 else self.said, value]


def interrupted(output: Path, follows_from: object, *numbers: int) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        OutputParts.opened(output, ".txt", follows_from) as parts,
    ):
        for number in numbers:
            parts.write(number, lambda path, number=number: path.write_text(f"{number}\n"))
        raise KeyboardInterrupt


def test_finished_parts_stay_for_what_follows_from_the_same(tmp_path: Path) -> None:
    output = tmp_path / "deep/out.txt"
    interrupted(output, ["a", 1], 0, 1)
    with OutputParts.opened(output, ".txt", ["a", 1]) as parts:
        assert [parts.path(number).exists() for number in range(3)] == [True, True, False]
        parts.join(map(parts.path, (0, 1)), output)
    assert output.read_text() == "0\n1\n" and [*output.parent.iterdir()] == [output]
    interrupted(output, ["a", 1], 0)
    with OutputParts.opened(output, ".txt", ["a", 2]) as parts:
        assert not parts.path(0).exists()


def test_a_second_command_is_refused_on_all_processes(tmp_path: Path) -> None:
    output, message = tmp_path / "o", "o: another command is writing it$"
    with OutputParts.opened(output, ".txt", 1) as parts:
        parts.write(0, lambda path: path.write_text("kept"))
        for group in (Two(0), Two(1, f"{output}: another command is writing it")):
            with (
                pytest.raises(UserError, match=message),
                OutputParts.opened(output, ".txt", 2, group),
            ):
                pytest.fail("two commands write one output")
        assert parts.path(0).read_text() == "kept"
    with OutputParts.opened(output, ".txt", 2):
        pass


def test_a_mistake_before_the_first_part_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError), OutputParts.opened(tmp_path / "o", ".txt", 1):
        raise UserError("no")
    assert not [*tmp_path.iterdir()]
    with pytest.raises(UserError), OutputParts.opened(tmp_path / "o", ".txt", 1) as parts:
        parts.write(0, lambda path: path.write_text("kept"))
        raise UserError("no")
    with OutputParts.opened(tmp_path / "o", ".txt", 1) as parts:
        assert parts.path(0).exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_names_the_output(rank: int, tmp_path: Path) -> None:
    """What a write raises names no file."""
    with (
        pytest.raises(OSError, match="No space left on device") as raised,
        OutputParts.opened(tmp_path / "o", ".txt", 1, Two(rank)),
        open("/dev/full", "w") as full,
    ):
        full.write("x")
    assert raised.value.filename == str(tmp_path / "o")


def test_parts_that_are_removed_meanwhile(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"\.o\.parts: was removed while a command wrote there"),
        OutputParts.opened(tmp_path / "o", ".txt", 1) as parts,
    ):
        shutil.rmtree(parts.folder)
        parts.write(0, lambda path: path.write_text("lost"))


def test_an_output_that_cannot_be_made_is_refused_on_all_processes(tmp_path: Path) -> None:
    """The others would have waited for rank 0."""
    (tmp_path / "file").touch()
    output, said = tmp_path / "file/o", f"{tmp_path}/file/o: cannot be written: Not a directory"
    for rank in (0, 1):
        with (
            pytest.raises(UserError, match=said),
            OutputParts.opened(output, ".txt", 1, Two(rank, said)),
        ):
            pass


def test_only_rank_0_deletes_parts(tmp_path: Path) -> None:
    interrupted(tmp_path / "o", 1, 0)
    with OutputParts.opened(tmp_path / "o", ".txt", 2, Two(1)) as parts:
        assert parts.path(0).exists()
    assert parts.path(0).exists()


def test_hidden_files_are_none_of_a_model(tmp_path: Path) -> None:
    for name in ("a.bin", "deep/b.bin", ".hidden", ".out.parts/key.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [Path(path).name for path, _, _ in model_files(tmp_path)] == ["a.bin", "b.bin"]
    assert [size for _, size, _ in model_files(tmp_path / "a.bin")] == [1]
