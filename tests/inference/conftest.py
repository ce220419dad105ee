"""Reports of these tests' commands have no curves."""

from tests.helpers.no_curves import no_curves  # noqa: F401
