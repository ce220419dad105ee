"""Input of a corpus: finds files, splits them into work units, reads their records."""
