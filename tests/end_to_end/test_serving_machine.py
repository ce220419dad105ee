"""A machine that only serves: what training needs is not installed, and nothing asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.saved_model import save_model

ABSENT = (
    *("deepspeed", "mpi4py", "datasets", "matplotlib", "tensorboard", "rjieba", "opencc"),
    *("pytrec_eval", "peft", "pandas", "scipy", "sklearn", "sentence_transformers", "optuna"),
)
HIDING = f"""\
import importlib.machinery, sys

FINDER = importlib.machinery.PathFinder


class Hiding(FINDER):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {ABSENT!r} else FINDER.find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(FINDER)] = Hiding
"""
PROGRAM = """\
import asyncio, contextlib, io, sys
from pathlib import Path

import httpx

import palm_ds as palm
from palm_ds.cli.main import main
from palm_ds.common.errors import UserError
from palm_ds.runtime.deepspeed.deepspeed_import import import_deepspeed
from palm_ds.serve.http.app import make_app
from palm_ds.serve.limits import ServingLimits
from palm_ds.serve.model_set import Served, open_set
from palm_ds.serve.served_model import ModelOptions
from palm_ds.serve.service import Service

model = palm.load("run")
print(model.predict(["so good"], task="mood")["mood"][0]["label"])


def run(*words):
    with contextlib.redirect_stderr(sys.stdout):
        try:
            return main(list(words))
        except SystemExit as ended:
            return ended.code


for words in (
    ["embed", "run", "--input", "texts.txt", "--output", "vectors.npy", "--quiet"],
    ["predict", "run", "--input", "rows.tsv", "--output", "predictions", "--tasks", "mood"],
):
    assert not run(*words), words
served = Served(models={"run": Path("run")}, options=ModelOptions(), index=Path("vectors.npy"))
service = Service(open_set(served), served, ServingLimits())


async def ask():
    transport = httpx.ASGITransport(make_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answers = [
            await client.post("/predict/mood", json={"inputs": ["so good"]}),
            await client.post("/search", json={"query": "so good"}),
        ]
    return [answer.status_code for answer in answers]


print(asyncio.run(ask()))
service.close()
try:
    import_deepspeed()
except UserError as error:
    print(error)
print(sorted({name.split(".")[0] for name in sys.modules} & set(ABSENT)))
"""


@pytest.mark.slow
def test_what_only_training_needs_may_be_absent(tmp_path: Path) -> None:
    save_model(tmp_path / "run")
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    (tmp_path / "texts.txt").write_text("so good\nbad\n")
    (tmp_path / "rows.tsv").write_text("text_a\nso good\n")
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("ABSENT", repr(ABSENT))],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    first, *_, codes, refused, imported = ended.stdout.splitlines()
    assert first in ("good", "bad", "so") and codes == "[200, 200]" and imported == "[]"
    assert refused == "training needs DeepSpeed: DS_BUILD_OPS=0 pip install deepspeed"
