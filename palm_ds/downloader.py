"""PaddlePALM's module of this name: `import palm_ds.downloader`, or `palm.downloader`."""

from palm_ds.weights.download.downloader import download, ls

__all__ = ["download", "ls"]
