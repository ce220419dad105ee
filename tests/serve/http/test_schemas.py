"""What /openapi.json promises is what the server does, tried by schemathesis.

    schemathesis run http://127.0.0.1:8080/openapi.json

draws bodies, headers and methods that the description allows or forbids, and compares every answer
with it: no 5xx, no undocumented status, type or form, nothing refused that it allows, nothing
accepted that it forbids, `Allow` with every 405.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from palm_ds.inference.embedder import EmbeddingSettings
from palm_ds.inference.embedding_files import EmbeddingJob, embed_files
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.serve.model_set import Served, open_set
from palm_ds.serve.served_model import ModelOptions
from tests.helpers.sampling import only
from tests.helpers.serving import listening, local

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("schemathesis") is None,  # to import it would take half a second
        reason="schemathesis is not installed: pip install 'palm_ds[test]'",
    ),
]

# Only the model knows how many numbers, tokens and ids it has, and only the task which texts it
# reads: 422 may then be the answer to what the description allows.
SETTINGS = """
[[operations]]
include-path = "/predict/{task}"
parameters = { task = "mood" }
checks.positive_data_acceptance.expected-statuses = ["2xx", "404", "422"]

[[operations]]
include-path = "/search"
checks.positive_data_acceptance.expected-statuses = ["2xx", "422"]

[[operations]]
include-path-regex = "^/(embed|embed_sparse|v1/embeddings|predict)$"
checks.positive_data_acceptance.expected-statuses = ["2xx", "404", "413", "422"]

[[operations]]
include-path-regex = "^/(reload|index)$"
checks.positive_data_acceptance.expected-statuses = ["2xx", "403"]
"""


@pytest.fixture
def url(tasks_run: Path, words_run: Path, tmp_path: Path) -> Iterator[str]:
    texts = tmp_path / "texts.txt"
    texts.write_text("good so good\nbad ?\n")
    job = EmbeddingJob(inputs=[str(texts)], output=tmp_path / "vectors.npy")
    embed_files(
        TrainedModel.open(tasks_run).embedder(EmbeddingSettings()), job, model=str(tasks_run)
    )
    models = {"tasks": tasks_run, "words": words_run}
    served = Served(models=models, options=ModelOptions(), index=job.output)
    with local(open_set(served), served) as server, listening(server.service) as found:
        yield found


@pytest.mark.parametrize("examples", only([3], [3, 20]))
def test_the_server_keeps_its_contract(url: str, examples: int, tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(SETTINGS)
    program = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    assert program is not None
    options = ["--seed", "1", "--max-examples", str(examples), "--no-color", "--warnings", "off"]
    done = subprocess.run(
        [program, "run", f"{url}/openapi.json", *options],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "19 selected / 19 total" in done.stdout
    assert "Coverage" in done.stdout and "Fuzzing" in done.stdout
