"""Errors of an index's files, as opposed to mistakes in a request."""

from __future__ import annotations

from palm_ds.common.errors import UserError


class StoreError(UserError):
    """The disk is full or fails, or a file is damaged."""


class StoreBusyError(StoreError):
    """Another process is changing the index; a later try may succeed."""
