"""Downloads pretrained models by their names (catalogue.py), or from the Hugging Face Hub.

    ls()                                         lists them, and which cannot be opened yet
    download("pretrain", "ERNIE-v1-zh-base")     ./pretrain/ERNIE-v1-zh-base/, which is returned
    download("ERNIE-v1-zh-base", path="models")  models/pretrain/ERNIE-v1-zh-base/
    download("ernie-gen-base-en")                ./pretrain/ernie-gen-base-en/
    download("org/name")                         ./pretrain/org/name/, from the hub
    download("bert-base-uncased")                likewise: the hub's oldest models have no `org`
    download("task_data_zh")                     ./data/chnsenticorp/, ./data/cmrc2018/, ...

Archives come over HTTP (http.py) into a cache, or from a mirror, and are unpacked as untrusted
input (archive.py). A folder appears complete or not at all; an existing one is not downloaded
again.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from palm_ds.common.atomic import write_folder_atomically
from palm_ds.common.errors import UserError, first_line, suggest
from palm_ds.common.files import hash_of_text
from palm_ds.common.json_files import write_json
from palm_ds.weights.download import catalogue
from palm_ds.weights.download.archive import BadArchiveError, unpack
from palm_ds.weights.download.http import PATIENCE, Patience, Progress, fetch, one_at_a_time
from palm_ds.weights.download.paddlenlp import PaddleModel, mirrored

GROUPS: dict[str, Mapping[str, catalogue.Published]] = {
    "pretrain": catalogue.PRETRAIN,
    # PaddlePALM lists these groups too but never filled them.
    "vocab": {},
    "backbone": {},
    "head": {},
    "reader": {},
}
_LISTED = {**GROUPS, "ERNIE": catalogue.ERNIE, "data": catalogue.DATA}
"""As `ls` shows them."""
_DOWNLOADED = {**_LISTED, "pretrain": catalogue.MODELS}
"""The names that `download` finds in a group: `pretrain` is the folder of all of them."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_OLD_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")  # bert-base-uncased
_HUBS_OWN = re.compile(r"(bert|roberta|xlm-roberta|camembert)-(base|large)(-[\w-]+)?")
_HUB_FILES = ("*.json", "*.txt", "*.model", "*.md", "LICENSE*")
_HUB_MODULES = ("config.json", "model.safetensors", "pytorch_model.bin")
"""Files of a module of sentence-transformers, each in a folder such as 1_Pooling."""
_HUB_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")  # used if there are none of the above


@dataclass(frozen=True, kw_only=True)
class Places:
    """Places where archives come from and where they are kept."""

    mirror: str = ""
    """A base URL or folder with the archives under their file names; empty: where they were
    published."""
    cache: Path = Path("~/.cache/palm_ds")
    """Downloaded archives stay here."""
    patience: Patience = PATIENCE


