"""Resume at step `first` from a checkpoint of other processes and another ZeRO stage, train to step
`last` and save: each of --runs (folder:stage:precision) in its own folder."""

from pathlib import Path

from tiny import arguments, make_engine, train, write

from palm_ds.runtime.processes.processes import leave

options = arguments(folder="", runs="", first=0, last=0)
results = {}
engine = None
for run in options.runs.split(","):
    name, stage, precision = run.split(":")
    folder = Path(options.folder) / name
    engine = make_engine(int(stage), precision, micro=4)
    state = engine.load(folder)
    assert (state or {"step": 0})["step"] == options.first, state
    results[name] = train(engine, range(options.first, options.last))
    engine.save(folder, {"step": options.last}, step=options.last)
assert engine is not None
write(options.out, engine.rank, results)
engine.close()
leave(0)
