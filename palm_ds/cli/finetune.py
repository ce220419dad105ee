"""`palm-ds finetune`"""

from __future__ import annotations

from functools import partial

from palm_ds.cli import train
from palm_ds.cli.command import Command

FOLLOWING = (
    "palm-ds predict {run} --input FILE --output DIR",
    "palm-ds convert {run} OUT --to huggingface",
)

COMMAND = Command(
    name="finetune",
    summary="Fine-tune an encoder on one or several tasks, from a recipe.",
    usage=train.USAGE,
    examples="""
palm-ds finetune mine.yaml --deepspeed_config cpu.json --init_from runs/pretrained
palm-ds finetune rte.yaml --deepspeed_config zero1_bf16.json --init_from DIR optimizer.lr=2e-5
deepspeed --num_gpus 8 --module palm_ds.cli.finetune mine.yaml --deepspeed_config zero1_bf16.json
torchrun --nproc_per_node 8 --module palm_ds.cli.finetune mine.yaml --deepspeed_config FILE
""",
    notes=f"{train.NOTES} `palm-ds predict` reads the run folder.",
    add_arguments=train.add_arguments,
    run=partial(train.run, following=FOLLOWING),
)

if __name__ == "__main__":
    COMMAND.start()
