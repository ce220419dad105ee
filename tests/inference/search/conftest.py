"""Small models that tests of the search share with those of the server."""

from __future__ import annotations

from tests.serve.conftest import tasks_run, words_run

__all__ = ["tasks_run", "words_run"]
