"""`palm-ds run`"""

from __future__ import annotations

import argparse

from palm_ds.cli.command import Command
from palm_ds.cli.options import options_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--restarts",
        type=int,
        metavar="N",
        help="give up after N restarts in a row without a new checkpoint (5)",
    )
    add(
        "--min_hosts",
        type=int,
        metavar="N",
        help="start only if N hosts answer (1); fewer are a failure",
    )
    add(
        "--silence",
        type=float,
        metavar="SECONDS",
        help="a host that does not answer for this long counts as lost (30)",
    )
    add("--ssh", metavar="COMMAND", help="command that reaches other hosts (ssh, with timeouts)")
    add("--agent", metavar="NAME", help=argparse.SUPPRESS)  # started by `palm-ds run` on each host
    add("--descriptor", type=int, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    if args.agent:
        from palm_ds.runtime.supervisor.agent import run_agent

        return run_agent(args.agent, args.descriptor)
    from palm_ds.runtime.supervisor.supervise import Supervision, supervise

    return supervise(args.command, options_of(Supervision, args))


COMMAND = Command(
    name="run",
    summary="Start a run, and start it again from its last checkpoint when something fails.",
    usage="[options] -- COMMAND ...",
    examples="""
palm-ds run -- deepspeed --num_gpus 8 launch/pretrain.py mine.yaml --deepspeed_config FILE
palm-ds run --min_hosts 2 -- deepspeed --hostfile HOSTS launch/pretrain.py mine.yaml ...
palm-ds run --restarts 0 -- palm-ds finetune mine.yaml --deepspeed_config cpu.json
""",
    notes="""
Starts again after a crash, a killed process, a hang and a lost host (with the hosts that answer);
not after a mistake (2), a loss that is not finite (3) or the end (0). SIGTERM, SIGUSR1 and Ctrl-C
save and exit with code 75. The exit code is that of the training processes, whatever the launcher
makes of it.""",
    add_arguments=add_arguments,
    run=run,
    wraps=True,
    results=False,
)

if __name__ == "__main__":
    COMMAND.start()
