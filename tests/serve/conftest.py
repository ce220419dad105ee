"""Small models that tests of the server share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.multi_task_model import Model
from palm_ds.weights.weights_folder import WeightsInfo, save_weights
from tests.helpers.saved_model import TASKS, save_model
from tests.helpers.text_tables import small_tokenizer


@pytest.fixture(scope="session")
def tasks_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a head of each of seven kinds."""
    folder = tmp_path_factory.mktemp("served") / "tasks"
    every = {name: dict(task) for name, task in TASKS.items()} | {
        "rank": {"kind": "ranking", "source": "pairs"},
        "chunks": {"kind": "tagging", "source": "words", "crf": True},
    }
    return save_model(folder, tuple(every), tasks=every)


@pytest.fixture(scope="session")
def words_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights with a masked-LM head and no task on rows."""
    folder = tmp_path_factory.mktemp("served") / "words"
    tokenizer = small_tokenizer()
    config = EncoderConfig(
        vocab_size=tokenizer.size, hidden_size=16, num_layers=2, num_heads=2, max_positions=64
    )
    torch.manual_seed(3)
    backbone = build_encoder(config)
    model = Model(backbone, {"masking": MaskedLMHead(backbone)}, {"masking": "masking"}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    info = WeightsInfo(backbone=config, task_ids={"masking": 0}, head_of={"masking": "masking"})
    save_weights(model, folder / "weights", info, tokenizer=tokenizer)
    return folder
