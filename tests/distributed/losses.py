"""Losses of the same steps under each ZeRO stage, precision, accumulation and dropout."""

from tiny import arguments, make_engine, plain_loop, train, write

from palm_ds.runtime.processes.processes import leave

options = arguments(steps=8, runs="0:fp32:4", dropout=0.0)
steps = range(options.steps)
results = {"plain": plain_loop(steps)}  # before ZeRO 3: it replaces F.linear everywhere
if options.dropout:
    results["dropout"] = plain_loop(steps, dropout=options.dropout)
engine = None
for run in options.runs.split(","):
    stage, precision, micro, *dropped = run.split(":")
    dropout = options.dropout if dropped else 0.0
    engine = make_engine(int(stage), precision, int(micro), dropout, scale_power=8)
    results[run] = train(engine, steps)
assert engine is not None
results["world"] = [engine.world]
write(options.out, engine.rank, results)
engine.close()
leave(0)
