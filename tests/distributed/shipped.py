"""A few steps, a save and a resume with each file in ds_configs."""

from pathlib import Path

from deepspeed.accelerator import get_accelerator
from tiny import OPTIMIZER, ROWS, arguments, make_model, train, write

from palm_ds.engine import Engine
from palm_ds.runtime.deepspeed.ds_config import read_ds_config
from palm_ds.runtime.processes.processes import leave

options = arguments()
get_accelerator().is_fp16_supported = lambda: True  # type: ignore[union-attr]
files = (Path(__file__).resolve().parents[2] / "ds_configs").glob("*.json")
machines = sorted(
    map(read_ds_config, files), key=lambda ds_config: (ds_config.stage, ds_config.path)
)
results = {}
for ds_config in machines:

    def build() -> Engine:
        return Engine(make_model(), ds_config=ds_config, optimizer=OPTIMIZER, rows=ROWS, seed=1)  # noqa: B023

    name = Path(ds_config.path).stem
    folder = options.out.parent / name
    engine = build()
    train(engine, range(3))
    engine.save(folder, {}, step=3)
    losses = train(engine, range(3, 5))
    resumed = build()
    resumed.load(folder)
    again = train(resumed, range(3, 5))
    results[name] = [losses, again, resumed.skipped_steps]
write(options.out, resumed.rank, results)
resumed.close()
leave(0)
