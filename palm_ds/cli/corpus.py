"""`palm-ds corpus inspect|annotate|ngrams|export-ernie`: commands for an existing corpus."""

from __future__ import annotations

import argparse

from palm_ds.cli.command import CONTINUES, Command, CommandGroup
from palm_ds.cli.output import console_of, show, summarize

# ---- inspect ----


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("corpus", metavar="CORPUS", help="a folder that `palm-ds prepare` made, or its URL")
    add("--documents", type=int, default=3, metavar="N", help="number of documents to show (3)")
    add(
        "--first",
        type=int,
        default=0,
        metavar="N",
        help="first document to show, counted from 0 (0)",
    )


def _inspect(args: argparse.Namespace) -> int:
    from palm_ds.corpus.inspect import as_record, as_text, heading, open_documents

    corpus, documents = open_documents(args.corpus, documents=args.documents, first=args.first)
    if not (args.json or args.quiet):
        show(args, {}, heading(corpus))
    tokenizer = corpus.tokenizer()
    for name, piece in documents:
        text = as_text(name, piece, corpus, tokenizer)
        show(args, as_record(name, piece, tokenizer), text)
    return 0


INSPECT = Command(
    name="corpus inspect",
    summary="Show documents of a corpus in color, with their annotations.",
    usage="CORPUS [options]",
    examples="""
palm-ds corpus inspect data/wiki
palm-ds corpus inspect data/wiki --documents 1 --first 250
palm-ds corpus inspect s3://bucket/wiki
""",
    piped=True,
    add_arguments=_inspect_arguments,
    run=_inspect,
)


# ---- annotate ----


def _annotate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("corpus", metavar="CORPUS", help="a folder that `palm-ds prepare` made")
    add("input", nargs="+", metavar="INPUT", help="the input from which it was made")
    add(
        "--annotation",
        action="append",
        required=True,
        metavar="NAME",
        help="annotation: capital, heading or [name=]module:function; repeatable",
    )
    add("--workers", type=int, default=1, metavar="N", help="processes on this machine (1)")
    add("--mpi", action="store_true", help="use the processes of mpirun, on any machines")


def _annotate(args: argparse.Namespace) -> int:
    from palm_ds.corpus.add_annotation import add_annotations

    manifest = add_annotations(
        args.corpus,
        args.input,
        args.annotation,
        workers=args.workers,
        mpi=args.mpi,
        console=console_of(args),
    )
    summarize(args, {"corpus": args.corpus, "annotations": manifest.annotations})
    return 0


ANNOTATE = Command(
    name="corpus annotate",
    summary="Add annotations, one value per token, to a corpus.",
    usage="CORPUS INPUT... --annotation NAME [options]",
    examples="""
palm-ds corpus annotate data/wiki wiki/*.jsonl.gz --annotation capital
palm-ds corpus annotate data/wiki wiki/*.jsonl.gz --annotation number=my_annotations:is_number
""",
    interrupted=CONTINUES,
    add_arguments=_annotate_arguments,
    run=_annotate,
)


# ---- ngrams ----


def _ngrams_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("corpus", metavar="CORPUS", help="a folder that `palm-ds prepare` made, or its URL")
    add("file", metavar="FILE", help="the lexicon to write; replaced if it exists")
    sizes = "maximum number of n-grams of 2, 3, ... tokens (100000 200000)"
    add("--sizes", type=int, nargs="+", metavar="N", help=sizes)
    add("--least", type=int, default=5, metavar="N", help="minimum count of an n-gram (5)")
    sample = "count only N tokens, from random documents; 0: the whole corpus (0)"
    add("--sample", type=int, default=0, metavar="N", help=sample)


def _ngrams(args: argparse.Namespace) -> int:
    from palm_ds.corpus.mine_ngrams import SIZES, mine_ngrams

    counts = {"least": args.least, "sample": args.sample}
    found = mine_ngrams(args.corpus, args.file, sizes=args.sizes or SIZES, **counts)
    summarize(args, {"file": args.file, **found})
    return 0


NGRAMS = Command(
    name="corpus ngrams",
    summary="Write the n-grams of a corpus whose tokens occur together more than by chance.",
    usage="CORPUS FILE [options]",
    examples="""
palm-ds corpus ngrams data/wiki ngrams.tsv
palm-ds corpus ngrams data/wiki ngrams.tsv --sizes 20000 20000 5000 --sample 100000000
""",
    notes="""
FILE has a line for each n-gram: its tokens, their text, how often it occurs, and its t-statistic.
The task explicit_ngram_masking reads it. Lines may be removed by hand.""",
    add_arguments=_ngrams_arguments,
    run=_ngrams,
)


# ---- export-ernie ----


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("corpus", metavar="CORPUS", help="a folder that `palm-ds prepare` made, or its URL")
    add("file", metavar="FILE.gz", help="a new file")
    add("--length", type=int, metavar="N", help="maximum tokens per line (512)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the cuts and random texts (0)")


def _export(args: argparse.Namespace) -> int:
    from palm_ds.corpus.ernie_dataset import write_ernie

    lines = write_ernie(args.corpus, args.file, length=args.length, seed=args.seed)
    summarize(args, {"file": args.file, "lines": lines})
    return 0


EXPORT_ERNIE = Command(
    name="corpus export-ernie",
    summary="Write a corpus in the format of ERNIE 1.0's training files.",
    usage="CORPUS FILE.gz [options]",
    examples="palm-ds corpus export-ernie data/wiki wiki.gz --length 128",
    notes="""
A corpus of pairs is written unchanged. Documents are cut into pairs; in half of them the second
text comes from another document.""",
    add_arguments=_export_arguments,
    run=_export,
)

COMMAND = CommandGroup(
    name="corpus",
    summary="Inspect, annotate or export a corpus, or mine its n-grams.",
    commands={
        "inspect": INSPECT,
        "annotate": ANNOTATE,
        "ngrams": NGRAMS,
        "export-ernie": EXPORT_ERNIE,
    },
)

if __name__ == "__main__":
    COMMAND.start()
