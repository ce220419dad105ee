"""Predicts the memory and the step time of a run on GPUs that are not there (`--plan`).

    cluster.py    "64 x H100, 400 Gb/s" to numbers
    work.py       what a model and a step consist of
    memory.py     bytes of a GPU: states, DeepSpeed's buffers, activations
    step_time.py  seconds of a step: products, optimizer, communication
    table.py      the lines that are printed

Everything here is arithmetic over data sheets and assumptions, never a measurement, and says so.
"""
