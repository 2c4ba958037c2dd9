"""The board, the alerts and the recording rules fit the server: metrics, labels, and what a real Prometheus makes of them."""

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request

import pytest
import yaml
from kvrig import logs, tiers
from kvrig.server import REPOSITORY, free_port
from kvrig.waiting import wait_until

pytestmark = pytest.mark.ours("these files are ours")

DEPLOY = REPOSITORY / "deploy"

# Labels that Prometheus itself adds, and a bucket's.
ADDED = {"job", "instance", "le"}

# Series of what this test does not have: GPUs, failures, refusals. docs/metrics.md has them, and a test of the crate
# `kvtier` holds that page to be true.
NOT_HERE = re.compile(r"kvtier_gpu_|_failures?_|_failures_total|early_exit|kvtier_refused_requests_total|over_quota")


def rules():
    """(name, expression) of every rule."""
    for path in sorted((DEPLOY / "prometheus").glob("*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                yield rule.get("alert") or rule["record"], rule["expr"]


def board():
    """(name, expression) of every panel, with the variables of Grafana filled."""
    content = json.loads((DEPLOY / "grafana" / "kvtier.json").read_text())
    for panel in content["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$__rate_interval", "5m")
            yield panel["title"], re.sub(r"\$\w+", ".*", expression)
            # A legend names labels of its own series.
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), f"{panel['title']}: {label}"


def used(expression):
    """({metric: labels of its selector}, labels of groupings) of an expression of PromQL."""
    plain = re.sub(r'"[^"]*"', '""', expression)
    grouped = set()
    for names in re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", plain):
        grouped |= {name.strip() for name in names.split(",")}
    plain = re.sub(r"\b(?:by|without|on|ignoring)\s*\([^)]*\)", " ", plain)
    plain = re.sub(r"\[[^\]]*\]", "", plain)
    metrics = {}
    for name, selector in re.findall(r"\b([a-z_][\w:]*)\s*(\{[^}]*\})?(?!\s*\(|\w)", plain):
        if name not in ("or", "and", "unless", "bool"):
            metrics.setdefault(name, set()).update(re.findall(r"(\w+)\s*[=!]", selector))
    return metrics, grouped


def scraped_series(text):
    """{metric: its labels} of an answer of /metrics."""
    found = {}
    for name, labels in re.findall(r"^([a-z_]\w*)(?:\{(.*)\})? \S+", text, re.MULTILINE | re.IGNORECASE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def documented_series():
    """{metric: its labels} of docs/metrics.md."""
    rows = re.findall(r"^\| `(\w+)` \| \w+ \| (.*?) ?\| ", (REPOSITORY / "docs" / "metrics.md").read_text(), re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}


# proves: docs/compare.md#command-line
# proves: docs/operate.md#monitoring
def test_boards_and_rules_use_series_that_exist(serve, engines, tmp_path):
    """Every metric and label of an expression is in the answer of a server that has stored, found and loaded."""
    flags = ["--quota-file", str(tmp_path / "quotas"), *tiers.fs(tmp_path / "tier", max_capacity_gb=1)]
    server = serve(eviction="IsolatedLRU", flags=flags)
    engine = engines(server)
    tiers.store(engine, 1)
    tiers.store(engine, 2, salt="alice")
    tiers.wait_files(tmp_path / "tier", 8)
    tiers.forget(engine)
    assert tiers.recall(engine, 1) == 64
    live, documented = scraped_series(server.get("/metrics")[1]), documented_series()
    checked = 0
    recorded = {name for name, _ in rules() if ":" in name}
    for name, expression in [*rules(), *board()]:
        metrics, grouped = used(expression)
        assert metrics, f"{name}: no metric in {expression}"
        labels = set(ADDED)
        for metric, selected in metrics.items():
            if metric == "up" or metric in recorded:
                continue
            if metric in live:
                own = live[metric]
            else:
                assert NOT_HERE.search(metric), f"{name}: {metric} is not in /metrics"
                assert metric in documented, f"{name}: {metric} is in neither /metrics nor docs/metrics.md"
                own = documented[metric]
            assert selected <= own | ADDED, f"{name}: {metric} has the labels {own}, not {selected - own - ADDED}"
            labels |= own
            checked += 1
        assert grouped <= labels, f"{name}: no label {grouped - labels} in {expression}"
    assert checked > 60, f"only {checked} metrics were checked"


def test_checks_of_expressions_find_mistakes():
    """A metric, a label of a selector and one of a grouping are found wherever they stand."""
    expression = 'sum by (a, le) (rate(x_total{b=~"c{", d!="e"}[5m])) / on (f) histogram_quantile(0.9, y:z) > 0 or w'
    assert used(expression) == ({"x_total": {"b", "d"}, "y:z": set(), "w": set()}, {"a", "le", "f"})


# proves: docs/operate.md#monitoring
# proves: docs/troubleshoot.md#alerts
def test_every_alert_has_advice():
    """docs/troubleshoot.md says what to do about each alert."""
    page = (REPOSITORY / "docs" / "troubleshoot.md").read_text()
    alerts = [name for name, _ in rules() if ":" not in name]
    assert len(alerts) > 10 and [name for name in alerts if f"`{name}`" not in page] == []


# proves: docs/operate.md#monitoring
def test_prometheus_accepts_rules_and_boards(tmp_path):
    """`promtool check` accepts the rules, the configuration of the compose file, and the board's expressions as rules."""
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed (Debian: prometheus): rules and boards are not checked by it")
    panels = [{"record": f"panel:{number}", "expr": expression} for number, (_, expression) in enumerate(board())]
    (tmp_path / "board.yml").write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": panels}]}))
    files = [*sorted((DEPLOY / "prometheus").glob("*.yml")), tmp_path / "board.yml"]
    for what, paths in [("rules", files), ("config", [DEPLOY / "docker" / "prometheus.yml"])]:
        done = subprocess.run(
            ["promtool", "check", what, *map(str, paths)], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


# proves: docs/operate.md#monitoring
def test_prometheus_evaluates_rules_and_boards(serve, engines, tmp_path):
    """A real one scrapes the server: every expression is evaluated, no alert is raised, and one is once the server is down."""
    if not shutil.which("prometheus"):
        pytest.skip("prometheus is not installed (Debian: prometheus): rules and boards are not evaluated by it")
    server = serve()
    engine = engines(server)
    tiers.store(engine, 1)
    port = free_port()
    job = {"job_name": "kvtier", "static_configs": [{"targets": [f"127.0.0.1:{server.http_port}"]}]}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(DEPLOY / "prometheus" / "*.yml")],
        "scrape_configs": [job],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    log_path = tmp_path / "prometheus.log"
    logs.opened(log_path)
    with log_path.open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)

    def ask(path, **parameters):
        url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]

    def is_ready():
        """It listens before it has its data, and answers 503 until then."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=10):
                return True
        except OSError:
            return False

    def raised():
        return {alert["labels"]["alertname"] for alert in ask("alerts")["alerts"]}

    def evaluated():
        """States of all rules, once each was evaluated with the samples of two scrapes."""
        assert tiers.recall(engine, 1) == 64
        ratio = ask("query", query="kvtier:hit_ratio:rate5m")["result"]
        found = [rule["health"] for group in ask("rules")["groups"] for rule in group["rules"]]
        return "unknown" not in found and ratio and ratio[0]["value"][1] != "NaN" and (found, ratio[0]["value"][1])

    try:
        try:
            wait_until(is_ready, 60, "Prometheus is ready")
            states, ratio = wait_until(evaluated, 60, "all rules are evaluated")
        except AssertionError as error:
            raise AssertionError(f"{error}; {logs.tail(log_path)}") from None
        assert set(states) == {"ok"} and len(states) == len(list(rules()))
        assert 0.5 < float(ratio) <= 1.1, "all that is asked for is found"
        for name, expression in board():
            assert isinstance(ask("query", query=expression)["result"], list), name
        assert raised() == set()
        engine.close()
        server.stop()
        wait_until(lambda: raised() == {"KvtierDown"}, 60, "the alert is raised")
    finally:
        process.terminate()
        process.wait(60)
        logs.closed(log_path)
