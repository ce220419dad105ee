"""`palm-ds verify` from a checkout: `python tools/convert_ckpt/verify.py --help` has examples."""

from palm_ds.cli.verify import COMMAND

main = COMMAND.main

if __name__ == "__main__":
    COMMAND.start()
