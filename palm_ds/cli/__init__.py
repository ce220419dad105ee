"""The console command `palm-ds`: main.py, and one module per sub-command.

palm-ds pretrain ...                               palm_ds/cli/pretrain.py
python -m palm_ds.cli.pretrain ...                 the same
deepspeed --module palm_ds.cli.pretrain ...        the same, in many processes
python launch/pretrain.py ...                      the same, from a checkout
"""
