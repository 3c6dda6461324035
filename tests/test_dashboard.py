"""The dashboard, the alerts and the page of metrics, against the metrics that the service exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from test_metrics import scrape
from test_structure import table

from repo_service.api.app import create_app
from repo_service.domain.errors import error_types
from repo_service.services.opening import open_local
from repo_service.settings import Settings

from test_api import serving  # isort: skip

ROOT = Path(__file__).parent.parent
DASHBOARD = ROOT / "docker" / "grafana-dashboard.json"
ALERTS = ROOT / "docker" / "alerts.yaml"
PAGE = ROOT / "docs" / "operations.md"

# What Grafana puts in before it asks.
VARIABLES = {"$__rate_interval": "5m", "$job": "kvgraft", "$instance": ".*"}

# What Prometheus adds to every target, by itself.
OWN = {"up"}
OWN_LABELS = {"job", "instance"}


@cache
def exported() -> dict[str, tuple[str, str]]:
    """Type and meaning of every metric, by the name it is asked for."""
    with open_local("memory:") as repository:
        families = create_app(repository, Settings()).state.context.metrics.registry.collect()
        return {
            f"{family.name}_total" if family.type == "counter" else family.name: (family.type, family.documentation)
            for family in families
        }


def expressions() -> Iterator[tuple[str, str]]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"]
            for name, value in VARIABLES.items():
                text = text.replace(name, value)
            yield panel["title"], text
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def selectors(expression: Any) -> Iterator[Any]:
    """Every selector of a parsed expression."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
    for name in ("expr", "lhs", "rhs", "vector_selector", "args", "param"):
        part = getattr(expression, name, None)
        for one in part if isinstance(part, list) else [part]:
            if isinstance(one, promql_parser.Expr):
                yield from selectors(one)


@pytest.mark.parametrize(("title", "expression"), [pytest.param(*item, id=item[0]) for item in expressions()])
def test_an_expression_names_only_metrics_that_are_exported(title: str, expression: str) -> None:
    names = [one.name for one in selectors(promql_parser.parse(expression))]
    assert names, title
    known = {*exported(), *OWN}
    base = [re.sub(r"(?<=_seconds)_(bucket|sum|count)$", "", name) for name in names]
    assert set(base) <= known


def test_an_expression_with_another_metric_would_be_found() -> None:
    found = selectors(
        promql_parser.parse("histogram_quantile(0.9, sum by (le) (rate(a[5m]))) / (b > 1) - max(c offset 1h)")
    )
    assert [one.name for one in found] == ["a", "b", "c"]


def test_labels_on_the_page_and_in_expressions_are_those_of_the_metrics(tmp_path: Path) -> None:
    with serving(tmp_path / "repository") as service:
        service.request("GET", "/nowhere")
        service.repository.collect_garbage()
        service.repository.scrub()
        service.request("GET", "/metrics")
        samples = scrape(service)
    labels: dict[str, set[str]] = {}
    for name, pairs in samples:
        labels.setdefault(name, set()).update(key for key, _ in pairs)
    documented = {name: set(re.findall(r"\w+", names)) for name, _, names, _ in table(PAGE, "metric")}
    assert {name: labels[name] for name in documented if name in labels} == {
        name: names for name, names in documented.items() if name in labels
    }
    checked = 0
    for title, expression in expressions():
        for selector in selectors(promql_parser.parse(expression)):
            asked = {matcher.name for matcher in selector.matchers.matchers} - OWN_LABELS
            if selector.name in labels:
                assert asked <= labels[selector.name], title
                checked += 1
    assert checked > 30
    codes = re.findall(r'code="(\w+)"', ALERTS.read_text() + DASHBOARD.read_text().replace("\\", ""))
    assert codes
    assert set(codes) <= set(error_types())


def test_the_dashboard_is_of_grafanas_schema() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    read = json.loads(json.dumps(Dashboard.from_json(dashboard), cls=JSONEncoder))
    assert lost(dashboard, read) == []


def lost(given: Any, read: Any, at: str = "") -> list[str]:
    """What Grafana's own model of a dashboard does not know, or knows as something else."""
    if isinstance(given, dict) and isinstance(read, dict):
        return [
            p for key in given for p in (lost(given[key], read[key], f"{at}/{key}") if key in read else [f"{at}/{key}"])
        ]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        return [p for i, pair in enumerate(zip(given, read, strict=True)) for p in lost(*pair, f"{at}/{i}")]
    return [] if given == read else [at]


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_the_page_lists_every_metric_as_it_is() -> None:
    own = {name: described for name, described in exported().items() if name.startswith("kvgraft_")}
    documented = {name: (kind, meaning) for name, kind, _, meaning in table(PAGE, "metric")}
    assert documented == own


def test_the_page_says_what_to_do_about_every_alert() -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert [row[0] for row in table(PAGE, "alert")] == [rule["alert"] for rule in rules]
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] in {"page", "ticket"} for rule in rules)
