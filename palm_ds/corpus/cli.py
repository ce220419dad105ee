"""The command line of launch/prepare.py."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from palm_ds.corpus.add import add_marks
from palm_ds.corpus.build import Prepare, prepare
from palm_ds.corpus.ernie_lines import write_ernie
from palm_ds.corpus.inputs import DOCUMENTS, FORMATS, InputOptions
from palm_ds.corpus.inspect import inspect
from palm_ds.corpus.options import LANGUAGES, NEWLINES, TextOptions
from palm_ds.corpus.vocabulary import KINDS
from palm_ds.errors import UserError

_EXAMPLES = """examples:
  prepare.py data/small embedded --train wordpiece --vocab_size 8000 --lower
  prepare.py data/wiki wiki/*.jsonl.gz --tokenizer bert-base-uncased/ --workers 16
  prepare.py data/zh books/ --language zh --tokenizer ernie/vocab.txt --simplify
  prepare.py --inspect data/wiki --documents 3
  prepare.py data/pairs pairs.tsv --format pairs --pair_fields sentence1 sentence2 label ...
  prepare.py data/demo demo_train_set.gz --format ernie --tokenizer ernie/vocab.txt
  prepare.py --write_ernie wiki.gz data/wiki --length 128
  prepare.py --add my_marks:is_number data/wiki wiki/*.jsonl.gz
  mpirun -n 64 python -m mpi4py.futures launch/prepare.py data/wiki wiki/ ... --mpi
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses and does what was asked; a person's mistake raises UserError."""
    args = _parser().parse_args(arguments)
    try:
        _do(args, Console(soft_wrap=True, highlight=False))
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr, flush=True)
        sys.exit(130)


def _do(args: argparse.Namespace, console: Console) -> None:
    if args.inspect:
        _refuse_inputs(args)
        inspect(args.out, documents=args.documents, first=args.first, console=console)
    elif args.write_ernie:
        _refuse_inputs(args)
        write_ernie(args.out, args.write_ernie, length=args.length, seed=args.seed, console=console)
    elif args.add:
        add_marks(
            args.out, args.input, args.add, workers=args.workers, mpi=args.mpi, console=console
        )
    else:
        prepare(args.out, args.input, _options(args), console=console)


def _refuse_inputs(args: argparse.Namespace) -> None:
    if args.input:
        action = "--inspect" if args.inspect else "--write_ernie"
        raise UserError(f"{action} {args.out}: takes one corpus and no input")


def _options(args: argparse.Namespace) -> Prepare:
    if args.length is not None:
        raise UserError("--length: is for --write_ernie")
    text = TextOptions(
        language=args.language,
        lower=args.lower,
        simplify=args.simplify,
        newline=args.newline,
        segmenter=args.segmenter,
        lexicon_phrase=_absent_or(args.lexicon_phrase),
        lexicon_entity=_absent_or(args.lexicon_entity),
        collocations=not args.no_collocations,
        collocation_count=args.collocation_count,
        collocation_npmi=args.collocation_npmi,
    )
    source = InputOptions(
        format=args.format,
        text_field=args.text_field,
        id_field=args.id_field,
        title_field=args.title_field,
        pair_fields=_pair_fields(args),
        turns_field=args.turns_field,
        text_documents=args.text_documents,
    )
    return Prepare(
        text=text,
        input=source,
        tokenizer=args.tokenizer,
        train=args.train,
        vocab_size=args.vocab_size,
        marks=_absent_or(args.mark),
        strict=args.strict,
        shard_mb=args.shard_mb,
        sample_mb=args.sample_mb,
        workers=args.workers,
        mpi=args.mpi,
    )


def _pair_fields(args: argparse.Namespace) -> tuple[str, ...]:
    for name, given in (("--pair_fields", args.pair_fields), ("--no_label", args.no_label)):
        if given and args.format != "pairs":
            raise UserError(f"{name}: is for --format pairs")
    fields = tuple(args.pair_fields or ("text_a", "text_b", "label"))
    if args.no_label:
        return fields[:2] if len(fields) == 3 else fields
    if len(fields) == 2:
        raise UserError(f"--pair_fields {' '.join(fields)}: name the label too, or say --no_label")
    return fields


def _absent_or(values: list[str] | None) -> tuple[str, ...]:
    return tuple(values or ())


class _Parser(argparse.ArgumentParser):
    """argparse whose mistakes are user errors like all others."""

    def error(self, message: str):
        raise UserError(f"{message}; see --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="prepare.py",
        description="Raw text to a corpus: token ids with marks beside them, memory-mapped.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("out", type=Path, metavar="OUT", help="the corpus: a folder that is made, read or added to")
    add(
        "input",
        nargs="*",
        metavar="INPUT",
        help="files, folders or patterns (.jsonl .txt, also .gz .zst, .parquet, Arrow), or "
        "`embedded`: the English text that comes with Python",
    )
    _add_actions(parser.add_argument_group("other things to do"))
    _add_reading(parser.add_argument_group("reading"))
    _add_text(parser.add_argument_group("text"))
    _add_tokenizer(parser.add_argument_group("tokenizer"))
    _add_work(parser.add_argument_group("work"))
    return parser


def _add_actions(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--inspect", action="store_true", help="show documents of the corpus OUT in colour")
    add("--documents", type=int, default=3, metavar="N", help="how many to show (3)")
    add("--first", type=int, default=0, metavar="N", help="the first document to show (0)")
    add(
        "--add",
        action="append",
        metavar="MARK",
        help="add a mark to the corpus OUT, made of the same INPUT: a built-in one (capital, "
        "heading) or "
        "[name=]module:function of your own; repeatable",
    )
    add(
        "--write_ernie",
        metavar="FILE.gz",
        help="write the corpus OUT as ERNIE 1.0's lines: pairs as they are, documents cut into "
        "pairs of which one half is random",
    )
    add("--length", type=int, metavar="N", help="tokens of such a line at most (512)")
    add("--seed", type=int, default=0, metavar="N", help="of the cuts and random texts (0)")


def _add_reading(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--format",
        choices=FORMATS,
        default="auto",
        help="kind of file (auto: by its name), or what is in it beside documents: `pairs` of "
        "texts with a label (.tsv .csv and rows), `dialogues` (rows), `ernie`: ERNIE 1.0's lines "
        "of ids, or lists of such files",
    )
    add("--text_field", default="text", metavar="NAME", help="field or column of the text (text)")
    add(
        "--id_field",
        metavar="NAME",
        help="field or column of the id (`id` where there is one, else file and place)",
    )
    add(
        "--title_field",
        metavar="NAME",
        help="field or column of a title; it is put before the text and marked `heading`",
    )
    add(
        "--pair_fields",
        nargs="+",
        metavar="NAME",
        help="of pairs: the two texts and the label (text_a text_b label)",
    )
    add("--no_label", action="store_true", help="the pairs have no label")
    add(
        "--turns_field",
        metavar="NAME",
        help="of dialogues: the list of turns (turns, else messages)",
    )
    add(
        "--text_documents",
        choices=DOCUMENTS,
        default="blank_line",
        help="what ends a document in a text file (blank_line)",
    )
    add("--strict", action="store_true", help="stop at the first bad line instead of listing it")


def _add_text(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--language", choices=LANGUAGES, default="mixed", help="(mixed)")
    add("--lower", action="store_true", help="lower-case; the mark `capital` keeps the capitals")
    add("--simplify", action="store_true", help="traditional to simplified Chinese (opencc)")
    add(
        "--newline",
        choices=NEWLINES,
        default="auto",
        help="a single line end ends a sentence (break), does not (space), or does unless the "
        "document's lines are wrapped (auto)",
    )
    add("--segmenter", metavar="M:F", help="Chinese words by module:function(text) -> words")
    add("--lexicon_phrase", action="append", metavar="FILE", help="phrases, one a line; repeatable")
    add(
        "--lexicon_entity", action="append", metavar="FILE", help="entities, one a line; repeatable"
    )
    add("--no_collocations", action="store_true", help="mine no English phrases from the text")
    add("--collocation_count", type=int, default=8, metavar="N", help="least count of a pair (8)")
    add(
        "--collocation_npmi",
        type=float,
        default=0.35,
        metavar="X",
        help="least normalised pointwise mutual information of a pair, -1 to 1 (0.35)",
    )
    add(
        "--mark",
        action="append",
        metavar="MARK",
        help="one more mark from the start: `capital`, `heading` or [name=]module:function; "
        "repeatable",
    )


def _add_tokenizer(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--tokenizer",
        metavar="PATH",
        help="vocab.txt, tokenizer.json, spiece.model, or a folder with one of them",
    )
    add("--train", choices=KINDS, help="train one on the input instead")
    add("--vocab_size", type=int, default=30_522, metavar="N", help="tokens to train (30522)")


def _add_work(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--workers", type=int, default=1, metavar="N", help="processes on this machine (1)")
    add(
        "--mpi",
        action="store_true",
        help="processes on any machines: mpirun -n N python -m mpi4py.futures launch/prepare.py",
    )
    add(
        "--shard_mb",
        type=float,
        metavar="X",
        help="input of a shard in MiB (a 256th of the input, from 4 to 128)",
    )
    add(
        "--sample_mb",
        type=float,
        default=64.0,
        metavar="X",
        help="text to train a tokenizer and mine phrases on, in MiB (64)",
    )
