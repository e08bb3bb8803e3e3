"""What ships beside the package: it parses, and the flags, metrics, paths and extras that it names exist."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvant.cluster.config import ReplicaOptions
from kvant.plan.config import EngineOptions
from kvant.plan.options import options_of
from kvant.plan.settings import read_settings
from kvant.server.app import ENDPOINTS
from kvant.server.config import ServerConfig
from tests.server.conftest import model, server
from tests.server.harness import Server

__all__ = ["model", "server"]
ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
FLAGS = {
    flag
    for kind in (EngineOptions, ServerConfig, ReplicaOptions)
    for option in options_of(kind)
    for flag in option.flags
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


def test_the_container_runs_as_no_root_and_knows_when_it_is_well() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    steps = [line.split()[0] for line in lines if re.match(r"[A-Z]+ ", line)]
    last = text.rindex("FROM ")
    assert re.search(r"^USER 10001:10001$", text[last:], re.MULTILINE)
    assert {"HEALTHCHECK", "VOLUME", "STOPSIGNAL", "ENTRYPOINT"} <= {*steps}
    assert "/health" in text[last:]
    for name in re.findall(r"\.\[\$?(\w+)", text):
        assert name == "EXTRAS"
    (extras,) = re.findall(r"ARG EXTRAS=(.*)", text)
    assert {*extras.split(",")} <= {*PROJECT["optional-dependencies"]}
    assert {*re.findall(r"EXTRAS=(\w+),(\w+)", text)[0]} <= {*PROJECT["optional-dependencies"]}
    variables = set(re.findall(r"KVANT_[A-Z_]+", text)) - {"KVANT_CACHE"}
    known = {"KVANT_" + option.name.upper() for option in options_of(ServerConfig)}
    assert variables <= known


def test_the_unit_names_flags_that_exist_and_waits_for_the_drain() -> None:
    text = (DEPLOY / "kvant.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*?[^\\])$", text, re.MULTILINE | re.DOTALL)
    assert _flags(command) <= FLAGS
    timeout = int(re.findall(r"^TimeoutStopSec=(\d+)", text, re.MULTILINE)[0])
    assert timeout > int(re.findall(r"--shutdown-timeout (\d+)", command)[0])
    for line in text.splitlines():
        assert re.match(r"#|\[\w+\]$|\w+=|\s|$", line), line


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "kvant.service").read_text()
    unit = tmp_path / "kvant.service"
    unit.write_text(text.replace("/opt/kvant/bin/kvant", "/usr/bin/env kvant"))  # which exists here
    done = subprocess.run(("systemd-analyze", "verify", unit), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_kubernetes_takes_the_manifest() -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("kubernetes-validate is not installed (pip install kubernetes-validate)")
    import kubernetes_validate

    for one in yaml.safe_load_all((DEPLOY / "kubernetes" / "kvant.yaml").read_text()):
        for version in ("1.28", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(one, version, strict=True)


def test_the_manifest_probes_endpoints_that_exist_and_drains() -> None:
    found = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "kvant.yaml").read_text()))
    assert [one["kind"] for one in found] == ["PersistentVolumeClaim", "Deployment", "Service"]
    pod = found[1]["spec"]["template"]["spec"]
    (box,) = pod["containers"]
    paths = {one.path for one in ENDPOINTS}
    for probe in ("startupProbe", "livenessProbe"):
        assert box[probe]["httpGet"]["path"] in paths
    (ready,) = re.findall(
        r"127\.0\.0\.1:8000(/\w+)", " ".join(box["readinessProbe"]["exec"]["command"])
    )
    assert ready in paths
    compile(box["readinessProbe"]["exec"]["command"][-1], "probe", "exec")
    flags = [argument for argument in box["args"] if argument.startswith("--")]
    assert {*flags} <= FLAGS
    drain = int(box["args"][box["args"].index("--shutdown-timeout") + 1])
    waits = int(box["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > drain + waits
    context = box["securityContext"]
    assert context["readOnlyRootFilesystem"]
    assert not context["allowPrivilegeEscalation"]
    assert pod["securityContext"]["runAsNonRoot"]
    mounted = {one["name"] for one in box["volumeMounts"]}
    assert mounted == {one["name"] for one in pod["volumes"]}


def test_the_set_of_two_hosts_serves_from_its_leader_and_drains_before_its_workers() -> None:
    found = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "lws.yaml").read_text()))
    assert [one["kind"] for one in found] == ["LeaderWorkerSet", "Service"]
    template = found[0]["spec"]["leaderWorkerTemplate"]
    leader, worker = (template[name]["spec"] for name in ("leaderTemplate", "workerTemplate"))
    (box,), (other,) = leader["containers"], worker["containers"]
    assert (box["command"], box["args"]) == (other["command"], other["args"])
    flags = [argument for argument in box["args"] if argument.startswith("--")]
    assert {*flags} <= FLAGS
    value = dict(pairwise(box["args"]))
    gpus = box["resources"]["limits"]["nvidia.com/gpu"]
    assert int(value["--tensor-parallel-size"]) == template["size"] * gpus
    assert f"--nproc-per-node={gpus}" in box["command"]
    assert value["--rank-launcher"] == "torchrun"
    names = {*re.findall(r"\$\((\w+)\)", " ".join(box["command"]))}
    assert names == {"LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"}
    paths = {one.path for one in ENDPOINTS}
    for probe in ("startupProbe", "livenessProbe"):
        assert box[probe]["httpGet"]["path"] in paths
    waits = int(box["lifecycle"]["preStop"]["exec"]["command"][1])
    drained = waits + int(value["--shutdown-timeout"])
    assert int(value["--shutdown-timeout"]) < 30  # torchrun kills after so long
    assert leader["terminationGracePeriodSeconds"] > drained
    stays = int(other["lifecycle"]["preStop"]["exec"]["command"][1])
    assert drained < stays < worker["terminationGracePeriodSeconds"]
    selector = found[1]["spec"]["selector"]
    assert selector.items() <= template["leaderTemplate"]["metadata"]["labels"].items()
    assert not selector.items() <= template["workerTemplate"]["metadata"]["labels"].items()


def test_the_application_of_ray_names_options_that_exist() -> None:
    given = yaml.safe_load((DEPLOY / "ray" / "kvant.yaml").read_text())
    (app,) = given["applications"]
    kinds = (EngineOptions, ServerConfig, ReplicaOptions)
    known = [option for kind in kinds for option in options_of(kind)]
    read_settings(known, given=app["args"], by=lambda option: option.name, environ={})
    module, _, name = app["import_path"].partition(":")
    path = ROOT / "src" / (module.replace(".", "/") + ".py")
    assert f"\ndef {name}(args: dict[str, Any])" in path.read_text()
    assert given["http_options"]["host"] == "127.0.0.1"


def _samples(dashboard: dict[str, Any]) -> set[str]:
    """The names of metrics in all queries."""
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return {name for query in queries for name in re.findall(r"(?:kvant|vllm):\w+", query)}


def test_the_dashboard_asks_for_metrics_that_exist(server: Server) -> None:
    server.complete("abc", max_tokens=3, ignore_eos=True)
    text = server.get("/metrics").body.decode()
    families = list(text_string_to_metric_families(text))
    known = {family.name for family in families}
    known |= {sample.name for family in families for sample in family.samples}
    # Only an engine that drafts has these; tests/server/test_speculation.py sees them.
    drafting = {
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_draft_tokens_total",
    }
    # Counted by layer from the first value on.
    later = {"kvant:kv_saturated_values_total"}
    dashboard = json.loads((DEPLOY / "grafana" / "kvant.json").read_text())
    asked = _samples(dashboard)
    assert len(asked) > 25
    assert asked - known - drafting - later == set()
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)


def test_every_extra_that_a_text_names_exists() -> None:
    texts = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", DEPLOY / "Containerfile"]
    for folder, kind in (("src", "*.py"), ("docs", "*.md"), ("scripts", "*.py"), ("tests", "*.py")):
        texts += (ROOT / folder).rglob(kind)
    named = {
        extra
        for path in texts
        for found in re.findall(r"kvant\[([\w,]+)\]", path.read_text())
        for extra in found.split(",")
    }
    assert {"plot", "quantized", "flashinfer"} <= named
    assert named <= {*PROJECT["optional-dependencies"]}


def test_the_image_has_the_demo_model_of_the_tests() -> None:
    (model,) = re.findall(
        r'^DEMO_MODEL = "(.*)"', (ROOT / "scripts" / "setup.py").read_text(), re.M
    )
    assert f"ARG DEMO_MODEL={model}\n" in (DEPLOY / "Containerfile").read_text()


def test_extras_have_what_they_say() -> None:
    extras = PROJECT["optional-dependencies"]
    assert {"cuda", "quantized", "plot", "docs", "browser"} <= {*extras}
    for name, needs in extras.items():
        for need in needs:
            assert re.match(r"[A-Za-z0-9_.-]+(\[[\w,]+\])?(\s*[<>=!~]|$|;)", need), (name, need)
        if name not in ("dev",):
            assert all(re.search(r"[<>=]", need) for need in needs), f"{name} has no window"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_dependency_has_a_known_vulnerability() -> None:
    """Needs the internet: pip-audit asks PyPI's advisories."""
    if importlib.util.find_spec("pip_audit") is None:
        pytest.skip("pip-audit is not installed (pip install pip-audit)")
    command = (sys.executable, "-m", "pip_audit", "--progress-spinner", "off", "--skip-editable")
    done = subprocess.run((*command, "--format", "json"), capture_output=True, text=True)
    if "ConnectionError" in done.stderr or "resolve" in done.stderr:
        pytest.skip("PyPI's advisories cannot be reached")
    # An index without advisories is no answer: pip-audit then skips every package and finds nothing.
    asked = [one for one in json.loads(done.stdout)["dependencies"] if "skip_reason" not in one]
    if len(asked) < 10:
        pytest.skip("the package index gives no advisories")
    assert done.returncode == 0, done.stdout
