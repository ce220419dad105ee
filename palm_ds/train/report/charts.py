"""The curves of a report as <svg> elements, with text as text and colors from the page's style."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from palm_ds.data.stream.stages import Curriculum

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from palm_ds.train.report.metrics_file import Metrics

Panel = Callable[["Axes"], None]
_WIDTH = 5.3
"""Inches of a panel."""
_POINTS = 1500
"""A longer curve is averaged down to this many points, which is what a screen can show."""
_STAGES = 20
"""If there are more stages, they are not marked in the curves."""
_TRAIN, _HELD_OUT, _BASELINE, _INK = "#2f6fb3", "#d9691e", "#8a8f98", "#30343b"
_LINES = (_HELD_OUT, "#19774a", "#7b4fa3", "#b3261e", _BASELINE)
"""Colors of several metrics in one panel, the primary metric first."""
_MAX_FP32 = float(np.finfo(np.float32).max)
_GRID, _STAGE = "#eceef1", "#d5d8dd"
_STYLED = {
    _INK: "ink",
    "#000000": "ink",
    _GRID: "grid",
    _STAGE: "line",
    _TRAIN: "train",
    "#19774a": "good",
    "#7b4fa3": "violet",
    "#b3261e": "bad",
}
"""{color: the page's name for it, which on a dark screen is another}"""


def figure(panels: Sequence[Panel], *, height: float) -> str:
    """Panels side by side, or one below the other on a narrow screen."""
    drawn = "\n".join(_svg(panel, height) for panel in panels)
    return f"<div class='charts'>{drawn}</div>"


def _svg(panel: Panel, height: float) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with (
        matplotlib.rc_context({"svg.fonttype": "none", "font.size": 9, "axes.labelsize": 9}),
        matplotlib.rc_context({"text.parse_math": False}),  # a $ in a name is no formula
    ):
        figure = Figure(figsize=(_WIDTH, height))
        # fixed margins: a layout fitted to the labels would draw everything four times
        figure.subplots_adjust(
            left=0.75 / _WIDTH,
            right=1 - 0.15 / _WIDTH,
            bottom=0.45 / height,
            top=1 - 0.2 / height,
        )
        axes = figure.subplots()
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.grid(axis="y", color=_GRID)
        axes.tick_params(colors=_INK, length=3)
        panel(axes)
        out = io.StringIO()
        metadata = {"Date": None, "Creator": None}
        figure.savefig(out, format="svg", metadata=metadata, transparent=True)
    svg = out.getvalue()
    for color, name in _STYLED.items():
        svg = svg.replace(f": {color}", f": var(--{name})")
    return svg[svg.index("<svg") :]


def task_panel(metrics: Metrics, curriculum: Curriculum | None, task: str, name: str) -> Panel:
    """Loss or accuracy of a task: training, held-out, baseline."""
    steps, values = series(metrics.steps, name, task)
    held_steps, held = series(metrics.evaluations, "scores", task, name)
    baseline = series(metrics.evaluations, "scores", task, f"baseline_{name}")[1]

    def draw(axes: Axes) -> None:
        _curve(axes, steps, values)
        axes.plot(held_steps, held, "o", color=_HELD_OUT, markersize=4.5, zorder=3)
        if len(baseline):
            axes.axhline(baseline[-1], color=_BASELINE, linestyle=(0, (4, 3)), linewidth=1.2)
        if name == "accuracy":
            axes.set_ylim(0, min(1.0, 1.15 * max([*values, *held, *baseline[-1:], 0.1])))
        _finish(axes, metrics, curriculum, name)

    return draw


def metrics_panel(metrics: Metrics, curriculum: Curriculum | None, task: str) -> Panel | None:
    """The metrics of a task over the evaluations; None if it has none."""
    scores = [(record.get("scores") or {}).get(task) or {} for record in metrics.evaluations]
    names = dict.fromkeys(name for score in scores for name in score.get("metrics") or {})
    if not names:
        return None

    def draw(axes: Axes) -> None:
        for number, name in enumerate(names):
            steps, values = series(metrics.evaluations, "scores", task, "metrics", name)
            color = _LINES[number % len(_LINES)]
            axes.plot(steps, values, "o-", color=color, markersize=4, linewidth=1.4, label=name)
        axes.legend(fontsize=7, frameon=False, loc="best")
        _finish(axes, metrics, curriculum, "scores")

    return draw


def calibration_panel(rows: Sequence[Sequence[Any]]) -> Panel:
    """A reliability diagram from the lines of a calibration table (probability, mean, accuracy,
    gap, rows): the accuracy of each bin, and the diagonal of perfect calibration."""
    bins = [row for row in rows if row[0] != "all"]
    means, accuracies, counts = ([row[i] for row in bins] for i in (1, 2, 4))
    sizes = 12 + 160 * np.sqrt(np.array(counts) / max(sum(counts), 1))

    def draw(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], color=_BASELINE, linestyle=(0, (4, 3)), linewidth=1.2)
        axes.plot(means, accuracies, color=_TRAIN, linewidth=1.4)
        axes.scatter(means, accuracies, s=sizes, color=_TRAIN, zorder=3)
        axes.set_xlim(0, 1.02)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("probability", color=_INK)
        axes.set_ylabel("accuracy", color=_INK)

    return draw


