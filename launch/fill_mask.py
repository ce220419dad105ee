"""`palm-ds fill-mask` from a checkout: `python launch/fill_mask.py --help` has examples."""

from palm_ds.cli.fill_mask import COMMAND

main = COMMAND.main

if __name__ == "__main__":
    COMMAND.start()
