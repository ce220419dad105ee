"""Errors of an index's files, which are no mistake in what was asked."""

from __future__ import annotations

from palm_ds.common.errors import UserError


class StoreError(UserError):
    """The disk is full or fails, or a file is damaged."""


class StoreBusyError(StoreError):
    """Another process is changing the index; later the same may succeed."""
