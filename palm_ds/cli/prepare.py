"""`palm-ds prepare`"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from palm_ds.cli.command import CONTINUES, Command, hint_next, typed
from palm_ds.cli.options import add_fields, options_of
from palm_ds.cli.output import console_of, summarize
from palm_ds.common.errors import UserError

if TYPE_CHECKING:
    from palm_ds.corpus.prepare import PrepareOptions


def run(args: argparse.Namespace) -> int:
    options = _options(args)
    from palm_ds.corpus.prepare import prepare

    manifest = prepare(args.out, args.input, options, console=console_of(args))
    summarize(args, {"corpus": args.out, **manifest.counts()})
    hint_next(
        f"palm-ds corpus inspect {typed(args.out)}",
        f"palm-ds pretrain RECIPE --deepspeed_config cpu.json   # with `corpus: {args.out}`; "
        "`palm-ds recipes` lists some",
    )
    return 0


def _options(args: argparse.Namespace) -> PrepareOptions:
    from palm_ds.corpus.options import InputOptions, ScreenOptions, TextOptions
    from palm_ds.corpus.prepare import PrepareOptions

    text = options_of(TextOptions, args)
    reading = options_of(
        InputOptions, args, pair_fields=_pair_fields(args), languages=tuple(args.languages)
    )
    screen = options_of(ScreenOptions, args)
    return options_of(PrepareOptions, args, text=text, input=reading, screen=screen)


def _pair_fields(args: argparse.Namespace) -> tuple[str, ...]:
    for name, given in (("--pair_fields", args.pair_fields), ("--no_label", args.no_label)):
        if given and args.format != "pairs":
            raise UserError(f"{name}: only for --format pairs")
    fields = tuple(args.pair_fields or ("text_a", "text_b", "label"))
    if args.no_label:
        return fields[:2] if len(fields) == 3 else fields
    if len(fields) == 2:
        raise UserError(f"--pair_fields {' '.join(fields)}: name the label too, or give --no_label")
    return fields


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", help="the corpus to write: a new folder, or a URL")
    parser.add_argument(
        "input",
        nargs="*",
        metavar="INPUT",
        help="files, folders, patterns or URLs; `embedded` is Python's documentation",
    )
    _add_reading(parser.add_argument_group("reading"))
    text = parser.add_argument_group("text and tokens")
    _add_text(text)
    _add_tokenizer(text)
    _add_work(parser.add_argument_group("work"))


def _add_reading(group: argparse._ArgumentGroup) -> None:
    from palm_ds.corpus.options import DOCUMENTS, FORMATS, InputOptions, ScreenOptions

    columns = ("text_field", "id_field", "title_field", "turns_field")
    reading = {"format": "KIND", **dict.fromkeys(columns, "NAME"), "text_documents": "END"}
    choices = {"format": FORMATS, "text_documents": DOCUMENTS}
    add_fields(group, InputOptions, *reading, metavar=reading, choices=choices)
    add = group.add_argument
    add("--pair_fields", nargs="+", metavar="F", help="fields of a pair (text_a text_b label)")
    add("--no_label", action="store_true", help="the pairs have no label")
    add(
        "--languages",
        nargs="+",
        default=[],
        metavar="L",
        help="language of the documents: en; of pairs, those of the two texts: en fr",
    )
    add("--strict", action="store_true", help="stop at the first bad line instead of reporting it")
    dropping = {"dedup": "KIND", "filters": "NAME"}
    add_fields(group, ScreenOptions, metavar=dropping, flags={"filters": "--filter"})
    add(
        "--not_in",
        action="append",
        default=[],
        metavar="INPUT",
        help="with --dedup: drop copies of this input too (a test set); repeatable",
    )


def _add_text(group: argparse._ArgumentGroup) -> None:
    from palm_ds.corpus.options import LANGUAGES, NEWLINES, TextOptions

    shown = {"language": "L", "newline": "AS", "segmenter": "M:F", "collocation_npmi": "X"}
    shown |= {"lexicon_phrase": "FILE", "lexicon_entity": "FILE", "collocation_count": "N"}
    choices = {"language": LANGUAGES, "newline": NEWLINES}
    add_fields(group, TextOptions, metavar=shown, choices=choices)
    group.add_argument(
        "--annotation",
        action="append",
        dest="annotations",
        default=[],
        metavar="NAME",
        help="annotation: capital, heading or [name=]module:function; repeatable",
    )


def _add_tokenizer(group: argparse._ArgumentGroup) -> None:
    from palm_ds.text.train_tokenizer import KINDS

    add = group.add_argument
    add("--tokenizer", metavar="PATH", help="vocab.txt, tokenizer.json, spiece.model or a folder")
    add(
        "--train",
        choices=KINDS,
        metavar="KIND",
        help=f"train a tokenizer instead: {' or '.join(KINDS)}",
    )
    add(
        "--vocab_size",
        type=int,
        default=30_522,
        metavar="N",
        help="size of that tokenizer's vocabulary (30522)",
    )


def _add_work(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--workers", type=int, default=1, metavar="N", help="processes on this machine (1)")
    add("--mpi", action="store_true", help="use the processes of mpirun, on any machines")
    add(
        "--shard_mb",
        type=float,
        metavar="X",
        help="MiB of input per shard (1/256 of the input, 4 to 384)",
    )
    add(
        "--sample_mb",
        type=float,
        default=64.0,
        metavar="X",
        help="MiB of text on which to train a tokenizer and mine phrases (64)",
    )


COMMAND = Command(
    name="prepare",
    summary="Turn raw text into a corpus: tokens and their annotations, memory-mapped.",
    usage="OUT INPUT... (--tokenizer PATH | --train KIND) [options]",
    examples="""
palm-ds prepare data/small embedded --train wordpiece --vocab_size 8000 --lower
palm-ds prepare data/wiki wiki/*.jsonl.gz --tokenizer bert-base-uncased/ --workers 16
palm-ds prepare data/web web/*.jsonl.gz --tokenizer vocab.txt --filter gopher --dedup near
mpirun -n 64 python -m mpi4py.futures -m palm_ds.cli.prepare data/wiki wiki/ ... --mpi
""",
    interrupted=CONTINUES,
    add_arguments=add_arguments,
    run=run,
)

if __name__ == "__main__":
    COMMAND.start()
