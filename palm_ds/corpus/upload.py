"""Puts a prepared corpus behind a URL.

    $PALM_DS_CACHE/prepare/NAME-KEY           the corpus on this machine, until all of it is there
                           NAME-KEY.uploaded  names of the files that are there

The manifest is uploaded last: before that, the URL is not a corpus. An interrupted upload continues
with the files that are missing.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from palm_ds.common.files import hash_of_text
from palm_ds.common.remote_files import RemoteFolder
from palm_ds.corpus.corpus_folder import cache_settings
from palm_ds.corpus.manifest import NAME, Manifest

log = logging.getLogger(__name__)

_MARK = "UNFINISHED"


def work_folder(url: str) -> Path:
    """Folder in which a corpus is prepared that will be put behind a URL."""
    key = hash_of_text(url)[:16]
    name = url.rstrip("/").rpartition("/")[2]
    folder = cache_settings()[0] / "prepare" / f"{name}-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


def check_writable(remote: RemoteFolder) -> None:
    """Raises UserError if nothing can be written behind the URL, before any work is done."""
    remote.write(_MARK, b"This corpus is being prepared.\n")


def upload(folder: Path, remote: RemoteFolder, manifest: Manifest) -> None:
    """Uploads a finished corpus and removes it from this machine."""
    done = folder.with_name(folder.name + ".uploaded")
    finished = set(done.read_text("utf-8").splitlines()) if done.is_file() else set()
    names = [name for name in (*manifest.files, "state.json") if name not in finished]
    size = sum((folder / name).stat().st_size for name in names)
    log.info("uploading %d files (%.1f MB) to %s", len(names), size / 1e6, remote.url)
    with done.open("a", encoding="utf-8") as record:
        for name in names:
            remote.upload(folder / name, name)
            record.write(name + "\n")
            record.flush()
    remote.upload(folder / NAME, NAME)
    remote.remove(_MARK)
    shutil.rmtree(folder)
    done.unlink()
