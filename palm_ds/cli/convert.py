"""`palm-ds convert`"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from palm_ds.cli.command import Command
from palm_ds.cli.options import options_of
from palm_ds.common.errors import UserError
from palm_ds.common.printable import json_line, printable

if TYPE_CHECKING:
    from palm_ds.weights.convert.convert import ConversionResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help="a checkpoint, or a name on the hub")
    add("target", type=Path, metavar="TARGET", help="a new folder")
    add("--to", default="palm_ds", metavar="F", help="palm_ds, huggingface or paddle (palm_ds)")
    add(
        "--family",
        default="",
        metavar="F",
        help="architecture to write: ernie, bert, roberta, xlm-roberta or camembert",
    )
    add(
        "--task",
        default="",
        metavar="T",
        help="task (or row) of the task embedding to read texts with",
    )
    add("--head", default="", metavar="NAME", help="write only this classification head")
    add(
        "--head_class",
        default="",
        metavar="CLASS",
        help="class for that head: ForTokenClassification, ...",
    )
    add("--words", default="", metavar="NAME", help="write this masked-LM head (the first)")
    add("--dtype", default="float32", metavar="D", help="float32, float16 or bfloat16 (float32)")
    add("--shard_size", default="5GB", metavar="N", help="largest file of weights (5GB)")
    add("--eps", type=float, metavar="X", help="LayerNorm's eps, instead of what SOURCE states")
    add("--config", type=Path, metavar="FILE", help="the encoder's config, if it is not in SOURCE")
    add("--tokenizer", type=Path, metavar="PATH", help="the tokenizer, if it is not in SOURCE")
    add("--texts", type=Path, metavar="FILE", help="texts to compare the outputs on, one per line")
    add(
        "--untied_head",
        choices=["keep", "skip"],
        help="a masked-LM head with its own output embeddings: keep it (keep), or skip it",
    )
    add("--revision", default="", metavar="R", help="of a name on the hub: branch, tag or commit")
    add("--strict", action="store_true", help="refuse to skip a tensor")
    add("--unchecked", action="store_false", dest="verify", help="do not compare the outputs")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from palm_ds.weights.convert.convert import ConversionOptions, convert

    texts = _read_texts(args.texts) if args.texts else None
    options = options_of(ConversionOptions, args, texts=texts)
    opening = {name: getattr(args, name) for name in ("eps", "config", "tokenizer", "untied_head")}
    done = convert(args.source, args.target, args.to, options, **opening)
    if args.json:
        print(json_line(done.record()))
    else:
        _show(done)
    return 0


def _read_texts(file: Path) -> list[str]:
    """The non-empty lines of a file. Raises UserError."""
    try:
        lines = [line.strip() for line in file.read_text("utf-8").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--texts {file}: cannot be read: {error}") from None
    if not any(lines):
        raise UserError(f"--texts {file}: contains no text")
    return [line for line in lines if line]


def _show(done: ConversionResult) -> None:
    """Print the tensors, the notes and the difference of the outputs."""
    from rich.console import Console

    from palm_ds.weights.convert.mapping_report import show

    console = Console(soft_wrap=True, highlight=False)
    show(done.report.rows(), console)
    lines = [
        *(f"note: {note}" for note in done.notes),
        f"{done.format} -> {done.to}: {done.target}",
        f"checked: {done.parity or 'not at all'}",
    ]
    for line in lines:
        console.print(printable(line), markup=False)


COMMAND = Command(
    name="convert",
    summary="Convert a checkpoint and verify that the result gives the same outputs.",
    usage="SOURCE TARGET [--to FORMAT] [options]",
    examples="""
palm-ds convert runs/mine out --to huggingface
palm-ds convert org/name out --revision main
palm-ds convert runs/mine out --to huggingface --family bert --task NAME
palm-ds convert ernie/params out --to palm_ds --eps 1e-5 --dtype bfloat16
""",
    notes="""
SOURCE is a run, one of its checkpoints or its weights/; a Hugging Face, Paddle (ERNIE, PALM,
PaddleNLP), DeepSpeed or TensorFlow BERT checkpoint; or, if there is no such path, a repository of
the Hugging Face hub with safetensors. TARGET is written completely or not at all.""",
    piped=True,
    add_arguments=add_arguments,
    run=run,
)

if __name__ == "__main__":
    COMMAND.start()
