"""Pretrain an encoder on many tasks at once, from a recipe.

    deepspeed launch/pretrain.py RECIPE.yaml --deepspeed_config ds_configs/zero1_bf16.json
    torchrun --nproc_per_node 8 launch/pretrain.py RECIPE.yaml --deepspeed_config FILE
    python launch/pretrain.py RECIPE.yaml --deepspeed_config FILE optimizer.lr=1e-4 seed=2

A run folder that has a checkpoint in it goes on from there by itself.
"""

from palm_ds.command import main

if __name__ == "__main__":
    code = main(__doc__)
    from palm_ds.processes import leave

    leave(code)
