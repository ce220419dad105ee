from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.config.meta import on_meta
from palm_ds.model.encoder.encoder import build_encoder

ROOT = Path(__file__).resolve().parents[3]
SIZES = dict(vocab_size=50, hidden_size=8, num_layers=1, num_heads=2, max_positions=16)


def test_shapes_without_values_or_random_numbers() -> None:
    config = EncoderConfig(**SIZES)
    state = torch.get_rng_state()
    with on_meta():
        shapes = build_encoder(config).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    made = build_encoder(config).state_dict()
    assert {name: x.shape for name, x in shapes.items()} == {n: x.shape for n, x in made.items()}
    assert {x.device.type for x in shapes.values()} == {"meta"}
    assert {x.device.type for x in made.values()} == {"cpu"}
    assert made["word.weight"].std() > 0 and nn.Linear(3, 3).weight.std() > 0


def test_torchs_compiler_is_not_imported() -> None:
    code = (
        "import sys\n"
        "from palm_ds.model.config.config import EncoderConfig\n"
        "from palm_ds.model.encoder.encoder import build_encoder\n"
        "from palm_ds.model.heads.heads import MaskedLMHead\n"
        "from palm_ds.model.config.meta import on_meta\n"
        f"config = EncoderConfig(**{SIZES})\n"
        "with on_meta(): MaskedLMHead(build_encoder(config))\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
