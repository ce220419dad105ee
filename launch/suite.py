"""Fine-tune on many data sets with several seeds each; one table of medians and spread.

    python launch/suite.py SUITE.yaml --deepspeed_config ds_configs/zero1_bf16.json --out runs/glue
    python launch/suite.py SUITE.yaml --deepspeed_config ds_configs/cpu.json --out DIR --jobs 2 \\
        optimizer.lr=3e-5

Each run is a launch/finetune.py of its own: one a device, or --jobs at a time on CPU. The same
command goes on where it was interrupted and tries again what failed (exit code 1).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from palm_ds.children import interrupt, launcher_of
from palm_ds.errors import UserError, exit_on_user_error

FINETUNE = Path(__file__).resolve().with_name("finetune.py")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", help="data sets, recipes, seeds: a YAML file (docs/api.md)")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="for all recipes")
    parser.add_argument(
        "--deepspeed_config", required=True, metavar="FILE", help="how the machine computes it"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="of all runs and the table")
    parser.add_argument(
        "--jobs", type=int, default=0, metavar="N", help="runs at a time on CPU; default: 1"
    )
    parser.add_argument(
        "--launcher", default="", help='of one run over all devices, as "deepspeed --num_gpus 8"'
    )
    parser.add_argument("--table", action="store_true", help="show the table; run nothing")
    return parser.parse_intermixed_args()


def main() -> int:
    args = arguments()
    with exit_on_user_error():
        wrong = [text for text in args.overrides if "=" not in text]
        if wrong:
            raise UserError(f"override {wrong[0]!r}: expected key=value")
        launcher = launcher_of(args.launcher)
        from palm_ds.machine import read_machine
        from palm_ds.suite import Member, compare, members, read_suite, run_all

        read_machine(args.deepspeed_config)
        out = Path(args.out)
        found = members(read_suite(args.suite, args.overrides), out)

        def command(member: Member) -> list[str]:
            machine = ["--deepspeed_config", args.deepspeed_config]
            folder = ["--run_dir", str(member.folder)]
            return [*launcher, str(FINETUNE), str(member.file), *machine, *folder]

        failed: dict[str, str] = {}
        if not args.table:
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, interrupt)
            try:
                failed = run_all(found, command, slots_of(args.jobs, bool(args.launcher)), say)
            except KeyboardInterrupt:
                say("stopped; the same command goes on from here")
                return 130
        say(compare(found, failed, out))
        say(f"also in {out / 'suite.md'} and suite.json")
        return 1 if failed else 0
    return 2


def slots_of(jobs: int, shared: bool) -> list[dict[str, str]]:
    """The environment of each run that may go on at a time: a device of its own, on CPU a share of
    the cores; one slot where a launcher gives each run all devices."""
    from palm_ds.processes import accelerator

    device = accelerator()
    if jobs < 0:
        raise UserError(f"--jobs {jobs}: expected a number of runs")
    if shared:
        return [{}]
    if device.device_name() == "cpu":
        jobs = jobs or 1
        cores = str(max((os.cpu_count() or 1) // jobs, 1))
        return [{} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": cores}] * jobs
    if jobs:
        raise UserError("--jobs: is for CPU; here one run goes on at a time on each device")
    names = device.visible_devices_envs()
    visible = os.environ.get(names[0], "")
    ids = visible.split(",") if visible else [str(i) for i in range(device.device_count())]
    return [dict.fromkeys(names, each) for each in ids]


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
