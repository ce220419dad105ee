"""Process 1 sleeps; how long does process 0 wait for it?"""

import os
import time

import torch
import torch.distributed as dist
from tiny import arguments, write

from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.processes.processes import start

options = arguments()
processes = start(make_ds_config({"palm_ds": {"timeout_minutes": 0.05}}))
groups = {"world": None, "group of DeepSpeed's making": dist.new_group()}
processes.barrier()
if processes.rank == 1:
    while not options.out.exists():  # torchrun ends this process when process 0 has failed
        time.sleep(0.1)
    os._exit(0)
results = {}
for name, group in groups.items():
    begun = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        results[name] = time.monotonic() - begun, type(error).__name__
write(options.out, processes.rank, results)
os._exit(0)  # nobody will join
