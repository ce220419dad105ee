"""From PaddlePALM's names to folders: names, mirrors, cache, hostile archives, the hub offline."""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import palm_ds
from palm_ds.common.errors import UserError
from palm_ds.weights.download import downloader
from palm_ds.weights.download.catalogue import DATA, ERNIE, MODELS, PRETRAIN
from palm_ds.weights.download.downloader import Places, download, ls, places_from_environment
from palm_ds.weights.download.http import Patience
from tests.helpers import loopback
from tests.helpers.loopback import Server
from tests.launch.conftest import enter  # noqa: F401  the fixture

NAMES = """RoBERTa-zh-base RoBERTa-zh-large ERNIE-v2-en-base ERNIE-v2-en-large XLNet-cased-base
    XLNet-cased-large ERNIE-v1-zh-base ERNIE-v1-zh-base-max-len-512
    BERT-en-uncased-large-whole-word-masking BERT-en-cased-large-whole-word-masking
    BERT-en-uncased-base BERT-en-uncased-large BERT-en-cased-base BERT-en-cased-large
    BERT-multilingual-uncased-base BERT-multilingual-cased-base BERT-zh-base""".split()  # noqa: SIM905
FILES = {"ernie_config.json": b"{}", "params/word_embedding": b"1234", "vocab.txt": b"[PAD]\n"}
NAME, ARCHIVE = "ERNIE-v2-en-base", "ERNIE_Base_en_stable-2.0.0.tar.gz"


def archive(files: dict[str, bytes] = FILES, top: str = "ERNIE/") -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as made:
        for name, content in files.items():
            member = tarfile.TarInfo(top + name)
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    return data.getvalue()


def contents(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's real cache is touched."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with loopback.serve() as server:
        server.files["/m/" + ARCHIVE] = archive()
        yield server


@pytest.fixture
def places(server: Server, tmp_path: Path) -> Places:
    patience = Patience(tries=2, wait=0.01, timeout=30)
    return Places(mirror=server.url + "/m/", cache=tmp_path / "cache", patience=patience)


# ---- names ----


def test_the_seventeen_names_and_their_addresses() -> None:
    assert list(PRETRAIN) == NAMES
    assert len({found.url for found in PRETRAIN.values()}) == 17
    for found in PRETRAIN.values():
        assert found.url.startswith("https://") and found.file.endswith((".tar.gz", ".tgz"))


def test_ls_prints_the_same_as_paddlepalm(capsys: pytest.CaptureFixture[str]) -> None:
    ls("pretrain")
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["Available pretrain items:", *(f"  => {name}" for name in NAMES)]
    ls()
    assert "Available reader items:" in capsys.readouterr().out
    ls("Pretrain", "bert-ZH-base")
    assert capsys.readouterr().out == "Available pretrain items:\n  => BERT-zh-base\n"
    with pytest.raises(UserError, match='no group "pretrian"; did you mean "pretrain"'):
        ls("pretrian")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        *((name.lower(), name) for name in NAMES),
        ("roberta-cn-base", "RoBERTa-zh-base"),
        ("RoBERTa-CN-large", "RoBERTa-zh-large"),
        ("bert-cn-base", "BERT-zh-base"),
        ("ernie-en-uncased-base", "ERNIE-v2-en-base"),
        ("ernie-en-uncased-large", "ERNIE-v2-en-large"),
        ("ernie-v1-cn-base-max-len-512", "ERNIE-v1-zh-base-max-len-512"),
        ("BERT_EN_UNCASED_BASE", "BERT-en-uncased-base"),
    ],
)
def test_names_in_any_case_and_former_names(given: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "pretrain" / name).mkdir(parents=True)
    (tmp_path / "pretrain" / name / "vocab.txt").write_text("there already")
    nowhere = Places(mirror=str(tmp_path / "none"))
    for arguments in ((given,), ("pretrain", given), ("Pretrain", given)):
        found = download(*arguments, path=tmp_path, places=nowhere)
        assert found == tmp_path / "pretrain" / name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ERNIE-v2-en-bse",), 'no model "ERNIE-v2-en-bse"; did you mean "ERNIE-v2-en-base"'),
        (("pretrain", "BERT-zh-bas"), 'did you mean "BERT-zh-base"'),
        (("ERNIE", "ERNIE-v2-en-base"), "in this group; give the name without a group"),
        (("nothing like it",), "known: "),
        (("vocab",), "vocab: this PaddlePALM group is empty"),
        (("reader", "cls"), "group is empty"),
        (("../evil",), 'no model "../evil"'),
        (("org/../evil",), 'no model "org/../evil"'),
        (("",), 'no model ""'),
    ],
)
def test_unknown_names(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        download(*arguments, path=tmp_path, places=Places(mirror=str(tmp_path)))
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_everything_that_ls_shows_is_found_in_its_group(tmp_path: Path) -> None:
    nowhere = Places(mirror=str(tmp_path / "none"))
    for group, names in (("pretrain", [*PRETRAIN, *ERNIE]), ("ERNIE", ERNIE)):
        for name in names:
            folder = tmp_path / "pretrain" / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "vocab.txt").write_text("there already")
            assert download(group, name, path=tmp_path, places=nowhere) == folder
    assert download("ernie", path=tmp_path, places=nowhere) == tmp_path / "pretrain"


