"""Random cases on a busy machine: how many, and no clock."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

patiently = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
