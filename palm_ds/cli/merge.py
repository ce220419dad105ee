"""`palm-ds merge`"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palm_ds.cli.command import Command
from palm_ds.cli.options import local_path, options_of
from palm_ds.cli.output import show, summarize
from palm_ds.common.errors import UserError

if TYPE_CHECKING:
    from palm_ds.corpus.store import Corpus
    from palm_ds.inference.held_out_loss import MaskedLMLoss

_METHODS = ("mean", "ema", "slerp", "ties")
_COMPARISON = ("held_out", "examples")
"""Options of `masked_lm_loss`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("sources", nargs="+", type=Path, metavar="SOURCE", help="a run, or two or more checkpoints")
    add("--out", type=local_path, required=True, metavar="DIR", help="a new folder")
    add("--method", default="mean", choices=_METHODS, help="how to merge (mean)")
    add("--weights", nargs="+", type=float, metavar="W", help="weight of each source (equal)")
    add("--last", type=int, default=0, metavar="N", help="merge a run's N newest checkpoints (all)")
    best = "merge the N best checkpoints that a run kept (`save.best`)"
    add("--best", type=int, default=0, metavar="N", help=best)
    add("--decay", type=float, metavar="D", help="ema: weight of the average so far (0.9)")
    base = "ties: the checkpoint from which all sources were trained"
    add("--base", type=Path, metavar="DIR", help=base)
    density = "ties: share of each source's changes that is kept, the largest (0.2)"
    add("--density", type=float, metavar="P", help=density)
    add("--scale", type=float, metavar="S", help="ties: factor of the merged change (1)")
    add("--corpus", metavar="DIR", help="a prepared corpus: compare the masked-token losses on it")
    add(
        "--held_out",
        type=float,
        metavar="P",
        help="use only the documents that recipes with this `held_out` hold out (all)",
    )
    add("--examples", type=int, metavar="N", help="texts of the corpus to use (1000)")


def run(args: argparse.Namespace) -> int:
    from palm_ds.weights.convert.merge import MergeOptions, merge_checkpoints, sources_of

    sources = sources_of(args.sources, args.last, args.best)
    wanted = options_of(MergeOptions, args)
    corpus = _corpus(args)
    if corpus is not None:
        _check_comparable(sources[0], corpus)
    lines = merge_checkpoints(sources, args.out, wanted)
    record: dict[str, Any] = {"out": args.out, "sources": sources, "method": wanted.method}
    if corpus is None:
        summarize(args, record, *lines)
        return 0
    losses = _losses(args, corpus, [*sources, args.out])
    rows = [
        {"path": path, "loss": loss.nats, "accuracy": loss.accuracy, "tokens": loss.tokens}
        for path, loss in losses
    ]
    show(args, {**record, "losses": rows}, *lines, _table(losses))
    return 0


def _corpus(args: argparse.Namespace) -> Corpus | None:
    """The corpus to compare losses on. Raises UserError."""
    from palm_ds.corpus.store import open_corpus

    given = [name for name in _COMPARISON if getattr(args, name) is not None]
    if given and not args.corpus:
        raise UserError(f"--{given[0]}: needs --corpus")
    if args.examples is not None and args.examples < 1:
        raise UserError(f"--examples: expected a number above 0, got {args.examples}")
    if args.held_out is not None and not 0 <= args.held_out < 1:
        raise UserError(f"--held_out: expected a number from 0 to below 1, got {args.held_out:g}")
    return open_corpus(args.corpus) if args.corpus else None


def _check_comparable(source: Path, corpus: Corpus) -> None:
    """Raises UserError, before anything is written, if there will be no losses to compare. The
    other sources have the same heads and tokenizer."""
    from palm_ds.inference.held_out_loss import filler_for
    from palm_ds.inference.trained_model import TrainedModel

    filler_for(TrainedModel.open(source), corpus)


def _losses(
    args: argparse.Namespace, corpus: Corpus, paths: Sequence[Path]
) -> list[tuple[Path, MaskedLMLoss]]:
    from palm_ds.inference.held_out_loss import masked_lm_loss
    from palm_ds.inference.trained_model import TrainedModel

    given = {name: getattr(args, name) for name in _COMPARISON}
    how = {name: value for name, value in given.items() if value is not None}
    return [(path, masked_lm_loss(TrainedModel.open(path), corpus, **how)) for path in paths]


def _table(losses: Sequence[tuple[Path, MaskedLMLoss]]) -> Any:
    from rich.table import Column, Table

    path = Column("checkpoint", overflow="fold")  # its end tells them apart
    table = Table(path, "masked-token loss", "accuracy", "tokens")
    for path, loss in losses:
        table.add_row(str(path), f"{loss.nats:.4f}", f"{loss.accuracy:.1%}", f"{loss.tokens:,}")
    return table


COMMAND = Command(
    name="merge",
    summary="Merge checkpoints of the same shape: mean, moving average, slerp or TIES.",
    usage="SOURCE... --out DIR [options]",
    examples="""
palm-ds merge runs/mine --last 3 --out merged                  # the mean of a run's checkpoints
palm-ds merge runs/mine --best 3 --out merged                  # with save.best
palm-ds merge runs/a runs/b --weights 0.7 0.3 --out merged --corpus data/test
palm-ds merge a b c --method ties --base pretrained --out merged
""",
    notes="""
A Hugging Face folder is written if the first source is one, otherwise a weights/ folder. Both name
the method and the sources. --corpus compares the losses of all sources and of the result.""",
    add_arguments=add_arguments,
    run=run,
)

if __name__ == "__main__":
    COMMAND.start()