def run_panel(metrics: Metrics, curriculum: Curriculum | None, name: str, label: str) -> Panel:
    steps, values = series(metrics.steps, name)

    def draw(axes: Axes) -> None:
        _curve(axes, steps, values, smooth=name != "lr")
        if name != "lr":
            # A first compilation or one exploding step must not hide the rest.
            axes.set_ylim(0, 1.25 * float(np.quantile(values, 0.99)) or 1)
        else:
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter("{x:.1e}")
        _finish(axes, metrics, curriculum, label)

    return draw


def _curve(axes: Axes, steps: np.ndarray, values: np.ndarray, *, smooth: bool = True) -> None:
    """The values, pale, and their running mean."""
    x, y = _averaged(steps), _averaged(values)
    if not smooth or len(y) < 20:
        axes.plot(x, y, color=_TRAIN, linewidth=1.6)
        return
    axes.plot(x, y, color=_TRAIN, linewidth=0.8, alpha=0.3)
    axes.plot(x, running_mean(y, len(y) / 40), color=_TRAIN, linewidth=1.6)


def _finish(axes: Axes, metrics: Metrics, curriculum: Curriculum | None, label: str) -> None:
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel(label, color=_INK)
    last = metrics.steps[-1]["step"] if metrics.steps else 1
    axes.set_xlim(0, max(last, 1) * 1.01)
    if curriculum and 1 < len(curriculum.stages) <= _STAGES:
        for number, stage in enumerate(curriculum.stages):
            if stage.first <= last:
                axes.axvline(stage.first, color=_STAGE, linewidth=0.8, zorder=0)
                place = axes.get_xaxis_transform()
                text = f" stage {number + 1}"
                axes.text(stage.first, 1.0, text, transform=place, size=7, color=_BASELINE)


def series(records: Sequence[Mapping[str, Any]], *keys: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of the records that have a number under the nested keys, but not one that is
    beyond fp32: no run measures it, and curves of it overflow."""
    steps, values = [], []
    for record in records:
        value: object = record
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, (int, float)) and abs(value) <= _MAX_FP32:
            steps.append(record["step"])
            values.append(value)
    return np.array(steps, np.int64), np.array(values, np.float64)


def _averaged(values: np.ndarray) -> np.ndarray:
    """Means of equal parts, to keep the report of a long run small."""
    if len(values) <= _POINTS:
        return values
    return np.array([part.mean() for part in np.array_split(values, _POINTS)])


def running_mean(values: np.ndarray, span: float) -> np.ndarray:
    """Exponentially weighted mean over about `span` values to each side, without lag."""
    keep = 1 - 1 / max(span, 1)

    def one_way(ordered: np.ndarray) -> np.ndarray:
        total = weight = 0.0
        means = np.empty(len(ordered))
        for index, value in enumerate(ordered):
            total, weight = keep * total + value, keep * weight + 1
            means[index] = total / weight
        return means

    return (one_way(values) + one_way(values[::-1])[::-1]) / 2
