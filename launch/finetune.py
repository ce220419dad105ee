"""`palm-ds finetune` from a checkout, as in `deepspeed launch/finetune.py RECIPE ...`."""

from palm_ds.cli.finetune import COMMAND

main = COMMAND.main

if __name__ == "__main__":
    COMMAND.start()
