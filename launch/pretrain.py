"""`palm-ds pretrain` from a checkout, as in `deepspeed launch/pretrain.py RECIPE ...`."""

from palm_ds.cli.pretrain import COMMAND

main = COMMAND.main

if __name__ == "__main__":
    COMMAND.start()
