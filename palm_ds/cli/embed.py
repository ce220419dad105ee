"""`palm-ds embed`"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from palm_ds.cli.command import FILES_CONTINUE, Command
from palm_ds.cli.inference_options import (
    add_inference_arguments,
    add_vector_arguments,
    answer_pipe,
    is_piped,
    progress,
    start_processes,
)
from palm_ds.cli.options import local_path
from palm_ds.cli.output import console_of, summarize
from palm_ds.common.errors import UserError
from palm_ds.common.messages import counted

if TYPE_CHECKING:
    from palm_ds.inference.embedder import Embedder
    from palm_ds.runtime.processes.process_group import ProcessGroup


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a run folder, or a checkpoint of any format")
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="files of rows, .txt files, or - for standard input",
    )
    files = "a .npy or .parquet file; .npz for sparse vectors"
    add("--output", default=None, type=local_path, metavar="FILE", help=files)
    add(
        "--column",
        nargs="+",
        default=[],
        metavar="NAME",
        help="column of the texts (text_a, text, ...), or the two of text pairs",
    )
    add("--format", default="", help="format of the files (by their suffixes)")
    poolings = "mean, cls, max, pooler or splade (the model's own, else mean)"
    add("--pooling", default=None, help=poolings)
    add("--layers", default="-1", metavar="A,B", help="average these layers (-1: the last)")
    add("--concat", action="store_true", help="concatenate these layers instead")
    add("--tokens", action="store_true", help="write one vector per token")
    add(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="scale vectors to length 1, or not (the model's own setting, else not)",
    )
    add_vector_arguments(parser)
    add("--dtype", default="float32", help="float32, float16 or int8 (float32)")
    add_inference_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from palm_ds.inference.embedder import EmbeddingSettings
    from palm_ds.inference.trained_model import TrainedModel
    from palm_ds.runtime.processes.launchers import check_hostfile

    check_hostfile()
    columns, piped = _columns(args.column), is_piped(args)
    if piped and args.dtype != "float32":
        raise UserError(f"--dtype {args.dtype}: vectors of a pipe are lines of JSON; remove it")
    settings = EmbeddingSettings(
        pooling=args.pooling,
        layers=_layers(args.layers),
        concat=args.concat,
        tokens=args.tokens,
        normalize=args.normalize,
        dimensions=args.dimensions,
        max_active_dims=args.max_active_dims,
        max_length=args.max_length,
        prompt=args.prompt,
        task=args.task,
    )
    group, device = start_processes(args.device)
    opened = TrainedModel.open(
        args.model, device=device, precision=args.precision, batch_tokens=args.batch_tokens
    )
    embedder = opened.embedder(settings)
    if piped:
        from palm_ds.inference.piped_answers import EmbeddingAnswer

        return answer_pipe(EmbeddingAnswer(embedder=embedder, columns=columns), args.format)
    return _embed_files(args, embedder, columns, group)


def _embed_files(
    args: argparse.Namespace, embedder: Embedder, columns: dict[str, str], group: ProcessGroup
) -> int:
    from palm_ds.inference.embedding_files import EmbeddingJob, embed_files

    job = EmbeddingJob(
        inputs=args.input,
        output=args.output,
        columns=columns,
        format=args.format,
        dtype=args.dtype,
    )
    with progress("embed", group.rank == 0 and not args.quiet) as done:
        result = embed_files(embedder, job, model=args.model, group=group, done=done)
    if result:
        console = console_of(args)
        if result.continued:
            console.print(f"note: embedded by an earlier run: {counted(result.continued, 'row')}")
        speed = (result.rows - result.continued) / max(result.seconds, 1e-9)
        took = f"{result.seconds:.1f} s, {speed:,.0f} rows/s"
        what = f"{counted(result.rows, 'row')}, {result.size} numbers each"
        if result.active is not None:
            what += f", of which {result.active:,.1f} are not 0"
        record = {"rows": result.rows, "size": result.size, "seconds": result.seconds}
        record |= {"continued": result.continued, "output": args.output}
        record |= {} if result.active is None else {"active": result.active}
        summarize(args, record, f"{what}, {took}; written to {args.output}")
    return 0


def _columns(names: list[str]) -> dict[str, str]:
    if len(names) > 2:
        raise UserError(f"--column {' '.join(names)}: expected one, or the two of pairs")
    return dict(zip(("text_a", "text_b"), names, strict=False))


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--layers {text}: expected numbers such as -1 or -4,-3,-2,-1") from None


COMMAND = Command(
    name="embed",
    summary="Turn texts into vectors with a run, or a checkpoint of any format.",
    usage="MODEL --input FILE... --output FILE [options]   or: MODEL --input - [options]",
    examples="""
palm-ds embed runs/mine --input texts.txt --output vectors.npy
palm-ds embed models/minilm --input news.jsonl --column body --output news.parquet --dtype int8
palm-ds embed runs/mine --input texts.txt --output vectors.npy --layers=-4,-3,-2,-1 --normalize
palm-ds embed runs/mine --input - --normalize < texts.txt
palm-ds embed runs/splade --input texts.txt --output vectors.npz
torchrun --nproc_per_node 4 --module palm_ds.cli.embed runs/mine --input a.txt --output a.npy
""",
    notes="""
What sentence-transformers' files in the model's folder say about pooling, normalization and length
is the default. A row with two texts (sentence1 and sentence2, text_a and text_b) is one
input with both. The output is the same for any number of processes; after an interruption, the same
command continues.

`--input -`: lines of JSON, TSV or text on the standard input; a line of JSON with the vector of
each is printed as soon as it is computed.""",
    add_arguments=add_arguments,
    run=run,
    interrupted=FILES_CONTINUE,
)

if __name__ == "__main__":
    COMMAND.start()
