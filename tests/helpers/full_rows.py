"""How full rows are packed with a single blend."""

from __future__ import annotations

import numpy as np

from palm_ds.data.blend_dataset import Feed, fill, refs
from palm_ds.data.packing import pack


def real_share(feed: Feed) -> float:
    """The share of real tokens among the positions of about 512 rows."""
    count = int(512 * feed.room / float(feed.mean_tokens))
    layouts = feed.layouts(np.arange(count))
    packed = pack(layouts["length"], feed.room)
    every = refs(0, np.arange(count), layouts)
    rows = [fill([every[i] for i in row], feed.room) for row in packed]
    real = sum(int(layout["length"]) for row in rows for *_, layout in row)
    return real / (len(rows) * feed.room)
