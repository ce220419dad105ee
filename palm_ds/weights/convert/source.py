"""The source of a conversion: a path, or a repository of the Hugging Face hub; and its license and
README, which are kept with the converted model.

LICENSE, NOTICE, ...   under their names
README.md              as SOURCE_README.md: README.md is the card of the conversion
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from palm_ds.common.errors import UserError, suggest_path
from palm_ds.common.messages import printable
from palm_ds.weights.download.downloader import hub_snapshot, is_hub_name

README, KEPT_README = "README.md", "SOURCE_README.md"
_LICENSE = re.compile(r"(licen[cs]e|copying|notice|copyright)([._-][\w.-]{1,40})?", re.I)
_LARGEST = 1 << 20  # bytes
_IDENTIFIER = re.compile(r"^licen[cs]e: *([\w.+-]{1,60}) *$", re.M)


def locate(source: Path, revision: str = "") -> tuple[Path, str]:
    """(path, origin): origin is empty for a path; a repository of the hub is downloaded, pinned to
    a commit, which origin names. Raises UserError if there is neither."""
    name = source.as_posix()
    if _is_there(source) or not is_hub_name(name):
        if revision:
            raise UserError(f"revision: only for repositories on the hub; {source} is not one")
        return source, ""
    try:
        snapshot = hub_snapshot(name, revision or None)
    except UserError as error:
        why = str(error).removeprefix(f"{name}: ")
        missing = f"no such file or folder{suggest_path(source)}"
        hub = f"it could not be taken from the Hugging Face hub: {why}"
        raise UserError(f"{name}: {missing}, and {hub}") from None
    return snapshot.folder, f"{name} on the Hugging Face hub, revision {snapshot.revision}"


def _is_there(source: Path) -> bool:
    """Also of TensorFlow's and Paddle's checkpoints, which are named without their suffixes."""
    return source.exists() or any(source.parent.glob(f"{source.name}.*"))


@dataclass(frozen=True, kw_only=True)
class SourceDocuments:
    """The texts of a source, with control characters escaped."""

    texts: Mapping[str, str] = field(default_factory=dict)
    """{file name in the target: text}"""
    license: str = ""
    """The license's identifier, if the README states one."""

    def write(self, folder: Path) -> None:
        for name, text in self.texts.items():
            (folder / name).write_text(text, encoding="utf-8")


def read_documents(source: Path) -> SourceDocuments:
    """The documents of a checkpoint, except those that are not text, too large, or links to other
    folders."""
    folder = source if source.is_dir() else source.parent
    names = {x.name: x for x in sorted(folder.iterdir()) if _LICENSE.fullmatch(x.name)}
    names[KEPT_README] = folder / (KEPT_README if (folder / KEPT_README).is_file() else README)
    texts = {name: _text(path, folder) for name, path in names.items()}
    documents = {name: text for name, text in texts.items() if text}
    license = _license(_text(folder / README, folder)) or _license(documents.get(KEPT_README, ""))
    return SourceDocuments(texts=documents, license=license)


def _text(path: Path, folder: Path) -> str:
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST or not _inside(path, folder):
            return ""
        return printable(path.read_text(encoding="utf-8"), keep="\n\t")
    except (OSError, UnicodeDecodeError):
        return ""


def _inside(path: Path, folder: Path) -> bool:
    """Whether a file belongs to the folder; in the hub's cache it is a link to `blobs`."""
    real, root = path.resolve(), folder.resolve()
    return real.is_relative_to(root) or real.parent == root.parent.parent / "blobs"


def _license(readme: str) -> str:
    """`license:` in the metadata block at the top of a model card."""
    _, start, rest = readme.partition("---\n")
    metadata, end, _ = rest.partition("\n---")
    match = _IDENTIFIER.search(metadata) if start and end and readme.startswith("---") else None
    return match[1] if match else ""
