"""Reports of a run: metrics, charts, the HTML report."""
