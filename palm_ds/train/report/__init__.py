"""What a run leaves to look at: metrics, charts, the HTML report."""
