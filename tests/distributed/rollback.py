"""Save, continue, load the checkpoint into the same engine, and repeat the same steps."""

from pathlib import Path

from tiny import arguments, make_engine, train, write

from palm_ds.runtime.processes.processes import leave

options = arguments()
results = {}
for stage in (0, 1, 2, 3):
    folder = options.out.parent / f"stage{stage}"
    engine = make_engine(stage, dropout=0.1)
    train(engine, range(3))
    engine.save(Path(folder), {"step": 3}, step=3)
    first = train(engine, range(3, 6))
    assert engine.load(folder) == {"step": 3}
    again = train(engine, range(3, 6))
    results[stage] = again, first
write(options.out, engine.rank, results)
engine.close()
leave(0)
