"""Train 8 steps and save after 4, in the foreground and in the background, or resume from the
latter; every run has its own folder. The checkpoint in the background exists after step 8 only."""

from pathlib import Path

from tiny import arguments, make_engine, train, write

from palm_ds.runtime.processes.processes import leave

options = arguments(folder="", runs="", resume=0)
results = {}
engine = None
for run in options.runs.split(","):
    stage, precision = run.split(":")
    folder = Path(options.folder) / run.replace(":", "-")
    engine = make_engine(int(stage), precision, micro=4, dropout=0.1)
    if options.resume:
        state = engine.load(folder)
        assert state == {"step": 4, "note": run}, state
    else:
        assert engine.load(folder) is None
        train(engine, range(4))
        state = {"step": 4, "note": run}
        foreground = engine.save(folder / "foreground", state, step=4)
        assert engine.start_save(folder, state, step=4)
    losses = train(engine, range(4, 8))
    norms = [engine.grad_norm, engine.loss_scale, engine.skipped_steps]
    weights = {k: v.double().sum().item() for k, v in engine.full_state_dict().items()}
    results[run] = [losses, norms, weights]
    if not options.resume:
        saved = engine.finish_save()
        manifests = [(found.path / "manifest.json").read_bytes() for found in (foreground, saved)]
        assert manifests[0] == manifests[1], run
assert engine is not None
write(options.out, engine.rank, results)
engine.close()
leave(0)
