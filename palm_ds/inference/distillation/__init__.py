"""Rows for a teacher to label, and what teachers say of them, as files."""
