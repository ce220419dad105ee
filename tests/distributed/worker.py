"""One function of a module of this folder, in each process that a launcher starts. Its result on
the first one is written as JSON.

    worker.py MODULE.FUNCTION '{"argument": "value"}' --out FILE
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from pathlib import Path

from palm_ds.runtime.processes.processes import leave, stop

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("function")
    parser.add_argument("values", type=json.loads)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--local_rank", help="some launchers give it")
    given = parser.parse_args()
    module, _, name = given.function.partition(".")
    function = getattr(importlib.import_module(f"tests.distributed.{module}"), name)
    result = function(**given.values)
    if os.environ.get("RANK", "0") == "0":
        given.out.write_text(json.dumps(result))
    stop()
    leave(0)
