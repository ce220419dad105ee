"""Compares the files of a run's corpora with their hashes, in the background.

Opening a corpus compares sizes alone, since reading terabytes would take hours. So every process
reads its share of the files in a thread while the run trains; before any checkpoint is saved, all
processes exchange what they found. Files behind a URL are compared when they are fetched. Corpora
that were compared are recorded in the run folder, and not compared again when the run resumes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from palm_ds.common.errors import TemporaryError, UserError
from palm_ds.common.json_files import write_json
from palm_ds.corpus.corpus_folder import LocalFolder
from palm_ds.corpus.manifest import file_problem
from palm_ds.corpus.store import Corpus
from palm_ds.runtime.processes.process_group import ProcessGroup
from palm_ds.train.setup.run_folder import corpus_fingerprint

FILE = "corpora_verified.json"


class CorpusCheck:
    """The comparison of one run. All processes make the same calls."""

    def __init__(self, corpora: Mapping[str, Corpus], folder: Path, group: ProcessGroup):
        self._file, self._group = folder / FILE, group
        known = group.gather(_read(self._file))[0]
        local = {
            corpus_fingerprint(corpus): corpus.folder
            for corpus in corpora.values()
            if isinstance(corpus.folder, LocalFolder)
        }
        self._new = sorted(local.keys() - set(known))
        self._all = sorted({*known, *local})
        files = [(local[key], name) for key in self._new for name in local[key].manifest.files]
        self._mine = files[group.rank :: group.world]
        self._problem: UserError | TemporaryError | None = None
        self._closed, self._done = False, not files
        self._thread = threading.Thread(target=self._compare, daemon=True, name="corpus check")
        if files:
            self._thread.start()

    def collect(self) -> None:
        """Raises UserError on all processes if one has found a damaged file, TemporaryError if it
        could not read one. Collective."""
        if self._done:
            return
        answers = self._group.gather((self._problem, self._thread.is_alive()))
        if problem := next((problem for problem, _ in answers if problem), None):
            raise problem
        if not any(running for _, running in answers):
            self._done = True
            if self._group.rank == 0:
                with suppress(OSError):  # compared again next time
                    write_json(self._file, self._all)

    def close(self) -> None:
        """Let the thread end after the file that it reads."""
        self._closed = True

    def _compare(self) -> None:
        for folder, name in self._mine:
            if self._closed:
                return
            stated, where = folder.manifest.files[name], f"corpus {folder.path}: {name}"
            try:
                problem = file_problem(folder.local / name, stated, hashes=True)
            except OSError as error:
                text = f"{where} cannot be read: {error.strerror}; the same command continues"
                self._problem = TemporaryError(text)
                return
            if problem:
                self._problem = UserError(
                    f"{where} {problem}; the run has ended without saving what it may have learned "
                    "from it. Copy or prepare the corpus again, then run the same command"
                )
                return


def _read(file: Path) -> list[str]:
    with suppress(OSError, ValueError):
        return [str(key) for key in json.loads(file.read_bytes())]
    return []
