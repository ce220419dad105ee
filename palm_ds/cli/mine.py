"""`palm-ds mine`"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from palm_ds.cli.command import CONTINUES, Command, hint_next
from palm_ds.cli.inference_options import add_inference_arguments, progress, start_processes
from palm_ds.cli.options import local_path
from palm_ds.cli.output import summarize
from palm_ds.common.errors import UserError
from palm_ds.common.files import check_rows_file
from palm_ds.common.messages import counted

if TYPE_CHECKING:
    from palm_ds.data.reader import Table
    from palm_ds.inference.embedder import Embedder
    from palm_ds.inference.search.mine_negatives import Passages
    from palm_ds.inference.trained_model import TrainedModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    embedder = "the embedding model: a run folder, or a checkpoint of any format"
    add("model", metavar="MODEL", help=embedder)
    rows = "files of rows with the columns query (or anchor) and positive"
    add("input", nargs="+", metavar="INPUT", help=rows)
    add("--output", required=True, type=local_path, metavar="FILE", help="the .jsonl file to write")
    index = "take negatives from this index of MODEL's (else: the positives of all rows)"
    add("--index", type=Path, metavar="INDEX", help=index)
    texts = "take negatives from these files instead"
    add("--passages", nargs="+", default=[], metavar="FILE", help=texts)
    column = "column of the texts in --passages (text, text_a, ...)"
    add("--column", default="", metavar="NAME", help=column)
    columns = "names of INPUT's columns, as `columns` in a recipe's `read`"
    add("--columns", nargs="+", default=[], metavar="ROLE=NAME", help=columns)
    _choice_arguments(parser)
    reranker = "score pairs with a head of this model instead of by cosine"
    add("--reranker", default="", metavar="RUN", help=reranker)
    head = "task of the reranker whose head scores (the one best suited)"
    add("--reranker_task", default="", metavar="NAME", help=head)
    scores = "write teacher_scores too, for a task's `distillation`"
    add("--scores", action="store_true", help=scores)
    prompt = "text put before every passage (the model's own)"
    add("--prompt", default=None, metavar="TEXT", help=prompt)
    query_prompt = "text put before every query (that of passages)"
    add("--query_prompt", default=None, metavar="TEXT", help=query_prompt)
    add("--max_length", type=int, default=None, metavar="N", help="truncate texts to N tokens")
    add_inference_arguments(parser)


def _choice_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--num_negatives", type=int, default=4, metavar="N", help="negatives per row, at most (4)")
    add("--range_min", type=int, default=0, metavar="N", help="skip the N nearest passages (0)")
    add(
        "--range_max",
        type=int,
        default=100,
        metavar="N",
        help="choose among the N nearest passages (100)",
    )
    margin = "a negative's score is at least X below the positive's"
    add("--absolute_margin", type=float, metavar="X", help=margin)
    relative = "... by at least the share X of the positive's score: 0.05 for 5 %%"
    add("--relative_margin", type=float, metavar="X", help=relative)
    add("--max_score", type=float, metavar="X", help="highest score of a negative")
    add("--min_score", type=float, metavar="X", help="lowest score of a negative")
    how = "choose those with the highest scores (top), or at random (random)"
    add("--sampling_strategy", default="top", metavar="HOW", help=how)
    add("--seed", type=int, default=1, metavar="N", help="seed of --sampling_strategy random (1)")


def run(args: argparse.Namespace) -> int:
    from palm_ds.data.reader.options import columns_of
    from palm_ds.inference.search.mine_files import mine_file, open_pairs, pair_scorer
    from palm_ds.inference.search.mine_negatives import MiningSettings
    from palm_ds.inference.trained_model import TrainedModel

    settings = MiningSettings(
        num_negatives=args.num_negatives,
        range_min=args.range_min,
        range_max=args.range_max,
        absolute_margin=args.absolute_margin,
        relative_margin=args.relative_margin,
        max_score=args.max_score,
        min_score=args.min_score,
        sampling_strategy=args.sampling_strategy,
        seed=args.seed,
    )
    if args.index and args.passages:
        raise UserError("--index, --passages: give only one of the two")
    if args.column and not args.passages:
        raise UserError("--column: needs --passages, the files that have it")
    if args.reranker_task and not args.reranker:
        raise UserError("--reranker_task: needs --reranker, a model that has the task")
    table = open_pairs(args.input, columns_of(args.columns))
    check_rows_file(args.output, table.names)
    _, device = start_processes(args.device)

    def opened(path: str) -> TrainedModel:
        how = {"precision": args.precision, "batch_tokens": args.batch_tokens}
        return TrainedModel.open(path, device=device, **how)

    scorer = pair_scorer(opened(args.reranker), args.reranker_task) if args.reranker else None
    with progress("mine", not args.quiet) as done:
        passages, embedder = _passages(args, table, opened(args.model))
        found = mine_file(
            table,
            args.output,
            passages=passages,
            embedder=embedder,
            prompt=args.query_prompt,
            scorer=scorer,
            settings=settings,
            scores=args.scores,
            done=done,
        )
    before = f"note: mined by an earlier run: {counted(found.continued, 'query')}"
    made = f"{counted(found.rows, 'row')}, {counted(found.negatives, 'negative')}"
    without = f"without a negative, as the limits leave none: {counted(found.without, 'row')}"
    negatives = f", negatives {found.negative_score:.3f}" if found.negatives else ""
    lines = [
        f"{made}; written to {args.output}",
        f"mean score: positives {found.positive_score:.3f}{negatives}",
        *[without] * bool(found.without),
        *[before] * bool(found.continued),
    ]
    summarize(args, vars(found) | {"output": args.output}, *lines)
    hint_next(f"palm-ds finetune RECIPE ... with `table: {args.output}` of a `retrieval` task")
    return 0


def _passages(
    args: argparse.Namespace, table: Table, model: TrainedModel
) -> tuple[Passages | Sequence[str], Embedder]:
    """Passages or their texts, and the embedder of texts like them."""
    from palm_ds.inference.embedder import EmbeddingSettings
    from palm_ds.inference.search.add_files import check_model
    from palm_ds.inference.search.index import open_index
    from palm_ds.inference.search.mine_files import passages_of_index, texts_of_files
    from palm_ds.inference.search.texts import TextColumns

    if args.index:
        if args.prompt is not None or args.max_length is not None:
            raise UserError("--prompt, --max_length: are set by the index; remove them")
        with open_index(args.index) as index:
            embedder = model.embedder(index.embedding.settings)
            check_model(index, embedder, args.model)
            return passages_of_index(index), embedder
    embedder = model.embedder(EmbeddingSettings(prompt=args.prompt, max_length=args.max_length))
    if args.passages:
        return texts_of_files(args.passages, TextColumns(text=args.column)), embedder
    return [*dict.fromkeys(table.column("positive"))], embedder


COMMAND = Command(
    name="mine",
    summary="Mine hard negatives for pairs of a query and a positive.",
    usage="MODEL INPUT... --output FILE [options]",
    examples="""
palm-ds mine runs/search pairs.jsonl --output mined.jsonl --relative_margin 0.05
palm-ds mine runs/search pairs.jsonl --output mined.jsonl --index indexes/news --range_min 5
palm-ds mine runs/search pairs.jsonl --output mined.jsonl --reranker runs/ranking --scores
""",
    notes="""
Negatives are the passages nearest to a query that are not among its positives. Those that score
close to the positive may be unmarked answers: a margin leaves them out. Columns other than query
and positive are not written. After an interruption, the same command continues.""",
    add_arguments=add_arguments,
    run=run,
    interrupted=CONTINUES,
)

if __name__ == "__main__":
    COMMAND.start()
