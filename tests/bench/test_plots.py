"""Pictures: written whole, as PNG and SVG, with one colour a method."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from bench import plots


@pytest.mark.parametrize("name", ["a.png", "a.svg"])
def test_a_picture_of_bars(tmp_path, name):
    made, axes = plots.figure("Bars", 2)
    for each in axes:
        plots.bars(
            each, ["one", "two"], {"aspire": [1.0, None], "vegas": [2.0, 3.0]}, {"vegas": [0.1, None]}, label="x"
        )
    plots.legend(axes[0])
    plots.note(made, plots.where({"model": "tiny", "machine": {"cpu": "x", "cores": 2, "jax": "1", "python": "3"}}))
    plots.save(made, str(tmp_path / name))
    assert (tmp_path / name).stat().st_size > 1000 and [p.name for p in tmp_path.iterdir()] == [name]


def test_colours():
    found = plots.colours(["mine", "aspire", "yours", "adaptive"])
    assert len(set(found.values())) == 4 and found["aspire"] == plots.colours(["aspire"])["aspire"]
