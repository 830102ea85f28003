"""The alert rules and the dashboard in ops/monitoring, checked by promtool and against what Grafana needs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import yaml
from support.monitoring import FOLDER, dashboard, expressions, promtool, rules

from elastic_rl.telemetry.metrics import JOB_LABEL


def test_example_configuration_and_rules_are_valid(tmp_path: Path) -> None:
    for name in ("prometheus.yml", "rules.yml"):
        shutil.copy(FOLDER / name, tmp_path)
    token, config = tmp_path / "viewer.token", tmp_path / "prometheus.yml"
    token.write_text("token")
    config.write_text(config.read_text().replace("/etc/prometheus/elastic-rl.token", str(token)))  # it has to exist
    done = promtool("check", "config", config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules())} rules found" in done.stdout


def test_each_rule_fires_when_it_should_and_none_for_a_healthy_job() -> None:
    done = promtool("test", "rules", FOLDER / "rules_test.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    tested = (FOLDER / "rules_test.yml").read_text()
    untested = [rule["alert"] for rule in rules() if f'alertname="{rule["alert"]}"' not in tested]
    assert untested == []


def test_jobs_are_told_apart_by_a_label_that_prometheus_does_not_set_itself() -> None:
    wrong = {where: expr for where, expr in expressions().items()
             if re.search(r"\bjob\b", expr.replace("$job", "").replace('up{job="elastic-rl"}', ""))}
    assert wrong == {} and JOB_LABEL not in ("job", "instance")
    by_job = [expr for expr in expressions().values() if JOB_LABEL in expr]
    assert len(by_job) > 50
    variables = {v["name"]: v for v in dashboard()["templating"]["list"]}
    assert variables["job"]["query"]["query"].endswith(f", {JOB_LABEL})")


def test_each_rule_has_a_severity_a_summary_and_a_description() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert "cluster" in rule["expr"] or rule["alert"] == "ElasticRLCoordinatorDown"


def test_dashboard_expressions_are_valid_promql(tmp_path: Path) -> None:
    found = {where: re.sub(r"\$(cluster|job)\b", ".*", expr) for where, expr in expressions().items()
             if where.startswith("panel")}
    assert len(found) > 50
    records = [{"record": f"x:{i}", "expr": expr, "labels": {"where": where}}
               for i, (where, expr) in enumerate(found.items())]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": records}]}))
    done = promtool("check", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_dashboard_has_what_grafana_needs() -> None:
    board = dashboard()
    assert board["schemaVersion"] >= 36 and board["uid"] and board["title"] and "id" not in board
    variables = {v["name"]: v for v in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["cluster"]["type"] == variables["job"]["type"] == "query"
    panels = board["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}
        assert cells and max(x for x, _ in cells) < 24 and not cells & taken, f"{panel['title']} overlaps"
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("timeseries", "stat") and panel["title"] and panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"] and panel["options"]
        assert [t["refId"] for t in panel["targets"]] == [chr(65 + i) for i in range(len(panel["targets"]))]
        for source in (panel["datasource"], *(t["datasource"] for t in panel["targets"])):
            assert source == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            assert 'cluster=~"$cluster"' in target["expr"] and target["legendFormat"]
