"""`palm-ds show` from a checkout: `python tools/convert_ckpt/show.py --help` has examples."""

from palm_ds.cli.show import COMMAND

main = COMMAND.main

if __name__ == "__main__":
    COMMAND.start()
