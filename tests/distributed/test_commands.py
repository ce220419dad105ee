"""The complete command, as users start it: one curve across interruptions, exact resume, clean
ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from palm_ds.common.errors import STOPPED
from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.weights.model_folder import open_model
from tests.helpers import warm_python
from tests.helpers.sampling import only
from tests.helpers.small_corpus import write_small_corpus
from tests.helpers.warm_python import Program

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent.parent
PRETRAIN = str(ROOT / "launch" / "pretrain.py")
PACED = str(ROOT / "tests" / "distributed" / "paced.py")
PLAIN_LOOP = str(ROOT / "tests" / "launch" / "plain_loop.py")
GOLDEN = ROOT / "tests" / "golden" / "losses.json"
SECONDS = 300
"""For a start and some steps, which take 20 where two other tests run."""
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
MASKS, ORDER, APART = "knowledge_masking", "sentence_reordering", "sentence_distance"


def recipe_values(corpus: Path, **changes: Any) -> dict[str, Any]:
    return {
        "backbone": {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 2,
            "max_positions": 64,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "length": 64,
        "batch": "8 rows",
        "optimizer": {"lr": 2.0e-3, "weight_decay": 0.01},
        "schedule": {"kind": "linear", "warmup": 4},
        "sources": {"text": {"corpus": str(corpus)}},
        "held_out": 0.2,
        "tasks": {MASKS: {"source": "text"}, ORDER: {"source": "text"}, APART: {"source": "text"}},
        "stages": [
            {MASKS: 10},
            {MASKS: 3, f"{ORDER} + {MASKS}": 7},
            {f"{APART} + {MASKS}": 5, f"{ORDER} + {MASKS}": 5, "mix": "step"},
        ],
        "evaluate": {"examples": 20},
        "save": {"every": 5, "keep": 3},
        "log": {"every": 1},
        "export_onnx": [],
        **changes,
    }


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_small_corpus(folder / "corpus")
    return folder / "corpus"


def write_machine(folder: Path, **changes: Any) -> Path:
    path = folder / f"machine-{len(list(folder.glob('machine-*')))}.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}, **changes}))
    return path


def write_recipe(folder: Path, corpus: Path, **changes: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_values(corpus, **changes)))
    return path


def records(run: Path, kind: str = "step") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses(run: Path) -> list[dict[str, float]]:
    return [record["loss"] for record in records(run)]


def largest_difference(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    """Relative, over all steps and tasks; the same tasks must have losses in the same steps."""
    assert [set(each) for each in ours] == [set(each) for each in theirs]
    return max(
        abs(a[task] - b[task]) / abs(b[task])
        for a, b in zip(ours, theirs, strict=True)
        for task in b
    )


def plain(folder: Path, recipe: Path) -> list[dict[str, float]]:
    out = folder / "plain.json"
    environment = {"PYTHONPATH": str(ROOT)}
    done = warm_python.run([PLAIN_LOOP, recipe, out], env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


RUNS = {  # name: (processes, launcher, ZeRO stage, rows of a micro-batch, precision)
    "2 processes, ZeRO 0": (2, "fork", 0, 4, "fp32"),
    "2 processes, ZeRO 2, accumulation 4": (2, "fork", 2, 1, "fp32"),
    "2 processes, ZeRO 3": (2, "fork", 3, 2, "fp32"),
    "1 process, accumulation 4": (1, "python", 0, 2, "fp32"),
    "1 process, ZeRO 3": (1, "python", 3, 8, "fp32"),
    "bf16, ZeRO 1": (2, "fork", 1, 4, "bf16"),
    "bf16, ZeRO 2": (2, "fork", 2, 2, "bf16"),
    "bf16, ZeRO 3": (2, "fork", 3, 4, "bf16"),
}


def curve(run_program, tmp_path, recipe, name) -> list[dict[str, float]]:
    processes, launcher, stage, micro, precision = RUNS[name]
    changes = {} if precision == "fp32" else {precision: {"enabled": True}}
    ds_config = write_machine(
        tmp_path,
        zero_optimization={"stage": stage},
        train_micro_batch_size_per_gpu=micro,
        **changes,
    )
    run = tmp_path / name.replace(" ", "-")
    run_program(
        PRETRAIN,
        recipe,
        "--deepspeed_config",
        ds_config,
        "--run_dir",
        run,
        processes=processes,
        launcher=launcher,
    )
    return losses(run)


SOME = ("2 processes, ZeRO 2, accumulation 4", "bf16, ZeRO 3")
ON_TEXT = {
    "small": (
        *SOME,
        "2 processes, ZeRO 0",
        "1 process, accumulation 4",
        "2 processes, ZeRO 3",
        "1 process, ZeRO 3",
    ),
    "en": (
        "2 processes, ZeRO 0",
        "2 processes, ZeRO 3",
        "1 process, accumulation 4",
        "bf16, ZeRO 2",
    ),
    "zh": ("2 processes, ZeRO 2, accumulation 4", "1 process, ZeRO 3", "bf16, ZeRO 1"),
}
"""Other tests of this folder train under ZeRO 1."""
SHORT_STAGES = [
    {MASKS: 4},
    {MASKS: 1, f"{ORDER} + {MASKS}": 3},
    {f"{APART} + {MASKS}": 2, f"{ORDER} + {MASKS}": 2, "mix": "step"},
]


def test_one_recipe_is_one_loss_curve(run_program, tmp_path, small) -> None:
    one_curve("small", small, SOME, run_program, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("text", ON_TEXT)
def test_on_real_text_too(text, request, run_program, tmp_path, small) -> None:
    corpus = small if text == "small" else request.getfixturevalue(f"shared_{text}").path
    one_curve(text, corpus, ON_TEXT[text], run_program, tmp_path)


def one_curve(text: str, corpus: Path, names: Sequence[str], run_program, tmp_path) -> None:
    """12 steps with dropout against a plain torch loop: fp32 to 1e-5, bf16 to 2e-2 (relative)."""
    changes: dict[str, Any] = {"backbone": recipe_values(corpus)["backbone"] | DROPOUT}
    changes |= {"stages": SHORT_STAGES}
    changes |= {"length": 64} if text == "small" else {"optimizer": {"lr": 5.0e-4}}
    recipe = write_recipe(tmp_path, corpus, **changes)
    expected = plain(tmp_path, recipe)
    for name in names:
        found = curve(run_program, tmp_path, recipe, name)
        assert len(found) == 12
        bound = 1e-5 if RUNS[name][-1] == "fp32" else 2e-2
        assert largest_difference(found, expected) < bound, name


def start(
    recipe: Path,
    ds_config: Path,
    run: Path,
    *more: str,
    path: str = str(ROOT),
    slowly: bool = False,
) -> Program:
    """The command as a single process in its own session."""
    words = [PRETRAIN, recipe, "--deepspeed_config", ds_config, "--run_dir", run, *more]
    return Program([PACED, *words] if slowly else words, env={"PYTHONPATH": path})


def finish(process: Program, code: int = 0) -> str:
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == code, output[-4000:]
    return output


def wait_for(
    run: Path,
    lines: int,
    process: Program | subprocess.Popen[bytes],
    output: Callable[[], str],
) -> None:
    """Wait until that many steps are logged."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if (run / "metrics.jsonl").exists() and len(records(run)) >= lines:
            return
        time.sleep(0.02)
    pytest.fail(f"no {lines} steps, code {process.poll()}: {output()[-4000:]}")


