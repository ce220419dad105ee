"""Random cases on a busy machine: a number of them, not a time limit."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

patiently = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
