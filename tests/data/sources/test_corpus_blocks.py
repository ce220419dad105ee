"""Blocks, segments and windows: together they are the corpus, each part once."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from palm_ds.data.sources.corpus_blocks import BlockOrder, BlockSizes, CorpusBlocks

sizes = st.builds(
    BlockSizes,
    block_tokens=st.integers(1, 60),
    window_blocks=st.integers(1, 9),
    window_documents=st.integers(1, 9),
    segment_blocks=st.integers(1, 12),
    group_segments=st.integers(1, 6),
)
shards = st.lists(
    st.lists(st.integers(1, 60), max_size=30).map(tuple), min_size=1, max_size=6
).filter(lambda found: any(found))
"""Per shard, the tokens of its documents."""
few = settings(max_examples=60, deadline=None)


def blocks_of(documents: list[tuple[int, ...]], sizes: BlockSizes) -> CorpusBlocks:
    every = [tokens for shard in documents for tokens in shard]
    corpus = SimpleNamespace(
        manifest=SimpleNamespace(shards=[SimpleNamespace(tokens=sum(x)) for x in documents]),
        document_starts=np.cumsum([0, *every]),
    )
    return CorpusBlocks(corpus, sizes)  # pyright: ignore[reportArgumentType]


@few
@given(documents=shards, sizes=sizes)
def test_every_document_is_in_the_block_of_its_first_token(documents, sizes):
    blocks = blocks_of(documents, sizes)
    place, shard_start, seen = 0, 0, []
    for shard in documents:
        for tokens in shard:
            seen.append((shard_start, (place - shard_start) // sizes.block_tokens))
            place += tokens
        shard_start = place
    numbers = {key: k for k, key in enumerate(dict.fromkeys(_all_blocks(documents, sizes)))}
    starts = blocks.corpus.document_starts[:-1]
    assert blocks.of_tokens(starts).tolist() == [numbers[key] for key in seen]
    assert len(blocks) == len(numbers)
    every = np.arange(len(blocks))
    assert blocks.documents(every).tolist() == list(range(len(starts)))
    ranges = blocks.document_ranges(np.column_stack([every, every + 1]))
    for block, (first, last) in enumerate(ranges):
        assert (blocks.of_tokens(starts[first:last]) == block).all()


def _all_blocks(documents: list[tuple[int, ...]], sizes: BlockSizes) -> list[tuple[int, int]]:
    starts = np.cumsum([0, *map(sum, documents)])
    return [
        (int(start), block)
        for start, shard in zip(starts, documents, strict=False)
        for block in range(-(-sum(shard) // sizes.block_tokens))
    ]


@few
@given(documents=shards, sizes=sizes, key=st.integers(0, 2**64 - 1))
def test_the_windows_of_all_groups_have_every_block_once(documents, sizes, key):
    blocks = blocks_of(documents, sizes)
    order = BlockOrder(blocks, 3, key)
    groups = [order.windows(group) for group in range(order.groups)]
    found = np.concatenate([window for windows in groups for window in windows])
    assert sorted(found) == list(range(len(blocks)))
    segments = np.concatenate([order.group_segments(group) for group in range(order.groups)])
    assert sorted(segments) == list(range(len(blocks.segments) - 1))
    for windows in groups:
        lengths = [len(window) for window in windows]
        assert max(lengths) - min(lengths) <= 1
        assert len(windows) == 1 or min(lengths) >= sizes.window_blocks
        assert all((np.diff(window) > 0).all() for window in windows)


@few
@given(documents=shards, sizes=sizes)
def test_segments_never_cross_shards(documents, sizes):
    blocks = blocks_of(documents, sizes)
    assert np.diff(blocks.segments).max() <= sizes.segment_blocks
    first_tokens = set(blocks.first_tokens(blocks.segments).tolist())
    assert set(np.cumsum([0, *map(sum, documents)]).tolist()) <= first_tokens


def test_keys_give_different_orders():
    blocks = blocks_of([(10,) * 400], BlockSizes(block_tokens=10, window_blocks=20))
    one, other = (BlockOrder(blocks, 0, key).windows(0)[0].tolist() for key in (1, 2))
    assert one != other and BlockOrder(blocks, 0, 1).windows(0)[0].tolist() == one


def test_all_tasks_read_the_same_shards_at_a_time_and_others_in_the_next_epoch():
    shards = [(10,) * 40] * 12
    sizes = BlockSizes(block_tokens=10, window_blocks=5, segment_blocks=20, group_segments=6)
    blocks = blocks_of(shards, sizes)
    one, other, later = BlockOrder(blocks, 0, 1), BlockOrder(blocks, 0, 2), BlockOrder(blocks, 1, 1)
    assert one.groups == 4
    groups = [
        [set(blocks.shards_of(order.group_segments(g)).tolist()) for g in range(4)]
        for order in (one, other, later)
    ]
    assert groups[0] == groups[1] != groups[2] and all(len(found) == 3 for found in groups[0])
