"""Pushing a folder to the hub, against a stand-in of its HTTP interface."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from palm_ds.cli.main import main
from palm_ds.common.errors import TemporaryError, UserError
from palm_ds.text.tokenizer import TOKENIZER_FILES
from palm_ds.weights import hub
from palm_ds.weights.formats.huggingface.model_card import HERE, Provenance
from palm_ds.weights.weights_folder import export_hf
from tests.helpers.hub_server import HubServer, hub_server
from tests.weights.convert.test_convert import CONFIG, WORDS, model

# of httpx2, about how huggingface_hub uploads a file
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")

NAME = "org/small-encoder"
FILES = {
    "1_Pooling/config.json",
    "README.md",
    "config.json",
    "config_sentence_transformers.json",
    "model.safetensors",
    "modules.json",
    "sentence_bert_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "hf"
    made = Provenance(source="a run of 3 steps")
    export_hf(model(), folder, config=CONFIG, family="bert", tokenizer=WORDS, made=made)
    return folder


@pytest.fixture
def run(exported: Path, tmp_path: Path) -> Path:
    """A run folder with its hf/ and what else a run leaves."""
    folder = tmp_path / "run"
    shutil.copytree(exported, folder / "hf")
    (folder / "checkpoints/step_1").mkdir(parents=True)
    (folder / "checkpoints/step_1/shard.safetensors").write_bytes(b"x")
    (folder / "metrics.jsonl").write_text("{}")
    return folder


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    from huggingface_hub import constants

    with hub_server() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", server.token)
        yield server


def pushed(server: HubServer, folder: Path, branch: str = "main") -> Path:
    """The files of a repository as a folder."""
    for name, content in server.repos[NAME].branches[branch].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_tokenizers_of_every_kind_are_pushed(tmp_path: Path) -> None:
    names = {*TOKENIZER_FILES, "merges.txt"}
    for name in (*names, "config.json", "model.safetensors"):
        (tmp_path / name).write_text("")
    assert names <= {*hub.files_to_push(tmp_path).pushed}


def test_only_the_files_of_the_model_are_pushed(run: Path, server: HubServer, tmp_path: Path):
    hf = run / "hf"
    (hf / "onnx").mkdir()
    (hf / "onnx/model.onnx").write_bytes(b"graph")
    (hf / "LICENSE").write_text("free")
    for name in ("optimizer.pt", "train.log", ".env", "onnx/model.bin", "pytorch_model.bin"):
        (hf / name).write_text(str(run))
    (tmp_path / "secret").write_text("secret")
    (hf / "vocab.json").symlink_to(tmp_path / "secret")
    assert hub.push_folder(run, NAME) == f"{server.url}/{NAME}"
    there = server.repos[NAME].branches["main"]
    assert set(there) == FILES | {"onnx/model.onnx", "LICENSE"}
    for name in set(there) - {"README.md"}:
        assert there[name] == (hf / name).read_bytes(), name
    assert not any(str(tmp_path).encode() in content for content in there.values())
    (commit,) = server.repos[NAME].commits
    assert commit["lfs"] == ["model.safetensors", "onnx/model.onnx"] and not commit["deleted"]
    assert not server.repos[NAME].private
    left = hub.files_to_push(hf).left
    names = (".env", "onnx/model.bin", "optimizer.pt", "pytorch_model.bin", "train.log")
    assert left == (*names, "vocab.json")


def test_what_is_pushed_opens_and_its_example_names_it(run, server, tmp_path) -> None:
    hub.push_folder(run / "hf", NAME)
    folder = pushed(server, tmp_path / "there")
    ids = AutoTokenizer.from_pretrained(folder)("a b c", return_tensors="pt")
    one, other = (AutoModelForMaskedLM.from_pretrained(x).eval() for x in (run / "hf", folder))
    torch.testing.assert_close(one(**ids).logits, other(**ids).logits, atol=0, rtol=0)
    card = (folder / "README.md").read_text()
    assert f'MODEL = "{NAME}"' in card and HERE not in card
    assert HERE in (run / "hf/README.md").read_text()


def test_a_second_push_replaces_the_first(run, server) -> None:
    hub.push_folder(run, NAME)
    there = server.repos[NAME].branches["main"]
    there |= {"model-00001-of-00002.safetensors": b"old", "notes.md": b"theirs", "NOTICE": b"x"}
    (run / "hf/README.md").write_text("# Other\n")
    hub.push_folder(run, NAME, message="again")
    commit = server.repos[NAME].commits[-1]
    assert commit["deleted"] == ["model-00001-of-00002.safetensors"]
    assert commit["summary"] == "again" and there["README.md"] == b"# Other\n"
    assert {"notes.md", "NOTICE"} <= set(there)


def test_a_branch_and_a_private_repository(run, server) -> None:
    url = hub.push_folder(run, NAME, private=True, revision="stage-2")
    assert url == f"{server.url}/{NAME}/tree/stage-2"
    repo = server.repos[NAME]
    assert repo.private and not repo.branches["main"] and set(repo.branches["stage-2"]) == FILES
    hub.push_folder(run, NAME, private=True, revision="stage-2")
    repo.private = False
    with pytest.raises(UserError, match=f"{NAME}: exists and is public"):
        hub.push_folder(run, NAME, private=True)


REFUSALS = {
    "token": ("create", 401, "does not accept the token"),
    "rights": ("create", 403, "the token may not write to org"),
    "gone": ("preupload", 404, "no such repository"),
    "too often": ("create", 429, "limits the rate of requests; try again in 7 seconds"),
    "broken": ("create", 500, "cannot answer .status 500."),
    "refused": ("commit", 400, "refuses it .status 400."),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_each_refusal_is_one_line(name: str, run, server) -> None:
    part, status, message = REFUSALS[name]
    headers = {"Retry-After": "7"} if status == 429 else {}
    headers |= {"X-Error-Code": "RepoNotFound"} if status == 404 else {}
    if status in (401, 403):
        headers["X-Error-Message"] = "Invalid credentials in Authorization header"
    if status == 403:  # also for the question whether the repository is there
        server.refuse(f"/{NAME}", 404, **{"X-Error-Code": "RepoNotFound"})
    server.refuse(part, status, **headers)
    with pytest.raises((UserError, TemporaryError), match=f"^{NAME}: .*{message}") as caught:
        hub.push_folder(run, NAME)
    assert "\n" not in str(caught.value) and server.token not in str(caught.value)
    assert isinstance(caught.value, TemporaryError) == (status in (429, 500))
    assert not server.repos.get(NAME) or not server.repos[NAME].commits


def test_a_namespace_of_others(run, server) -> None:
    with pytest.raises(UserError, match="others/x: the token may not write to others"):
        hub.push_folder(run, "others/x")


def test_no_token_no_network_and_a_wrong_token(run, server, monkeypatch, tmp_path) -> None:
    from huggingface_hub import constants

    with pytest.raises(UserError, match="the hub does not accept the token"):
        hub.push_folder(run, NAME, token="hf_wrong")
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(UserError, match="no token: log in with `hf auth login`, set HF_TOKEN"):
        hub.push_folder(run, NAME)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(TemporaryError, match="the hub cannot be reached") as caught:
        hub.push_folder(run, NAME, token=server.token)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        hub.push_folder(run, NAME, token=server.token)
    assert not server.repos


def test_what_is_no_model_folder(tmp_path: Path, run, server) -> None:
    cases = {
        tmp_path / "nowhere": "no such folder",
        run / "checkpoints": "has no config.json, nor an hf/ with one; write one with `palm-ds con",
    }
    for path, message in cases.items():
        with pytest.raises(UserError, match=message):
            hub.push_folder(path, NAME)
    (run / "hf/model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no model\*.safetensors"):
        hub.push_folder(run, NAME)
    for name in ("encoder", "a/b/c", "../x", "org/"):
        with pytest.raises(UserError, match="expected ORG/NAME"):
            hub.push_folder(run, name)
    assert not server.asked


def test_the_command(run: Path, server, capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    (tmp_path / "token").write_text(f"{server.token}\n")
    assert main(["push", str(run), NAME, "--dry_run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert set(said[:-1]) == FILES and said[-1].endswith("KB; nothing was pushed")
    with pytest.raises(SystemExit):
        main(["push", str(run), "a/b/c", "--dry_run"])
    assert "a/b/c: expected ORG/NAME" in capsys.readouterr().err
    assert not server.asked
    words = ["push", str(run), NAME, "--token_file", str(tmp_path / "token")]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"KB: {server.url}/{NAME}")
    (tmp_path / "token").write_text("two words\n")
    with pytest.raises(SystemExit):
        main(words)
    assert "--token_file" in capsys.readouterr().err
