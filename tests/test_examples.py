"""Every script of examples/ runs as it stands, on a tiny model where it takes one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api import models

REPO = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((REPO / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.build(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_runs(script, folder):
    takes_model = "[MODEL]" in script.read_text(encoding="utf-8")
    command = [sys.executable, "-W", "error", str(script), *([str(folder)] if takes_model else [])]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_there_is_one_for_each_way_in():
    assert [path.stem for path in SCRIPTS] == ["batch_file", "generate", "own_policy", "pure_layer", "streaming"]


def test_the_first_is_ten_lines():
    text = (REPO / "examples" / "generate.py").read_text(encoding="utf-8").split('"""')[2]
    assert len([line for line in text.splitlines() if line.strip()]) <= 10


def test_a_policy_of_ones_own_takes_less_than_forty_lines():
    text = (REPO / "examples" / "own_policy.py").read_text(encoding="utf-8").split('"""')[2]
    assert len([line for line in text.splitlines() if line.strip()]) < 40