def test_it_is_a_module_as_in_paddlepalm() -> None:
    module = importlib.import_module("palm_ds.downloader")
    assert palm_ds.downloader is module and (module.ls, module.download) == (ls, download)


@pytest.mark.parametrize(
    "name", ["bert-base-uncased", "roberta-large", "bert-large-uncased-whole-word-masking"]
)
def test_the_hubs_oldest_models_are_from_the_hub(name: str, tmp_path: Path) -> None:
    """Not another publisher's weights of a similar name, which a suggestion would offer."""
    with pytest.raises(UserError, match=f"^{name}: HF_HUB_OFFLINE is set") as caught:
        download(name, path=tmp_path)
    assert "BERT-en" not in str(caught.value)


# ---- archives ----


def test_from_a_mirror_to_a_folder(server: Server, places: Places, tmp_path: Path) -> None:
    folder = download("pretrain", NAME, str(tmp_path / "models"), places=places)
    assert folder == tmp_path / "models" / "pretrain" / NAME and contents(folder) == FILES
    assert os.listdir(folder.parent) == [NAME]
    assert download(NAME, path=tmp_path / "models", places=places) == folder  # is there
    assert contents(download(NAME, path=tmp_path / "other", places=places)) == FILES  # the cache
    assert server.asked == [("/m/" + ARCHIVE, "")]


def test_again_replaces_the_folder(places: Places, tmp_path: Path) -> None:
    folder = download(NAME, path=tmp_path, places=places)
    (folder / "vocab.txt").write_text("changed")
    (folder / "stray").write_text("mine")
    assert contents(download(NAME, path=tmp_path, places=places, again=True)) == FILES
    assert os.listdir(folder.parent) == [NAME]


