"""The rank of this process and how many there are, as palm_ds understands its launcher."""

import sys

from palm_ds.runtime.processes import launch_env

line = f"{launch_env.rank_of_launcher()} of {launch_env.launched_processes()}\n"
sys.stdout.write(line)  # at once: two processes write
