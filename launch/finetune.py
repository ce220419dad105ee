"""Fine-tune an encoder on one task or many at once, from a recipe.

    deepspeed launch/finetune.py RECIPE.yaml --deepspeed_config ds_configs/zero1_bf16.json
    torchrun --nproc_per_node 8 launch/finetune.py RECIPE.yaml --deepspeed_config FILE
    python launch/finetune.py RECIPE.yaml --deepspeed_config FILE --init_from DIR optimizer.lr=2e-5

A run folder that has a checkpoint in it goes on from there by itself. Afterwards launch/predict.py
reads it.
"""

from palm_ds.command import main

if __name__ == "__main__":
    code = main(__doc__)
    from palm_ds.processes import leave

    leave(code)
