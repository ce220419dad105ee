"""`palm-ds convert`"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palm_ds.cli.command import Command
from palm_ds.cli.options import add_fields, list_of_names, local_path, options_of
from palm_ds.cli.output import show
from palm_ds.common.errors import UserError, suggest
from palm_ds.common.messages import byte_size, printable
from palm_ds.weights.convert.options import CheckedConversion, ConversionOptions, OnnxOptions

if TYPE_CHECKING:
    from palm_ds.weights.convert.convert import ConversionResult
    from palm_ds.weights.convert.to_onnx import OnnxFile, OnnxResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help="a run, a checkpoint, or a name on the hub")
    add("target", type=local_path, metavar="TARGET", help="a new folder")
    to = "format to write: palm_ds, huggingface, paddle or onnx (palm_ds)"
    add("--to", default="palm_ds", metavar="F", help=to)
    add_fields(parser, ConversionOptions, "task", "family", metavar={"task": "T", "family": "F"})
    add(
        "--head", type=list_of_names, metavar="A,B", help="write only this head (onnx: these heads)"
    )
    shown = {"head_class": "CLASS", "words": "NAME", "dtype": "D", "shard_size": "N"}
    add_fields(parser, ConversionOptions, *shown, metavar=shown)
    add(
        "--onnx",
        type=list_of_names,
        nargs="?",
        const=["fp32"],
        metavar="A,B",
        help="huggingface: files of onnx/: fp32, fp16, int8; or none (fp32 where possible)",
    )
    _add_opening(parser)
    onnx = parser.add_argument_group("--to onnx")
    shown = {"precisions": "A,B", "opset": "N"}
    add_fields(onnx, OnnxOptions, *shown, metavar=shown, flags=_FLAGS, lists=("precisions",))
    onnx.add_argument(
        "--score", nargs="+", metavar="FILE", help="labeled rows on which to score the files"
    )
    flags = {"verify": "--unchecked"}
    add_fields(parser, CheckedConversion, "strict", "verify", metavar={}, flags=flags)


def _add_opening(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--eps", type=float, metavar="X", help="LayerNorm's eps, if SOURCE states a wrong one")
    add("--config", type=Path, metavar="FILE", help="the encoder's config, if it is not in SOURCE")
    add("--tokenizer", type=Path, metavar="PATH", help="the tokenizer, if it is not in SOURCE")
    add(
        "--untied_head",
        choices=["keep", "skip"],
        help="keep or skip a masked-LM head whose output embeddings are its own (keep)",
    )
    add_fields(parser, CheckedConversion, "revision", metavar={"revision": "R"})
    add("--texts", type=Path, metavar="FILE", help="texts to compare the outputs on, one per line")


def run(args: argparse.Namespace) -> int:
    texts = _read_texts(args.texts) if args.texts else None
    opening = {name: getattr(args, name) for name in ("eps", "config", "tokenizer", "untied_head")}
    made = _to_onnx if args.to == "onnx" else _to_weights
    done = made(args, texts, opening)
    if args.json:
        show(args, done.record)
    elif not args.quiet:
        _show(done)
    return 0


@dataclass(frozen=True, kw_only=True)
class _Done:
    """Output of a conversion."""

    result: ConversionResult | OnnxResult
    record: Mapping[str, Any]
    """For JSON."""
    lines: Sequence[str]
    """After the tensors and notes of the result."""


def _to_weights(
    args: argparse.Namespace, texts: list[str] | None, opening: dict[str, Any]
) -> _Done:
    from palm_ds.weights.convert.convert import TO, convert
    from palm_ds.weights.convert.to_onnx import add_onnx, check_installed
    from palm_ds.weights.convert.try_onnx import AddedOnnx, try_onnx

    if args.to not in TO:
        raise UserError(f"--to {args.to}: no such format{suggest(args.to, [*TO, 'onnx'])}")
    _check_not_given(args, _OF_ONNX, f"--to {args.to} has none; --to onnx has")
    if args.to != "huggingface":
        _check_not_given(args, ("onnx",), "adds onnx/ to what --to huggingface writes")
    head, *others = args.head or [""]
    if others:
        raise UserError(f"--head: {args.to} takes one head; --to onnx takes several")
    options = options_of(ConversionOptions, args, texts=texts, head=head)
    added: list[AddedOnnx] = []

    def add(folder: Path) -> None:
        if args.onnx:
            files = add_onnx(folder, args.onnx, verify=options.verify)
            added.append(AddedOnnx(files=files))
        else:
            added.append(try_onnx(folder, verify=options.verify))

    if args.onnx and args.onnx != _NO_ONNX:
        check_installed("--onnx")
    adding = {"add": add} if args.to == "huggingface" and args.onnx != _NO_ONNX else {}
    done = convert(args.source, args.target, args.to, options, **adding, **opening)
    lines = [
        f"{done.format} -> {done.to}: {done.target}",
        f"checked: {done.parity or 'not at all'}",
        *(line for onnx in added for line in _file_lines(onnx.files)),
        *(f"no onnx/: {onnx.why}" for onnx in added if onnx.why),
    ]
    record = done.record() | ({"onnx": added[0].record()} if added else {})
    return _Done(result=done, record=record, lines=lines)


def _to_onnx(args: argparse.Namespace, texts: list[str] | None, opening: dict[str, Any]) -> _Done:
    from palm_ds.inference.onnx_scores import run_of
    from palm_ds.weights.convert.to_onnx import convert_to_onnx

    _check_not_given(args, _NOT_OF_ONNX, "does not apply to --to onnx")
    options = options_of(OnnxOptions, args, texts=texts, heads=args.head)
    of_run = partial(run_of, files=args.score or ())
    done = convert_to_onnx(args.source, args.target, options, of_run=of_run, **opening)
    return _Done(result=done, record=done.record(), lines=_onnx_lines(done))


def _file_lines(files: Sequence[OnnxFile]) -> list[str]:
    lines = []
    for file in files:
        form = f" ({file.form})" if file.form else ""
        lines.append(f"{file.name}: {byte_size(file.bytes)}{form}")
        lines.append(f"  checked: {file.parity or 'not at all'}")
        same = ", ".join(f"{name} {share:.1%}" for name, share in file.agreement.items())
        lines += [f"  same predictions: {same}"] if same else []
    return lines


def _onnx_lines(done: OnnxResult) -> list[str]:
    """The inputs and outputs, and each file with its difference and scores."""
    about = done.description
    heads = [f"{head.outputs[0]} (batch, ...): {name}" for name, head in about.heads.items()]
    lines = [
        f"{done.format} -> onnx, opset {about.opset}: {done.target}",
        f"inputs: {', '.join(about.inputs)}",
        f"outputs: {', '.join(about.outputs)}",
        *(f"head: {head}" for head in heads if len(heads) > 1),
    ]
    lines += _file_lines(done.files)
    for task, metrics in done.scores.items():
        for metric, values in metrics.items():
            shown = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
            lines.append(f"score: {task}: {metric}: {shown}")
    return [*lines, *(f"warning: {line}" for line in done.warnings)]


_NO_ONNX = ["none"]
_FLAGS = {"precisions": "--precision"}
_OF_ONNX = ("precisions", "opset", "score")
_NOT_OF_ONNX = ("family", "head_class", "words", "dtype", "shard_size", "onnx")


def _check_not_given(args: argparse.Namespace, options: Sequence[str], why: str) -> None:
    for name in options:
        if getattr(args, name):
            raise UserError(f"{_FLAGS.get(name, f'--{name}')}: {why}")


def _read_texts(file: Path) -> list[str]:
    """The non-empty lines of a file. Raises UserError."""
    try:
        lines = [line.strip() for line in file.read_text("utf-8").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--texts {file}: cannot be read: {error}") from None
    if not any(lines):
        raise UserError(f"--texts {file}: contains no text")
    return [line for line in lines if line]


def _show(done: _Done) -> None:
    """Print the tensors, the notes and what was compared."""
    from rich.console import Console

    from palm_ds.weights.convert import mapping_report

    console = Console(soft_wrap=True, highlight=False)
    mapping_report.show(done.result.report.rows(), console)
    for line in [*(f"note: {note}" for note in done.result.notes), *done.lines]:
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
palm-ds convert runs/mine out --to huggingface --onnx fp32,int8
palm-ds convert runs/mine out --to onnx --precision fp16,int8 --score held_out.tsv
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
