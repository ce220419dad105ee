"""`palm-ds adapt`"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palm_ds.cli.command import CONTINUES, Command, hint_next, typed
from palm_ds.cli.options import add_fields, local_path, options_of
from palm_ds.cli.output import console_of, show, summarize
from palm_ds.common.errors import UserError
from palm_ds.common.messages import counted

if TYPE_CHECKING:
    import torch

    from palm_ds.corpus.store import Corpus
    from palm_ds.inference.held_out_loss import MaskedLMLoss
    from palm_ds.inference.trained_model import TrainedModel
    from palm_ds.train.recipe.recipe import Recipe

RECIPE = "adapt.yaml"
_INPUT, _TEXT = ("text_field", "text_documents"), ("language", "lower")
"""The options of `palm-ds prepare` that it has too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from palm_ds.corpus.options import DOCUMENTS, LANGUAGES, InputOptions, TextOptions
    from palm_ds.train.recipe.adaptation import AdaptOptions

    add = parser.add_argument
    add("model", metavar="MODEL", help="a Hugging Face folder, a run, or a name on the hub")
    texts = "files, folders, patterns, URLs, or one prepared corpus"
    add("texts", nargs="+", metavar="TEXTS", help=texts)
    add("--out", type=local_path, required=True, metavar="DIR", help="folder for all output")
    general = "general text to mix in, so that the encoder forgets less"
    add("--general", nargs="+", metavar="TEXTS", help=general)
    add_fields(parser, AdaptOptions, metavar={"general_share": "P", "steps": "N", "lr": "X"})
    machine = "a DeepSpeed file (zero1_bf16 with a GPU, else cpu)"
    add("--deepspeed_config", metavar="FILE", help=machine)
    only = "prepare the texts, write the recipe, and stop"
    add("--recipe_only", action="store_true", help=only)
    reading = parser.add_argument_group(
        "reading, as in `palm-ds prepare`; for its other options, prepare the corpus with it first"
    )
    metavar = {"text_field": "NAME", "text_documents": "END", "language": "L"}
    choices = {"text_documents": DOCUMENTS, "language": LANGUAGES}
    add_fields(reading, InputOptions, *_INPUT, metavar=metavar, choices=choices)
    add_fields(reading, TextOptions, *_TEXT, metavar=metavar, choices=choices)
    reading.add_argument(
        "--workers", type=int, metavar="N", help="processes that prepare texts (1)"
    )


def run(args: argparse.Namespace) -> int:
    from palm_ds.cli.inference_options import start_processes
    from palm_ds.inference.trained_model import TrainedModel
    from palm_ds.train.recipe.adaptation import AdaptOptions, adaptation_recipe
    from palm_ds.train.recipe.recipe import make_recipe
    from palm_ds.weights.convert.source import locate

    options = options_of(AdaptOptions, args)
    _check(args)
    _, device = start_processes("")
    ds_config = _ds_config(args.deepspeed_config, device)
    model, _ = locate(Path(args.model))
    start = TrainedModel.open(model, device=device)
    start.check_reads_texts()
    own = _corpus(args, start, args.texts, "corpus")
    general = _corpus(args, start, args.general, "general") if args.general else None
    config = start.contents.config
    values = adaptation_recipe(str(model), config, own, general, options)
    recipe = make_recipe(values, str(args.out / RECIPE))
    _write_recipe(args, values)
    if args.recipe_only:
        recipe, out = typed(args.out / RECIPE), typed(args.out)
        command = f"palm-ds pretrain {recipe} --deepspeed_config FILE --run_dir {out}"
        line = f"written to {args.out / RECIPE}; train it with `{command}`"
        summarize(args, {"recipe": args.out / RECIPE}, line)
        return 0
    return _train_and_compare(args, recipe, ds_config, _named(own, general), start)


def _check(args: argparse.Namespace) -> None:
    """Raises UserError if the command cannot run here, or would write into something else."""
    from palm_ds.runtime.processes.launch_env import launched_processes

    if launched_processes() > 1:
        raise UserError(
            "palm-ds adapt: runs in one process; give --recipe_only, then train the recipe in "
            "several with palm-ds pretrain"
        )
    if args.out.resolve() == Path(args.model).resolve():
        raise UserError(f"--out {args.out}: is the model itself; choose another folder")
    if (args.out / "recipe.yaml").is_file() and not (args.out / RECIPE).is_file():
        raise UserError(f"--out {args.out}: holds another run; choose another folder")
    if args.general_share is not None and not args.general:
        raise UserError("--general_share: needs --general, the text that is mixed in")
    reading = [f"--{name}" for name in (*_INPUT, *_TEXT, "workers") if getattr(args, name)]
    if reading and all(map(_is_prepared, filter(None, (args.texts, args.general)))):
        raise UserError(
            f"{', '.join(reading)}: a prepared corpus is taken as it is; remove it, or give texts"
        )


def _ds_config(given: str | None, device: torch.device) -> str:
    """The DeepSpeed file: the one given, or a shipped one for this device. Raises UserError."""
    from palm_ds.cli.shipped import ds_configs, find_ds_config

    if given:
        return find_ds_config(given)
    return str(ds_configs()["cpu.json" if device.type == "cpu" else "zero1_bf16.json"])


