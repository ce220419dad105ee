"""What the processes of one machine find when they compare and measure one another."""

from pathlib import Path

from tiny import arguments, write

from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.processes import measure
from palm_ds.runtime.processes.processes import start, stop

options = arguments()
processes = start(make_ds_config({}))
mine = Path(options.out).parent / f"only_of_{processes.rank}"
mine.mkdir()
results = {
    "shared": measure.sees_shared_folder(processes, mine.parent),
    "rate": measure.all_reduce_rate(processes),
    "seconds": measure.product_seconds(processes),
    "clocks": measure.clocks(processes),
}
measure._SHARED_SECONDS = 0.2
results["apart"] = measure.sees_shared_folder(processes, mine)
results["left"] = sorted(path.name for path in mine.parent.rglob(".shared*"))
write(options.out, processes.rank, results)
stop()
