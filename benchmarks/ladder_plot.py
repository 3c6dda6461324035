"""Plots of the ladder: what is read, and the state on the device, by length of the context."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

# One way keeps its color and mark in all plots.
_STYLES = {
    "truncated": ("tab:gray", "v"),
    "plain": ("tab:red", "x"),
    "library": ("tab:blue", "o"),
    "text": ("tab:orange", "s"),
    "joint": ("tab:green", "D"),
}


def draw(summary: Mapping[str, Any], directory: Path) -> list[Path]:
    """One file for each model and window, from what `benchmarks.ladder.summary` gives.

    Returns
    -------
    list of Path
        SVG files with equal bytes for equal figures.
    """
    mpl.rcParams["svg.hashsalt"] = "kvgraft"
    paths = []
    for title, ways in summary.items():
        path = directory / f"ladder-{title.replace(', window ', '-').replace(', ', '-')}.svg"
        _figure(title, ways).savefig(path, metadata={"Date": None})
        paths.append(path)
    return paths


def _figure(title: str, ways: Mapping[str, Any]) -> Figure:
    tasks = list(dict.fromkeys(task for rungs in ways.values() for task in rungs))
    figure = Figure(figsize=(3.2 * (len(tasks) + 1), 3.4), layout="constrained")
    *reading, memory = figure.subplots(1, len(tasks) + 1)
    for way, rungs in ways.items():
        color, marker = _STYLES[way]
        style = {"color": color, "marker": marker, "label": way, "linewidth": 1.2, "markersize": 4}
        for task, axes in zip(tasks, reading, strict=True):
            points = _points(rungs.get(task, {}), "share")
            axes.plot([at for at, _ in points], [100 * share for _, share in points], **style)
        points = _points(rungs.get(tasks[0], {}), "device_bytes")
        memory.plot([at for at, _ in points], [size / 2**20 for _, size in points], **style)
    for task, axes in zip(tasks, reading, strict=True):
        axes.set(title=task, ylim=(-4, 104), ylabel="numbers read, %" if task == tasks[0] else None)
    memory.set(title="state on the device", yscale="log", ylabel="MiB")
    for axes in (*reading, memory):
        axes.set_xscale("log", base=2)
        axes.set_xticks([1, 4, 16, 64, 128], ["1x", "4x", "16x", "64x", "128x"])
        axes.grid(alpha=0.3)
    figure.suptitle(f"{title}: needles in real text, by multiples of the window", fontsize=10)
    figure.legend(*reading[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(ways), frameon=False)
    return figure


def _points(rungs: Mapping[str, Any], name: str) -> list[tuple[int, float]]:
    return sorted((int(multiple.removesuffix("x")), rung[name]) for multiple, rung in rungs.items())
