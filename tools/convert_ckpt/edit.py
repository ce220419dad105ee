"""`palm-ds resize` from a checkout: `python tools/convert_ckpt/edit.py --help` has examples."""

from palm_ds.cli.resize import COMMAND

main = COMMAND.main

if __name__ == "__main__":
    COMMAND.start()
