"""Pushes a Hugging Face folder to the hub, in one commit.

    runs/mine ──> runs/mine/hf ──files of a model, by name──> ORG/NAME
                                └─ everything else stays here

Files of an earlier push that this folder lacks (other shards, another tokenizer) are deleted in the
same commit: programs would read them in place of the new ones.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from palm_ds.common.errors import TemporaryError, UserError, first_line
from palm_ds.weights.formats.huggingface.model_card import HERE, named_example

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CARD = "README.md"
_MODEL = re.compile(
    r"""config\.json | (model | model-\d{5}-of-\d{5})\.safetensors | model\.safetensors\.index\.json
      | (tokenizer | tokenizer_config | special_tokens_map | added_tokens | vocab)\.json
      | (vocab | merges | words)\.txt | (spiece | spm | sentencepiece\.bpe | tokenizer)\.model
      | modules\.json | sentence_[\w-]+_config\.json | config_sentence_transformers\.json
      | \d{1,2}_[A-Za-z]+/(config\.json | model\.safetensors)
      | palm_ds_onnx\.json | onnx/[\w.-]+\.(onnx | onnx_data | onnx\.data | json)""",
    re.X,
)
_DOCUMENT = re.compile(r"(SOURCE_)?README\.md|(licen[cs]e|copying|notice|copyright)[\w.-]*", re.I)


@dataclass(frozen=True, kw_only=True)
class FolderFiles:
    """The files of a folder, by whether they belong to a model."""

    folder: Path
    pushed: tuple[str, ...]
    """Paths in the folder."""
    left: tuple[str, ...]
    """Those that stay here: unknown names, and links that lead out of the folder."""

    @property
    def size(self) -> int:
        """Bytes to push."""
        return sum((self.folder / name).stat().st_size for name in self.pushed)


def files_to_push(path: str | Path) -> FolderFiles:
    """The files of a Hugging Face folder, or of a run's hf/, that belong on the hub. Raises
    UserError if there is no model in it."""
    folder = _folder(Path(path))
    names = sorted(x.relative_to(folder).as_posix() for x in folder.rglob("*") if not x.is_dir())
    pushed = tuple(name for name in names if _belongs(name) and _inside(folder, name))
    if not any(name.endswith(".safetensors") for name in pushed):
        raise UserError(f"{folder}: has no model*.safetensors, so there is no model to push")
    return FolderFiles(
        folder=folder, pushed=pushed, left=tuple(name for name in names if name not in pushed)
    )


def check_repository(name: str) -> None:
    """Raises UserError for a name that the hub does not accept for a repository."""
    if not _NAME.fullmatch(name):
        raise UserError(f"{name}: expected ORG/NAME, as in my-team/news-encoder")


def push_folder(
    path: str | Path,
    name: str,
    *,
    private: bool = False,
    token: str | None = None,
    revision: str = "",
    message: str = "",
) -> str:
    """Push a Hugging Face folder, or a run's hf/, to the repository `name` ("org/name") of the hub;
    returns its address.

    The repository, and the branch `revision`, are created if they do not exist. `private`: for a
    new repository; one that is public already is refused. `token`: by default the one of `hf auth
    login` or HF_TOKEN. `message`: of the commit. HF_ENDPOINT and HF_HUB_OFFLINE are respected.
    Raises UserError, or TemporaryError if the hub cannot be reached or limits the rate.
    """
    check_repository(name)
    files = files_to_push(path)
    api = _api(name, token)
    with _explained(name, revision):
        api.create_repo(name, private=private or None, exist_ok=True)
        if private and not api.model_info(name).private:
            raise UserError(
                f"{name}: exists and is public; push without `private`, or to another name"
            )
        if revision:
            api.create_branch(name, branch=revision, exist_ok=True)
        stale = _stale(api.list_repo_files(name, revision=revision or None), files.pushed)
        _commit(api, name, files, stale, revision, message or f"Push {len(files.pushed)} files")
    return address(name, revision)


def address(name: str, revision: str = "") -> str:
    """The page of a repository."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{name}" + (f"/tree/{revision}" if revision else "")