def test_without_a_mirror_the_published_address_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetch(url: str, file: Path, **_options: object) -> Path:
        asked.append(url)
        file.parent.mkdir(parents=True)
        file.write_bytes(archive())
        return file

    monkeypatch.setattr(downloader, "fetch", fetch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("PALM_MIRROR", raising=False)
    assert contents(download(NAME, path=tmp_path)) == FILES
    assert asked == [PRETRAIN[NAME].url]
    assert [path.name for path in (tmp_path / "xdg/palm_ds").rglob("*.gz")] == [ARCHIVE]


def test_a_folder_as_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    (mirror / ARCHIVE).write_bytes(archive(top=""))
    monkeypatch.setenv("PALM_MIRROR", str(mirror))
    assert places_from_environment().mirror == str(mirror)
    assert contents(download(NAME, path=tmp_path / "models")) == FILES
    with pytest.raises(UserError, match=r"BERT-zh-base: no chinese_L-12.*gz in the mirror"):
        download("BERT-zh-base", path=tmp_path / "models")
    assert os.listdir(tmp_path / "models/pretrain") == [NAME]


def test_all_of_a_group_that_can_be_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    for found in PRETRAIN.values():
        (mirror / found.file).write_bytes(archive())
    places = Places(mirror=str(mirror))
    assert download("pretrain", path=tmp_path / "one", places=places) == tmp_path / "one/pretrain"
    download("all", path=tmp_path / "two", places=places)
    for path in ("one", "two"):
        opened = [name for name in NAMES if not name.startswith("XLNet")]
        assert sorted(os.listdir(tmp_path / path / "pretrain")) == sorted(opened)
    assert capsys.readouterr().err.count("XLNet-cased-base: not downloaded, since it") == 2


def test_names_of_ernies_repositories(tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    (mirror / "model-ernie-gen-base-en.1.tar.gz").write_bytes(archive())
    places = Places(mirror=str(mirror))
    for name in ("ernie-gen-base-en", "ERNIE-GEN-base"):
        folder = download(name, path=tmp_path, places=places)
        assert folder == tmp_path / "pretrain/ernie-gen-base-en" and contents(folder) == FILES


def test_an_archive_without_a_configuration_gets_the_known_one(tmp_path: Path) -> None:
    """ERNIE keeps UNIMO's apart from it."""
    file, tensors = tmp_path / "unimo_mnli_large_en.tar.gz", {"word_embedding": b"1234"}
    file.write_bytes(archive(tensors, top="unimo_mnli_large_en/"))
    places = Places(mirror=str(tmp_path))
    folder = download("unimo-mnli-large-en", path=tmp_path, places=places)
    about = json.loads((folder / "config.json").read_text())
    assert (about["model_type"], about["num_hidden_layers"]) == ("unimo", 24)
    assert (about["vocab_size"], about["max_position_embeddings"]) == (50_265, 514)
    file.write_bytes(archive({**tensors, "unimo.json": b"{}"}))
    folder = download("unimo-mnli-large-en", path=tmp_path, places=places, again=True)
    assert contents(folder) == {**tensors, "unimo.json": b"{}"}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("XLNet-cased-base", "two-stream attention"),
        ("ernie-3.0-tiny-mini-v2-en", "the size of RoBERTa's"),
    ],
)
def test_what_cannot_be_opened_is_not_downloaded(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be opened yet: .*\(https://") as caught:
        download(name, path=tmp_path, places=Places(mirror="http://127.0.0.1:9"))
    assert why in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.gz"))


def test_paddlenlps_names_come_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def from_hub(name: str, folder: Path, revision: str | None) -> None:
        asked.append(name)
        folder.mkdir(parents=True)

    monkeypatch.setattr(downloader, "_from_hub", from_hub)
    places = Places(cache=tmp_path / "cache")
    assert download("ernie-3.0-mini-zh", path=tmp_path, places=places).name == "ernie-3.0-mini-zh"
    assert asked == ["nghuyong/ernie-3.0-mini-zh"]


def test_every_model_is_listed_with_a_way_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    ls("ernie")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Available ERNIE items:" and len(lines) == 1 + len(ERNIE)
    assert "  => ernie-gen-base-en" in lines
    for name, model in ERNIE.items():
        assert name == name.lower()
        assert any(
            line.startswith(f"  => {name} (cannot be opened yet: {model.not_yet}")
            if model.not_yet
            else line == f"  => {name}"
            for line in lines
        )


def evil(name: str) -> bytes:
    return archive({name: b"x"}, top="")


HOSTILE = {
    "leads out": (lambda: evil("../../evil"), "'../../evil' is refused"),
    "a page that says no": (lambda: b"<html>please log in</html>", "cannot be read"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_archive_leaves_nothing_and_is_not_kept(
    case: str, server: Server, places: Places, tmp_path: Path
) -> None:
    make, words = HOSTILE[case]
    server.files["/m/" + ARCHIVE] = make()
    with pytest.raises(UserError, match=words) as caught:
        download(NAME, path=tmp_path / "models", places=places)
    assert "\n" not in str(caught.value) and f"from {server.url}/m/{ARCHIVE}" in str(caught.value)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert files == []
    assert os.listdir(tmp_path / "models/pretrain") == []
    server.files["/m/" + ARCHIVE] = archive()  # put right there: put right here
    assert contents(download(NAME, path=tmp_path / "models", places=places)) == FILES


def test_a_hostile_archive_does_not_touch_an_existing_folder(
    server: Server, places: Places, tmp_path: Path
) -> None:
    folder = download(NAME, path=tmp_path, places=places)
    server.files["/m/" + ARCHIVE] = evil("../evil")
    for file in (tmp_path / "cache").rglob("*.gz"):
        file.unlink()
    with pytest.raises(UserError):
        download(NAME, path=tmp_path, places=places, again=True)
    assert contents(folder) == FILES and os.listdir(folder.parent) == [NAME]


def test_only_one_of_two_concurrent_downloads_makes_the_folder(
    server: Server, places: Places, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.does(loopback.held_back)
    got: list[Path] = []
    both = [
        threading.Thread(
            target=lambda: got.append(download(NAME, path=tmp_path, places=places, again=False))
        )
        for _ in range(2)
    ]
    for thread in both:
        thread.start()
    until = time.monotonic() + 60
    while not caplog.messages and time.monotonic() < until:
        time.sleep(0.01)
    server.gate.set()
    for thread in both:
        thread.join()
    waiting = f"{tmp_path / 'pretrain' / NAME}: another process is working on it; waiting"
    assert caplog.messages == [waiting]
    assert contents(got[0]) == FILES and got[0] == got[1] and len(server.asked) == 1


def test_a_mirror_without_the_archive(places: Places, tmp_path: Path) -> None:
    words = "answered 404 Not Found; PALM_MIRROR may name another URL or folder with chinese_L"
    with pytest.raises(UserError, match=words):
        download("BERT-zh-base", path=tmp_path, places=places)


@pytest.mark.parametrize("mirror", ["file:///etc", "ftp://127.0.0.1/m"])
def test_a_mirror_with_an_unsupported_scheme(mirror: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not an http or https URL"):
        download(NAME, path=tmp_path, places=Places(mirror=mirror, cache=tmp_path))


def test_a_path_that_cannot_be_written(places: Places, tmp_path: Path) -> None:
    (tmp_path / "pretrain").write_text("a file")
    with pytest.raises(UserError, match="cannot be written"):
        download(NAME, path=tmp_path, places=places)


# ---- the hub ----


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache as huggingface_hub lays it out, with org/name in it."""
    from huggingface_hub import constants

    cache, commit = tmp_path / "hub", "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = cache / "models--org--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    blobs = cache / "models--org--name" / "blobs"
    blobs.mkdir()
    for name in ("config.json", "vocab.txt", "pytorch_model.bin", "training_args.bin"):
        (blobs / name).write_text(name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    refs = cache / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    return snapshot


def test_offline_the_hubs_cache_is_used(hub_cache: Path, tmp_path: Path) -> None:
    folder = download("org/name", path=tmp_path / "models")
    assert folder == tmp_path / "models/pretrain/org/name"
    assert sorted(os.listdir(folder)) == ["config.json", "pytorch_model.bin", "vocab.txt"]
    assert not any(path.is_symlink() for path in folder.iterdir())
    (hub_cache / "model.safetensors").write_text("weights")
    download("org/name", path=tmp_path / "models", again=True)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", "vocab.txt"]


def test_the_modules_of_sentence_transformers_come_along(hub_cache: Path, tmp_path: Path) -> None:
    """Without its pooling a model has other embeddings."""
    for name in ("modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"):
        (hub_cache / name).parent.mkdir(exist_ok=True)
        (hub_cache / name).write_text(name)
    for name in ("onnx/config.json", "checkpoint_1/config.json", "1_Pooling/other.py"):
        (hub_cache / name).parent.mkdir(exist_ok=True)
        (hub_cache / name).write_text(name)
    folder = download("org/name", path=tmp_path / "models")
    found = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    assert sorted(found) == [
        *("1_Pooling/config.json", "2_Dense/model.safetensors", "config.json", "modules.json"),
        *("pytorch_model.bin", "vocab.txt"),
    ]


def test_offline_and_not_in_the_hubs_cache(hub_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="org/other: HF_HUB_OFFLINE is set, and the local cache"):
        download("org/other", path=tmp_path / "models")
    with pytest.raises(UserError, match="org/name: HF_HUB_OFFLINE is set"):
        download("org/name", path=tmp_path / "models", revision="v2")
    for name in ("pytorch_model.bin", "training_args.bin"):
        (hub_cache / name).unlink()
    with pytest.raises(UserError, match="has no model.*safetensors and no pytorch_model"):
        download("org/name", path=tmp_path / "models")
    assert not (tmp_path / "models").exists()


def over_the_network(server: Server, tmp_path: Path, *arguments: str) -> tuple[int, str, str]:
    """The command in a separate process: huggingface_hub reads its settings when imported."""
    command = [sys.executable, "launch/download.py", *arguments, "--path", str(tmp_path / "models")]
    settings = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_from_a_hub_on_loopback(server: Server, tmp_path: Path) -> None:
    commit, files = "0123456789abcdef0123456789abcdef01234567", {}
    for name in ("config.json", "vocab.txt", "pytorch_model.bin", "run.py", "onnx/config.json"):
        files[name] = (name * 50).encode()
        server.files[f"/org/name/resolve/{commit}/{name}"] = files[name]
    about = {"id": "org/name", "sha": commit, "siblings": [{"rfilename": name} for name in files]}
    tree = [
        {"type": "file", "path": name, "size": len(data), "oid": f"{len(data):040}"}
        for name, data in files.items()
    ]
    server.files["/api/models/org/name/revision/main"] = json.dumps(about).encode()
    server.files[f"/api/models/org/name/tree/{commit}"] = json.dumps(tree).encode()
    code, out, err = over_the_network(server, tmp_path, "org/name")
    folder = tmp_path / "models/pretrain/org/name"
    assert (code, out, err) == (0, f"{folder}\n", "")
    wanted = ("config.json", "vocab.txt", "pytorch_model.bin")
    assert contents(folder) == {name: files[name] for name in wanted}
    code, out, err = over_the_network(server, tmp_path, "org/other")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("error: org/other: the hub has no such repository, or it is private")


def test_a_hub_with_errors(server: Server, tmp_path: Path) -> None:
    server.does(*[loopback.status(500)] * 9)
    code, out, err = over_the_network(server, tmp_path, "org/name")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("error: org/name: the hub cannot answer (") and "500" in err


def test_an_unreachable_hub(server: Server, tmp_path: Path) -> None:
    server.server_close()
    code, out, err = over_the_network(server, tmp_path, "org/name")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("error: org/name: the hub cannot be reached, and the local cache")


def test_only_the_hub_has_revisions(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="only for .org/name. on the hub, not for BERT-zh-base"):
        download("BERT-zh-base", path=tmp_path, revision="v2")


# ---- the command ----


def test_the_command(enter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    (mirror / ARCHIVE).write_bytes(archive())
    monkeypatch.setenv("PALM_MIRROR", str(mirror))
    said = enter("download", "ls")
    assert said.code == 0 and said.out.count("  => ") == len(MODELS) + len(DATA)
    said = enter("download", NAME.lower(), "--path", tmp_path)
    assert (said.code, said.out, said.err) == (0, f"{tmp_path / 'pretrain' / NAME}\n", "")
    said = enter("download", NAME, "--path", tmp_path / "two", "--mirror", tmp_path)
    assert said.code == 2 and said.err.startswith("error: ") and said.err.count("\n") == 1
    said = enter("download", "ernie-2")
    assert said.code == 2 and "did you mean" in said.err or "known: " in said.err


# ---- data sets ----

SETS = {"chnsenticorp/train.tsv": b"label\ttext_a\n", "cmrc2018/dev.json": b"{}"}


def test_data_sets_go_to_the_folders_that_recipes_read(
    server: Server, places: Places, tmp_path: Path, capsys, root: Path
) -> None:
    server.files["/m/task_data_zh.tgz"] = archive(SETS, "task_data/")
    (tmp_path / "data/cmrc2018").mkdir(parents=True)
    (tmp_path / "data/cmrc2018/mine.json").write_text("mine")
    folder = download("task_data_zh", path=tmp_path, places=places)
    assert folder == download("data", "task_data_zh", tmp_path, places=places) == tmp_path / "data"
    kept = {"cmrc2018/mine.json": b"mine", ".task_data_zh": b""}
    assert contents(folder) == {"chnsenticorp/train.tsv": b"label\ttext_a\n", **kept}
    assert capsys.readouterr().err == f"{folder}/cmrc2018: already exists and is kept\n"
    download("data", path=tmp_path, places=places, again=True)
    assert contents(folder) == {**SETS, ".task_data_zh": b""}
    recipe = (root / "launch/recipes/finetune/chnsenticorp.yaml").read_text()
    assert "table: data/chnsenticorp/train.tsv" in recipe


def test_hostile_data_leaves_nothing(server: Server, places: Places, tmp_path: Path) -> None:
    server.files["/m/task_data_zh.tgz"] = archive({"../../evil": b"x"}, "task_data/")
    with pytest.raises(UserError, match="task_data_zh.tgz; the file is deleted"):
        download("task_data_zh", path=tmp_path, places=places)
    assert contents(tmp_path / "data") == {} and not (tmp_path / "evil").exists()
    with pytest.raises(UserError, match='no data sets "task_data"; did you mean "task_data_zh"'):
        download("data", "task_data", tmp_path, places=places)