def places_from_environment() -> Places:
    """The places given by PALM_MIRROR and XDG_CACHE_HOME; only this function reads them."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "palm_ds"
    return Places(mirror=os.environ.get("PALM_MIRROR", ""), cache=cache)


def ls(item: str = "all", scope: str = "all") -> None:
    """Print the available models: of all groups or one, all names or one. In the group `ERNIE`,
    those that cannot be opened yet come with the reason."""
    groups = _LISTED if item.lower() == "all" else {_group(item): _LISTED[_group(item)]}
    for group, models in groups.items():
        names = models if scope.lower() == "all" else [_name(scope, models)]
        print(f"Available {group} items:")
        for name in names:
            why = models[name].not_yet if models is catalogue.ERNIE else ""
            print(f"  => {name}" + (f" (cannot be opened yet: {why})" if why else ""))


def listed() -> dict[str, dict[str, str]]:
    """{group: {name: why it cannot be opened yet, if it cannot}} of what `ls` prints."""
    return {
        group: {
            name: model.not_yet if models is catalogue.ERNIE else ""
            for name, model in models.items()
        }
        for group, models in _LISTED.items()
    }


def download(
    item: str,
    scope: str = "all",
    path: str | Path = ".",
    *,
    places: Places | None = None,
    again: bool = False,
    revision: str | None = None,
) -> Path:
    """Download a pretrained model; returns its folder, `path`/pretrain/NAME. Or download data sets;
    returns `path`/data, which has a folder for each.

    `item` is a group that `ls` shows and `scope` a name in it or `all`, as in PaddlePALM, or `item`
    is a name on its own. Names may have any case, and PaddlePALM's former ones are known
    (`ernie-en-uncased-large`, `bert-cn-base`). What cannot be opened is not downloaded: `all`
    leaves it out, with a line on stderr. `org/name` is a repository of the Hugging Face Hub,
    at `revision`. `places`: by default PALM_MIRROR and the user's cache folder. `again`: even if
    the folder exists. Raises UserError with one line.
    """
    path, places = Path(path), places or places_from_environment()
    if _HUB_NAME.fullmatch(item) or _HUBS_OWN.fullmatch(item):
        folder = path / "pretrain" / item
        return _made(folder, lambda folder: _from_hub(item, folder, revision), places, again)
    if revision is not None:
        raise UserError(f"revision: only for `org/name` on the hub, not for {item}")
    if item.lower() in ("data", *catalogue.DATA):
        name = scope.lower() if item.lower() == "data" else item.lower()
        for each in catalogue.DATA if name == "all" else [name]:
            _data_sets(each, path / "data", places, again)
        return path / "data"
    folder = path / "pretrain"
    if item.lower() not in {"all", *map(str.lower, _LISTED)}:
        return _from_name(_name(item, catalogue.MODELS), folder, places, again)
    group = "pretrain" if item.lower() == "all" else _group(item)
    if not _LISTED[group]:
        raise UserError(f"{item}: this PaddlePALM group is empty")
    if scope.lower() != "all":
        return _from_name(_name(scope, _DOWNLOADED[group]), folder, places, again)
    for name, model in _LISTED[group].items():
        if model.not_yet:
            print(_refusal(name, model), file=sys.stderr)
        else:
            _from_name(name, folder, places, again)
    return folder


# ---- names ----


def _group(item: str) -> str:
    known = {group.lower(): group for group in _LISTED}
    if item.lower() not in known:
        raise UserError(f'no group "{item}"{suggest(item.lower(), known)}')
    return known[item.lower()]


def _name(given: str, archives: Mapping[str, catalogue.Published]) -> str:
    """The listed name for a name in any case, with `cn` for `zh`, or a former name."""
    known = {name.lower(): name for name in archives}
    known |= {old: name for old, name in catalogue.FORMER_NAMES.items() if name in archives}
    plain = re.sub(r"(?<=-)cn(?=-|$)", "zh", given.lower().replace("_", "-"))
    if plain not in known:
        if plain in {name.lower() for name in catalogue.MODELS}:
            raise UserError(f'no model "{given}" in this group; give the name without a group')
        near = suggest(plain, known)
        for lower, name in known.items():
            near = near.replace(f'"{lower}"', f'"{name}"')
        raise UserError(f'no model "{given}"{near}')
    return known[plain]


# ---- archives ----


def _refusal(name: str, model: catalogue.Published) -> str:
    where = model.repository if isinstance(model, catalogue.HubModel) else model.url
    return f"{name}: not downloaded, since it cannot be opened yet: {model.not_yet} ({where})"


def _from_name(name: str, group: Path, places: Places, again: bool) -> Path:
    """Download one name, from the mirror folder, the cache or the network; returns its folder.
    Raises UserError, before that, if it cannot be opened."""
    model = catalogue.MODELS[name]

    def make(folder: Path) -> None:
        if model.not_yet:
            raise UserError(_refusal(name, model))
        if isinstance(model, catalogue.HubModel):
            return _from_hub(model.repository, folder, None)
        if isinstance(model, PaddleModel):
            return _from_paddlenlp(name, model, folder, places)
        known = {"size": model.size, "sha256": model.sha256}
        file, url = _file(name, model.file, model.url, places, **known)
        try:
            _unpack(file, folder, model)
        except BadArchiveError as error:
            if not url:
                raise
            file.unlink(missing_ok=True)
            raise BadArchiveError(f"{error} (from {url}; the file is deleted)") from None

    return _made(group / name, make, places, again)


def _data_sets(name: str, folder: Path, places: Places, again: bool) -> None:
    """Unpack an archive of data sets into the folder. Existing ones are kept, with a line on
    stderr, unless `again`."""
    if name not in catalogue.DATA:
        raise UserError(f'no data sets "{name}"{suggest(name, catalogue.DATA)}')
    model, mark = catalogue.DATA[name], folder / f".{name}"
    if mark.exists() and not again:
        return
    file, url = _file(name, model.file, model.url, places)
    part = folder / f".{name}.unpacked"
    try:
        shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed
        unpack(file, part, flatten=True)
        for found in sorted(part.iterdir()):
            _move_data_set(found, folder / found.name, again)
        mark.touch()
    except BadArchiveError as error:
        if url:
            file.unlink(missing_ok=True)
        deleted = f" (from {url}; the file is deleted)" if url else ""
        raise BadArchiveError(f"{error}{deleted}") from None
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _move_data_set(found: Path, target: Path, again: bool) -> None:
    if target.exists() and not again:
        print(f"{target}: already exists and is kept", file=sys.stderr)
        return
    if target.is_dir():
        shutil.rmtree(target)
    found.replace(target)


def _made(folder: Path, make: Callable[[Path], None], places: Places, again: bool) -> Path:
    """Make a folder unless it exists; one process at a time does. The lock is in the cache, not
    next to the folder."""
    if again or not _there(folder):
        mark = hash_of_text(str(folder.absolute()))[:16]
        with one_at_a_time(places.cache.expanduser() / "locks" / mark, str(folder)):
            if again or not _there(folder):  # still
                make(folder)
    return folder


def _from_paddlenlp(name: str, model: PaddleModel, folder: Path, places: Places) -> None:
    """Its files under the names that PaddleNLP saves them with, and the configurations."""
    files = {x: _file(name, mirrored(url), url, places)[0] for x, url in model.urls.items()}

    def write(part: Path) -> None:
        for saved, file in files.items():
            shutil.copyfile(file, part / saved)
        write_json(part / "config.json", model.config_json())
        write_json(part / "tokenizer_config.json", model.tokenizer_config())

    _publish(folder, write)


def _file(
    name: str, published: str, address: str, places: Places, **known: Any
) -> tuple[Path, str]:
    """A file, which a mirror has as `published`, and its URL (empty for a mirror folder)."""
    if places.mirror and "://" not in places.mirror:
        file = Path(places.mirror).expanduser() / published
        if not file.is_file():
            raise UserError(f"{name}: no {published} in the mirror {places.mirror}")
        return file, ""
    url = f"{places.mirror.rstrip('/')}/{published}" if places.mirror else address
    file = _cached(url, places.cache)
    try:
        with _bar(name) as progress:
            fetch(url, file, **known, patience=places.patience, progress=progress)
    except UserError as error:
        elsewhere = f"; PALM_MIRROR may name another URL or folder with {published}"
        ours = not str(error).startswith(url)  # a full disk, a folder that cannot be written
        raise UserError(f"{error}{'' if ours else elsewhere}") from None
    return file, url


def _cached(url: str, cache: Path) -> Path:
    """The file in the cache: one per URL, so that mirrors are not mixed up."""
    mark = hash_of_text(url.rpartition("/")[0])[:8]
    return cache.expanduser() / "archives" / mark / url.rpartition("/")[2]


def _unpack(file: Path, folder: Path, model: catalogue.Archive) -> None:
    def write(part: Path) -> None:
        unpack(file, part, flatten=True)
        if model.preset and not any(part.glob("*.json")):
            write_json(part / "config.json", model.config_json())

    _publish(folder, write)


def _publish(folder: Path, write: Callable[[Path], None]) -> None:
    try:
        write_folder_atomically(folder, write)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from None


def _there(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


@contextmanager
def _bar(name: str) -> Iterator[Progress]:
    """A progress bar on a terminal; silent elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as bars:
        task = bars.add_task("", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


# ---- the hub ----


def _from_hub(name: str, folder: Path, revision: str | None) -> None:
    """Copy a snapshot of the hub. huggingface_hub has its own cache, resumes downloads, and knows
    HF_HUB_OFFLINE, tokens and mirrors."""
    for weights in _HUB_WEIGHTS:
        snapshot = _model_snapshot(name, revision, weights)
        if any(snapshot.glob(weights)):
            break
    else:
        raise UserError(f"{name}: has no {' and no '.join(_HUB_WEIGHTS)}")
    patterns = (*_HUB_FILES, weights, *_module_patterns())
    files = {file for pattern in patterns for file in snapshot.glob(pattern)}
    _publish(folder, lambda part: _copy(snapshot, files, part))


def _copy(snapshot: Path, files: Iterable[Path], folder: Path) -> None:
    for file in files:
        target = folder / file.relative_to(snapshot)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)


