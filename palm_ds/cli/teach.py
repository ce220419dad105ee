"""`palm-ds teach`"""

from __future__ import annotations

import argparse
from pathlib import Path

from palm_ds.cli.command import CONTINUES, Command, hint_next, typed
from palm_ds.cli.options import add_recipe, check_overrides, local_path
from palm_ds.cli.output import summarize
from palm_ds.common.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, "a YAML file, or a shipped one, with a `teacher`, as for training")
    add = parser.add_argument
    add(
        "--output",
        type=local_path,
        metavar="FILE",
        help="the parquet file to write (the recipe's teacher.file)",
    )
    add("--precision", default="fp32", choices=("fp32", "bf16", "fp16"), help="precision (fp32)")


def run(args: argparse.Namespace) -> int:
    check_overrides(args.overrides)
    from palm_ds.cli.shipped import find_recipe
    from palm_ds.inference.distillation.teach import teach
    from palm_ds.runtime.deepspeed.ds_config import DSConfig
    from palm_ds.runtime.processes.processes import start, stop
    from palm_ds.train.recipe.recipe import read_recipe

    recipe = read_recipe(find_recipe(args.recipe), args.overrides)
    named = recipe.teacher.file if recipe.teacher else ""
    output = args.output or (Path(named) if named else None)
    if output is None:
        raise UserError("--output: missing; name the file to write, such as scores.parquet")
    ds_config = DSConfig(path="", sections={}, stage=0, precision=args.precision)
    processes = start(ds_config)
    result = teach(recipe, output, ds_config=ds_config, processes=processes)
    stop()
    continued = (
        f"; {result.continued} of {result.parts} parts were there" if result.continued else ""
    )
    record = {"rows": result.rows, "by": result.by, "continued": result.continued, "output": output}
    summarize(args, record, f"{result.rows:,} {result.by}{continued}; written to {output}")
    given = " ".join(map(typed, [args.recipe, *args.overrides]))
    file = typed(f"teacher.file={output}")
    hint_next(f"palm-ds finetune {given} --deepspeed_config FILE {file}")
    return 0


COMMAND = Command(
    name="teach",
    summary="Write a teacher's scores of a recipe's texts, for training without the teacher.",
    usage="RECIPE [--output FILE] [key=value ...]",
    examples="""
palm-ds teach student.yaml --output scores.parquet
palm-ds finetune student.yaml --deepspeed_config cpu --run_dir runs/s teacher.file=scores.parquet
""",
    notes="""
Tables are scored row by row, with the teacher's own tokenizer: its vocabulary may differ from the
student's. Masked words, texts to write and corpora are scored step by step, and belong to the seed,
batch and stages of the recipe; of the vocabulary, `teacher.logits.top_k` tokens are kept. A command
that was interrupted continues.""",
    add_arguments=add_arguments,
    run=run,
    interrupted=CONTINUES,
)

if __name__ == "__main__":
    COMMAND.start()
