"""`palm-ds convert` from a checkout: `python tools/convert_ckpt/convert.py --help` has examples."""

from palm_ds.cli.convert import COMMAND

main = COMMAND.main

if __name__ == "__main__":
    COMMAND.start()