@pytest.fixture(scope="module")
def uninterrupted(small, tmp_path_factory) -> tuple[Path, Path, Path]:
    """(recipe, machine, run folder) of a whole run, dropout on."""
    folder = tmp_path_factory.mktemp("whole")
    backbone = recipe_values(small)["backbone"] | DROPOUT
    recipe = write_recipe(folder, small, backbone=backbone)
    ds_config = write_machine(folder)
    finish(start(recipe, ds_config, folder / "run"))
    return recipe, ds_config, folder / "run"


def test_killed_damaged_and_resumed_every_later_loss_is_the_same(uninterrupted, tmp_path) -> None:
    recipe, ds_config, whole = uninterrupted
    run = tmp_path / "run"
    for lines in (7, 12):
        process = start(recipe, ds_config, run, slowly=True)
        wait_for(run, lines, process, process.output)
        process.kill()
        finish(process, -signal.SIGKILL)
    newest = sorted((run / "checkpoints").glob("step_????????"))[-1]
    shard = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    output = finish(start(recipe, ds_config, run, "--profile", "2"))
    assert "checksum" in output
    (trace,) = (run / "profile").iterdir()
    assert f"{trace} (open it in ui.perfetto.dev)" in output  # and it changes no loss
    assert losses(run) == losses(whole)
    assert records(run, "evaluation")[-1]["scores"] == records(whole, "evaluation")[-1]["scores"]
    for name in ("weights/weights.safetensors", "hf/model.safetensors"):
        assert (run / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("number", only([signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]))
def test_a_stopped_run_saves_and_resumes_later(uninterrupted, tmp_path, number) -> None:
    recipe, ds_config, whole = uninterrupted
    run = tmp_path / "run"
    process = start(recipe, ds_config, run, slowly=True)
    wait_for(run, 3, process, process.output)
    process.send_signal(number)
    output = finish(process, STOPPED)
    assert "is saved; run the same command again to continue" in output
    done = records(run)[-1]["step"]
    assert done < 30
    assert (run / "checkpoints" / f"step_{done:08}" / "manifest.json").exists()
    assert f"resumes from step {done}" in finish(start(recipe, ds_config, run))
    assert losses(run) == losses(whole)


def test_a_signal_to_all_processes_stops_the_run(uninterrupted, tmp_path) -> None:
    """Launchers send it to the processes that build batches too."""
    recipe, _, whole = uninterrupted
    ds_config = write_machine(tmp_path, palm_ds={"data_workers": 2})
    run = tmp_path / "run"
    process = start(recipe, ds_config, run, slowly=True)
    wait_for(run, 3, process, process.output)
    makers = psutil.Process(process.pid).children(recursive=True)
    assert len(makers) >= 2
    for one in [psutil.Process(process.pid), *makers]:
        one.send_signal(signal.SIGTERM)
    assert "run the same command again to continue" in finish(process, STOPPED)
    finish(start(recipe, ds_config, run))
    assert losses(run) == losses(whole)


def test_a_finished_run_has_all_its_files(uninterrupted) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    from palm_ds.data.tasks.example import build_input, collate
    from palm_ds.runtime.deepspeed.ds_config import read_ds_config
    from palm_ds.train.recipe.recipe import read_recipe
    from palm_ds.train.setup.build import build_model
    from palm_ds.train.setup.sources import open_data
    from palm_ds.weights.weights_folder import load_weights

    recipe_file, ds_config, run = uninterrupted
    left = {path.name for path in run.iterdir()}
    assert left >= {
        *("recipe.yaml", "ds_config.json", "environment.json", "metrics.jsonl", "report.html"),
        *("checkpoints", "weights", "hf", "tensorboard"),
    }
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    # step 25 is less than 10 steps older than the newest and does not count
    assert kept == [f"step_{step:08}" for step in (15, 20, 25, 30)]
    recipe = read_recipe(recipe_file)
    data = open_data(recipe)
    (_, source, _) = data.train["text"][0]
    model = build_model(
        recipe, read_ds_config(ds_config), data.vocabulary, device=torch.device("cpu")
    ).eval()
    load_weights(open_model(run / "weights"), model)
    example = build_input([source.read(0, 30)], data.vocabulary)
    batch = collate([[(example, 0)]], length=64, pad=data.vocabulary.pad)
    with torch.no_grad():
        ours = model.backbone(batch)[0, : len(example)]
        theirs = AutoModel.from_pretrained(run / "hf").eval()(
            input_ids=torch.from_numpy(example.input_ids[None])
        )
    assert torch.allclose(ours, theirs.last_hidden_state[0], atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(run / "hf")
    assert tokenizer("w1 w2").input_ids == [
        data.vocabulary.cls,
        *tokenizer.convert_tokens_to_ids(["w1", "w2"]),
        data.vocabulary.sep,
    ]


def test_the_folder_of_a_different_recipe_is_refused(uninterrupted) -> None:
    recipe, ds_config, run = uninterrupted
    output = finish(start(recipe, ds_config, run, "optimizer.lr=0.5"), 2)
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "optimizer.lr: 0.002 -> 0.5" in line  # the run has finished
    assert "Traceback" not in output


def test_check_and_print_config_train_nothing(uninterrupted, tmp_path) -> None:
    recipe, ds_config, _ = uninterrupted
    output = finish(start(recipe, ds_config, tmp_path / "run", "--plan", "2 x H100, 40 %"))
    assert "nothing was trained" in output
    assert "plan for 2 x H100, 8 per host: PREDICTED, not measured; assumes 40 % of" in output
    assert "of 80 | " in output  # GB
    wanted = ["hosts: ", "disk: ", "memory of a process: ", "speed: the slowest is rank 0 on "]
    for line in wanted:
        assert f"\n{line}" in output
    assert "B, copied to host memory and written while training continues" in output
    assert "stage 3" in output
    output = finish(start(recipe, ds_config, tmp_path / "run", "--print_config"))
    assert "train_batch_size" in output
    assert "mask_rate: 0.8" in output
    assert not (tmp_path / "run").exists()


def test_weights_of_one_run_start_another(uninterrupted, tmp_path) -> None:
    """A warm start loads only weights: the schedule restarts, the first loss is lower."""
    recipe, ds_config, whole = uninterrupted
    run = tmp_path / "run"
    folded = start(recipe, ds_config, run, "--init_from", str(whole / "hf"), "--check")
    assert "its weights/ has them" in finish(folded)  # hf/ has one task's embedding
    finish(start(recipe, ds_config, run, "--init_from", str(whole / "weights")))
    assert losses(run)[0][MASKS] < losses(whole)[0][MASKS] - 0.03
    assert records(run)[0]["lr"] == records(whole)[0]["lr"]


def test_a_non_finite_loss_stops_the_run_and_ruined_weights_are_not_saved(small, tmp_path) -> None:
    """The first update ruins them, finite as they are."""
    recipe = write_recipe(
        tmp_path, small, optimizer={"lr": 1.0e30, "clip": 0.0}, stages=[{MASKS: 9}]
    )
    run = tmp_path / "run"
    output = finish(start(recipe, write_machine(tmp_path), run), 3)
    assert "was not finite" in output
    assert "The weights are not good" in output and "unaffected" not in output
    assert not (run / "hf").exists() and not (run / "checkpoints").exists()


BOMB = """
from dataclasses import dataclass
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.pretrain.knowledge_masking import KnowledgeMasking

class Explosive(MaskedLMHead):
    def forward(self, rows, targets):
        output = super().forward(rows, targets)
        self.seen = getattr(self, "seen", 0) + self.training
        factor = float("inf") if self.training and self.seen == 9 else 1.0
        return output._replace(loss_sum=output.loss_sum * factor)

@dataclass(frozen=True, kw_only=True)
class Bomb(KnowledgeMasking):
    def head(self, backbone):
        return Explosive(backbone)
"""


@pytest.mark.parametrize(("policy", "applied"), [("skip", 11), ("rollback", 8)])
def test_one_bad_step_is_skipped_or_rolled_back(small, tmp_path, policy, applied) -> None:
    """Step 9 explodes. `skip` leaves it out; `rollback` returns to the checkpoint of step 5 and
    continues after step 9, so that steps 6 to 9 have no effect."""
    (tmp_path / "bombs.py").write_text(BOMB)
    recipe = write_recipe(
        tmp_path,
        small,
        tasks={MASKS: {"source": "text", "kind": "bombs.Bomb"}},
        stages=[{MASKS: 12}],
        nonfinite=policy,
    )
    ds_config = write_machine(tmp_path, train_micro_batch_size_per_gpu=8)
    run = tmp_path / "run"
    finish(start(recipe, ds_config, run, path=f"{ROOT}:{tmp_path}"))
    assert [event["step"] for event in records(run, "event") if event["event"] == "rollback"] == (
        [9] if policy == "rollback" else []
    )
    assert (run / "hf" / "model.safetensors").exists()
    bad = [record["step"] for record in records(run) if record["loss"][MASKS] is None]
    assert bad == [9]
    assert records(run)[-1]["step"] == 12
    import torch
    from safetensors.torch import load_file

    weights = load_file(run / "weights" / "weights.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    saved = checkpoint.open_published(run / "checkpoints" / "step_00000012")
    assert set(saved.parameters.values()) == {applied}


def test_wrong_arguments_are_one_line(uninterrupted, tmp_path) -> None:
    recipe, ds_config, _ = uninterrupted
    cases = {
        ("optimizer.lrr=1",): 'did you mean "lr"',
        ("nonsense",): "expected key=value",
        ("sources.text.corpus=nowhere",): "corpus nowhere: no such folder",
        ("--init_from", "nowhere"): "nowhere",
    }
    for more, message in cases.items():
        output = finish(start(recipe, ds_config, tmp_path / "run", *more), 2)
        (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
        assert message in line
        assert "Traceback" not in output


def test_golden_losses(uninterrupted) -> None:
    """The recorded losses: bit for bit those of a recorded processor (matrix products round
    differently on others), and to 1e-4 where this one is not recorded.

    A change that should alter them says so and records them again, which drops those of other
    processors: PALM_GOLDEN=write pytest ... PALM_GOLDEN=add only adds this processor's."""
    import torch

    version = torch.__version__.split("+")[0]
    processor = f"{torch.backends.cpu.get_cpu_capability()} {_processor()}"
    found = losses(uninterrupted[2])
    golden = json.loads(GOLDEN.read_text())
    if mode := os.environ.get("PALM_GOLDEN"):  # say in `moved` why they do
        others = golden["losses"] if mode == "add" else {}
        golden |= {"torch": version, "losses": {**others, processor: found}}
        GOLDEN.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n")
    recorded = golden["losses"]
    if golden["torch"] == version and processor in recorded:
        assert found == recorded[processor]
    else:
        assert min(largest_difference(found, each) for each in recorded.values()) < 1e-4


def _processor() -> str:
    """Maker, family and model, as Linux names them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    values = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    return " ".join(values.get(name, "?") for name in ("vendor_id", "cpu family", "model"))


def test_losses_decrease(uninterrupted) -> None:
    first, last = losses(uninterrupted[2])[0], losses(uninterrupted[2])[9]
    assert last[MASKS] < first[MASKS]
    rates = [record["lr"] for record in records(uninterrupted[2])]
    assert np.argmax(rates) in (3, 4)