def _folder(path: Path) -> Path:
    for folder in (path / "hf", path):
        if (folder / "config.json").is_file():
            return folder
    if not path.exists():
        raise UserError(f"{path}: no such folder")
    raise UserError(
        f"{path}: has no config.json, nor an hf/ with one; write one with `palm-ds convert {path} "
        "TARGET --to huggingface`"
    )


def _belongs(name: str) -> bool:
    return bool(_MODEL.fullmatch(name) or _DOCUMENT.fullmatch(name))


def _inside(folder: Path, name: str) -> bool:
    return (folder / name).resolve().is_relative_to(folder.resolve())


def _stale(there: Sequence[str], pushed: Sequence[str]) -> list[str]:
    """Files of a model that is no longer in the folder. Documents may be someone's own."""
    return [name for name in there if _MODEL.fullmatch(name) and name not in pushed]


# ---- the hub ----


def _api(name: str, token: str | None) -> HfApi:
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    if huggingface_hub.is_offline_mode():
        raise UserError(f"{name}: HF_HUB_OFFLINE is set; unset it to push")
    if not (token or huggingface_hub.get_token()):
        raise UserError(
            f"{name}: no token: log in with `hf auth login`, set HF_TOKEN, or give a file with one"
        )
    if not sys.stderr.isatty():
        disable_progress_bars()
    return huggingface_hub.HfApi(token=token or None, library_name="palm_ds")


def _commit(
    api: HfApi, name: str, files: FolderFiles, stale: Sequence[str], revision: str, message: str
) -> None:
    from huggingface_hub import CommitOperationDelete

    added = [_addition(files.folder, file, name) for file in files.pushed]
    deleted = [CommitOperationDelete(path_in_repo=file) for file in stale]
    api.create_commit(name, [*added, *deleted], commit_message=message, revision=revision or None)


def _addition(folder: Path, file: str, name: str) -> CommitOperationAdd:
    """A file as it is, but the example of the card opens the model by its name on the hub."""
    from huggingface_hub import CommitOperationAdd

    content: str | bytes = str(folder / file)
    if file == _CARD:
        text = (folder / file).read_text(encoding="utf-8")
        content = named_example(text, name).encode() if HERE in text else content
    return CommitOperationAdd(path_in_repo=file, path_or_fileobj=content)


@contextmanager
def _explained(name: str, revision: str) -> Iterator[None]:
    """Turns errors of huggingface_hub into one line."""
    from huggingface_hub import errors

    try:
        yield
    except UserError:
        raise
    except Exception as raised:
        # an upload that fails is wrapped
        error = (raised.__cause__ if isinstance(raised, RuntimeError) else None) or raised
        if isinstance(error, errors.HfHubHTTPError):
            _refused(name, revision, error)
        if isinstance(error, ValueError):  # a refused README.md, a malformed answer
            raise UserError(f"{name}: {first_line(error)}") from None
        if isinstance(error, ConnectionError) or "httpx" in type(error).__module__:
            why = f"the hub cannot be reached ({first_line(error)}); is the network up?"
            raise TemporaryError(f"{name}: {why}") from None
        raise


def _refused(name: str, revision: str, error: HfHubHTTPError) -> NoReturn:
    """Raise the error that an answer of the hub means."""
    from huggingface_hub import errors

    status = error.response.status_code
    said = (error.server_message or "").split("\n")[0]
    more = f" ({said})" if said else ""
    if status == 429:
        wait = error.response.headers.get("retry-after", "")
        when = f"in {wait} seconds" if wait.isdecimal() else "later"
        raise TemporaryError(f"{name}: the hub limits the rate of requests; try again {when}")
    if status >= 500:
        raise TemporaryError(f"{name}: the hub cannot answer (status {status}){more}; try later")
    if status == 401 and not isinstance(error, errors.RepositoryNotFoundError):
        raise UserError(f"{name}: the hub does not accept the token{more}")
    if isinstance(error, errors.RevisionNotFoundError):
        raise UserError(f"{name}: has no revision {revision or 'main'!r}")
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        raise UserError(f"{name}: no such repository, or the token may not see it")
    if status == 403:
        org = name.split("/")[0]
        raise UserError(f"{name}: the token may not write to {org}{more}; it needs write access")
    raise UserError(f"{name}: the hub refuses it (status {status}){more}")
