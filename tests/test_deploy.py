"""The files in deploy/: each loads, they fit each other, and the dashboard asks for metrics that the server has."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.tiny import tiny_target
from tests.test_project import ROOT

DEPLOY = ROOT / "deploy"
GRAFANA = DEPLOY / "grafana"
METRIC = re.compile(r"\bjetspec:[a-z0-9_]+")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def dashboards() -> list[Path]:
    return sorted((GRAFANA / "dashboards").glob("*.json"))


def queries(dashboard: dict[str, Any]) -> list[str]:
    """Everything in a dashboard that Prometheus is asked."""
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return found + [variable["query"] for variable in dashboard["templating"]["list"]]


def metric_names() -> set[str]:
    """The series that the server exports, by the names under which Prometheus knows them."""
    module = pytest.importorskip("jetspec.server.metrics", reason="the server is not there yet")
    from jetspec import LLM

    metrics = module.ServerMetrics("tiny")
    metrics.watch(LLM(tiny_target(text=True), None, num_blocks=20))
    names: set[str] = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", metrics.render().decode(), re.MULTILINE):
        names |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"} if kind == "histogram" else {name}
    return names


@pytest.mark.parametrize("path", dashboards(), ids=lambda path: path.name)
def test_the_dashboard_asks_for_metrics_of_the_server(path: Path) -> None:
    asked = {name for query in queries(json.loads(path.read_text())) for name in METRIC.findall(query)}
    assert len(asked) > 10
    assert asked - metric_names() == set()


@pytest.mark.parametrize("path", dashboards(), ids=lambda path: path.name)
def test_the_dashboard_is_well_formed(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    sources = {source["uid"] for source in load(GRAFANA / "provisioning/datasources/prometheus.yaml")["datasources"]}
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: list[tuple[int, int]] = []
    for panel in panels:
        place = panel["gridPos"]
        cells += [(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])]
        assert place["x"] + place["w"] <= 24
        assert panel["description"]
        assert {target["datasource"]["uid"] for target in panel["targets"]} <= sources
    assert len(set(cells)) == len(cells), "no panel covers another"
    assert {variable["datasource"]["uid"] for variable in dashboard["templating"]["list"]} <= sources
    for query in queries(dashboard):
        assert METRIC.search(query)
        for opening, closing in ("()", "[]", "{}"):
            assert query.count(opening) == query.count(closing), query
        # Every variable is one of the dashboard's or one of Grafana's own.
        names = {variable["name"] for variable in dashboard["templating"]["list"]} | {"__rate_interval"}
        assert set(re.findall(r"\$(\w+)", query)) <= names


def test_compose_mounts_what_is_there_and_where_it_is_read() -> None:
    compose = load(DEPLOY / "compose.yaml")
    mounts: dict[str, Path] = {}
    for service in compose["services"].values():
        for mount in service["volumes"]:
            source, target, *_ = mount.split(":")
            if source.startswith("."):
                mounts[target] = DEPLOY / source
                assert mounts[target].exists(), mount
            else:
                assert source in compose["volumes"], mount
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "for this machine only"
    assert mounts["/etc/prometheus/prometheus.yml"] == DEPLOY / "prometheus.yml"
    assert mounts["/etc/grafana/provisioning"] == GRAFANA / "provisioning"
    [provider] = load(GRAFANA / "provisioning/dashboards/jetspec.yaml")["providers"]
    assert mounts[provider["options"]["path"]] == GRAFANA / "dashboards"
    images = [service["image"] for service in compose["services"].values() if "image" in service]
    assert all(re.search(r":v?\d+\.\d+\.\d+$", image) for image in images), "versions are pinned"


def test_prometheus_asks_the_server_and_grafana_asks_prometheus() -> None:
    services = load(DEPLOY / "compose.yaml")["services"]
    [job] = load(DEPLOY / "prometheus.yml")["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    name, port = target.split(":")
    command = services[name]["command"]
    assert command[command.index("--port") + 1] == port
    [source] = load(GRAFANA / "provisioning/datasources/prometheus.yaml")["datasources"]
    name, port = source["url"].removeprefix("http://").split(":")
    assert any(mapping.endswith(f":{port}") for mapping in services[name]["ports"])


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Containerfile, continued lines joined."""
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return [tuple(line.split(None, 1)) for line in lines.replace("\\\n", " ").splitlines() if line.strip()]


def test_the_container_is_built_from_files_and_extras_that_are_there() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    steps = instructions()
    for source in [word for name, rest in steps if name == "COPY" for word in rest.split()[:-1]]:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored, "the build sees it"
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    [asked] = [re.search(r'"\.\[(.+?)\]"', rest).group(1) for name, rest in steps if '".[' in rest]
    assert set(asked.split(",")) <= set(extras)
    assert [name for name, _ in steps].index("USER") < [name for name, _ in steps].index("ENTRYPOINT")


def test_the_container_and_compose_start_the_same_server() -> None:
    steps = dict(instructions())
    service = load(DEPLOY / "compose.yaml")["services"]["server"]
    assert json.loads(steps["ENTRYPOINT"]) == ["jetspec"]
    assert json.loads(steps["CMD"]) == service["command"]
    assert f":{steps['EXPOSE']}" in service["ports"][0]
    assert service["volumes"] == [f"models:{steps['VOLUME']}"]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).samefile(DEPLOY / "Containerfile")


@pytest.mark.skipif(importlib.util.find_spec("jetspec.server") is None, reason="the server is not there yet")
def test_the_command_of_the_container_is_one_of_jetspec() -> None:
    from tests.helpers.cli import call

    command = json.loads(dict(instructions())["CMD"])
    help_text = call(command[0], "--help").stdout
    assert all(word in help_text for word in command if word.startswith("--"))