def _module_patterns() -> list[str]:
    return [f"[1-9]*_*/{name}" for name in _HUB_MODULES]


@dataclass(frozen=True, kw_only=True)
class HubSnapshot:
    """A repository of the hub at one revision, in the cache of huggingface_hub."""

    name: str
    revision: str
    """The commit."""
    folder: Path


def is_hub_name(name: str) -> bool:
    """Whether the hub may have a repository of that name: `org/name`, or one of its first names."""
    return bool(_HUB_NAME.fullmatch(name) or _OLD_HUB_NAME.fullmatch(name))


def hub_name_of(path: Path) -> str:
    """The repository of a path in huggingface_hub's cache (models--org--name/snapshots/COMMIT);
    empty for other paths."""
    for part, below in pairwise(path.resolve().parts):
        if part.startswith("models--") and below == "snapshots":
            return "/".join(part.split("--")[1:])
    return ""


def hub_snapshot(name: str, revision: str | None = None) -> HubSnapshot:
    """A repository of the hub, its weights as safetensors. Raises UserError in one line."""
    weights = _HUB_WEIGHTS[0]
    folder = _model_snapshot(name, revision, weights)
    if not any(folder.glob(weights)):
        raise UserError(f"{name}: has no {weights}; weights in other formats are not downloaded")
    return HubSnapshot(name=name, revision=folder.name, folder=folder)


def _model_snapshot(name: str, revision: str | None, weights: str) -> Path:
    """A model's files, and those of its sentence-transformers modules, without which its embeddings
    would differ."""
    folder = _snapshot(name, revision, [*_HUB_FILES, weights])
    if (folder / "modules.json").is_file():
        _snapshot(name, folder.name, _module_patterns(), without=())
    return folder


def _snapshot(
    name: str, revision: str | None, patterns: list[str], without: Sequence[str] = ("*/*",)
) -> Path:
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    here: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": list(without)}
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, **here))
    except errors.GatedRepoError:
        why = "it is gated: request access on the hub, then log in with `hf auth login`"
    except errors.RepositoryNotFoundError:
        why = "the hub has no such repository, or it is private"
    except errors.RevisionNotFoundError:
        why = f"it has no revision {revision!r}"
    except errors.LocalEntryNotFoundError as error:
        offline = huggingface_hub.is_offline_mode()
        why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        if isinstance(error.__cause__, errors.HfHubHTTPError):
            why = f"the hub cannot answer ({first_line(error.__cause__)})"
        why += ", and the local cache does not have all of its files"
    except Exception as error:  # from several libraries; each means that the download failed
        why = first_line(error)
    raise UserError(f"{name}: {why}") from None