def _corpus(
    args: argparse.Namespace, start: TrainedModel, texts: Sequence[str], name: str
) -> Corpus:
    """The texts with the model's tokens: a prepared corpus as it is, others in DIR/`name`. Raises
    UserError."""
    from palm_ds.corpus.options import InputOptions, TextOptions
    from palm_ds.corpus.prepare import PrepareOptions, prepare
    from palm_ds.corpus.store import open_corpus

    if _is_prepared(texts):
        return open_corpus(texts[0])
    lower = args.lower or (start.text_tokenizer.lower and not start.tokenizer.lower)
    options = PrepareOptions(
        text=options_of(TextOptions, args, lower=lower or None),
        input=options_of(InputOptions, args),
        tokenizer=str(start.contents.tokenizer),
        workers=args.workers or 1,
    )
    prepare(args.out / name, texts, options, console=console_of(args))
    return open_corpus(args.out / name)


def _is_prepared(texts: Sequence[str]) -> bool:
    """Whether they are one prepared corpus."""
    from palm_ds.corpus.manifest import NAME

    return len(texts) == 1 and (Path(texts[0]) / NAME).is_file()


def _write_recipe(args: argparse.Namespace, values: Mapping[str, Any]) -> None:
    """Write DIR/adapt.yaml. Raises UserError if another one is there."""
    import yaml

    from palm_ds.common.atomic import write_file_atomically
    from palm_ds.common.config import differences, read_yaml
    from palm_ds.common.files import make_folder

    file = args.out / RECIPE
    if file.is_file():
        if changes := differences(read_yaml(file), dict(values)):
            raise UserError(
                f"{file}: is not the recipe of this command ({changes[0]}); train it with `palm-ds "
                f"pretrain {file} --run_dir {args.out}`, or choose another folder"
            )
        return
    make_folder(args.out)
    head = "# Made by palm-ds adapt. To change it: a copy, and palm-ds pretrain.\n"
    text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
    write_file_atomically(file, head + text)


def _named(own: Corpus, general: Corpus | None) -> dict[str, Corpus]:
    return {"own text": own} | ({"general text": general} if general else {})


def _train_and_compare(
    args: argparse.Namespace,
    recipe: Recipe,
    ds_config: str,
    corpora: Mapping[str, Corpus],
    start: TrainedModel,
) -> int:
    from palm_ds.inference.trained_model import TrainedModel, examples
    from palm_ds.runtime.deepspeed.ds_config import read_ds_config
    from palm_ds.runtime.processes.signals import stop_signals
    from palm_ds.train.setup.run_folder import RunSpec
    from palm_ds.train.train import train

    before: dict[str, MaskedLMLoss] = {}
    if start.contents.masked_lm_heads:
        before = _losses(start, recipe, corpora)
    else:
        line = f"{args.model}: has no masked-LM head; a new one is trained"
        console_of(args).print(line)
    run = RunSpec(recipe=recipe, ds_config=read_ds_config(ds_config), folder=args.out)
    console = console_of(args, width=140) if args.json or args.quiet else None
    with stop_signals(starting=True) as flag:
        code = train(run, flag=flag, examples=examples, console=console)
    if code:
        return code
    trained = TrainedModel.open(args.out, device=start.device)
    _report(args, recipe, before, _losses(trained, recipe, corpora))
    out = typed(args.out)
    hint_next(
        f'palm-ds fill-mask {out} "A text with [MASK] in it."',
        f"palm-ds finetune RECIPE --deepspeed_config FILE --init_from {out}",
    )
    return 0


def _losses(
    model: TrainedModel, recipe: Recipe, corpora: Mapping[str, Corpus]
) -> dict[str, MaskedLMLoss]:
    """The held-out masked-token loss of a model on each corpus."""
    from palm_ds.inference.held_out_loss import masked_lm_loss

    how = {"held_out": recipe.held_out, "length": recipe.length}
    return {name: masked_lm_loss(model, corpus, **how) for name, corpus in corpora.items()}


def _report(
    args: argparse.Namespace,
    recipe: Recipe,
    before: Mapping[str, MaskedLMLoss],
    after: Mapping[str, MaskedLMLoss],
) -> None:
    from rich.table import Table

    table = Table("held-out masked-token loss", "before", "after", "tokens")
    losses = {}
    for name, loss in after.items():
        was = before[name].nats if before else None
        table.add_row(
            name, "-" if was is None else f"{was:.4f}", f"{loss.nats:.4f}", f"{loss.tokens:,}"
        )
        losses[name] = {"before": was, "after": loss.nats, "tokens": loss.tokens}
    steps = recipe.curriculum.steps
    hf = args.out / "hf"
    place = hf if hf.is_dir() else args.out / "weights"  # transformers lacks some encoders
    record = {"out": args.out, "model": place, "steps": steps, "losses": losses}
    show(args, record, table, f"finished: {counted(steps, 'step')}; the model is in {place}")


COMMAND = Command(
    name="adapt",
    summary="Continue pretraining an encoder on your own text, and compare the losses.",
    usage="MODEL TEXTS... --out DIR [--general TEXTS...] [options]",
    examples="""
palm-ds adapt models/encoder texts/ --out runs/mine --language en
palm-ds adapt answerdotai/ModernBERT-base law/*.jsonl --general wiki.jsonl --out runs/law
palm-ds adapt runs/base data/mine --out runs/mine --steps 500 --lr 1e-4   # a prepared corpus
""",
    notes="""
The model's own tokenizer prepares the texts; steps, batch and length follow from them, and
DIR/adapt.yaml is the recipe. The same command again continues. DIR/hf has the family of MODEL.""",
    interrupted=CONTINUES,
    add_arguments=add_arguments,
    run=run,
)

if __name__ == "__main__":
    COMMAND.start()
