"""`palm-ds pretrain`"""

from __future__ import annotations

from functools import partial

from palm_ds.cli import train
from palm_ds.cli.command import Command

FOLLOWING = (
    'palm-ds fill-mask {run} "A text with [MASK] in it."',
    "palm-ds finetune RECIPE --deepspeed_config cpu.json --init_from {run}",
    "palm-ds convert {run} OUT --to huggingface",
)

COMMAND = Command(
    name="pretrain",
    summary="Pretrain an encoder on one or several tasks, from a recipe.",
    usage=train.USAGE,
    examples="""
palm-ds pretrain mine.yaml --deepspeed_config cpu.json --run_dir runs/mine
palm-ds pretrain mine.yaml --deepspeed_config cpu.json optimizer.lr=1e-4 seed=2
palm-ds pretrain more.yaml --deepspeed_config cpu.json --extend runs/mine
deepspeed --num_gpus 8 --module palm_ds.cli.pretrain mine.yaml --deepspeed_config zero1_bf16.json
torchrun --nproc_per_node 8 --module palm_ds.cli.pretrain mine.yaml --deepspeed_config FILE
""",
    notes=train.NOTES,
    add_arguments=train.add_arguments,
    run=partial(train.run, following=FOLLOWING),
)

if __name__ == "__main__":
    COMMAND.start()
