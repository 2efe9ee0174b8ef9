"""What operators start from: images, the composition, the unit, the dashboard all name things that there are."""

import configparser
import importlib
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from specinfer.async_llm import AsyncLLM
from specinfer.cli.app import app
from specinfer.cli.flags import flags_of
from specinfer.cli.options import ServedOptions
from specinfer.cli.replicas import ReplicaOptions
from specinfer.core.limits import QueueLimits
from specinfer.engine.tally import Tally
from specinfer.llm import LLM
from specinfer.server import metrics
from specinfer.server.app import create_app
from specinfer.server.config import ServerConfig
from specinfer.server.keys import read_key_file
from specinfer.server.metrics import Metrics
from specinfer.server.replicas import metrics as replica_metrics
from specinfer.server.replicas.metrics import RouterMetrics
from specinfer.server.state import ServerState

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
DOCKERFILES = ("Dockerfile.cpu", "Dockerfile.cuda")
SECRET = re.compile(r"(KEY|TOKEN|PASSWORD|SECRET)=(?!/)", re.IGNORECASE)  # a path may be named


def settings() -> set[str]:
    """The names of all settings of serve."""
    return {
        flag.name
        for kind in (ServedOptions, ServerConfig, QueueLimits, ReplicaOptions)
        for flag in flags_of(kind) or ()
    }


def variables() -> set[str]:
    """The environment variables that serve reads."""
    return {f"SPECINFER_{name.upper()}" for name in settings()}


def flags() -> set[str]:
    command: Any = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return {flag for option in command.params for flag in option.opts}


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


# ------------------------------------------------------------------------------------- images


def instructions(name: str) -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (DEPLOY / name).read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").split("\n")
    return [(word, " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_runs_as_nobody_and_reports_its_health(name: str) -> None:
    made = instructions(name)
    last = dict(made[max(i for i, (word, _) in enumerate(made) if word == "FROM") :])
    assert last["USER"] == "10001"
    assert last["STOPSIGNAL"] == "SIGTERM"
    assert json.loads(last["ENTRYPOINT"]) == ["specinfer", "serve"]
    check = last["HEALTHCHECK"]
    program = json.loads(check[check.index("CMD ") + 4 :])
    assert program[:2] == ["python", "-c"]
    compile(program[2], name, "exec")
    assert "'/health'" in program[2]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_names_settings_and_files_that_there_are(name: str) -> None:
    made = instructions(name)
    named = {variable for word, rest in made if word == "ENV" for variable in re.findall(r"SPECINFER_\w+", rest)}
    assert named
    assert named <= variables()
    for word, rest in made:
        if word == "COPY" and "--from" not in rest:
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources)
            assert all(f"!{source}" in (ROOT / ".dockerignore").read_text().split() for source in sources)


@pytest.mark.parametrize("name", [*DOCKERFILES, "compose.yaml", "prometheus.yml", "specinfer.service", "config.yaml"])
def test_no_secret_is_part_of_a_file(name: str) -> None:
    assert not SECRET.search((DEPLOY / name).read_text())


def test_all_images_can_be_named_by_digest() -> None:
    """The arguments of the images and of the composition have the same names and tags."""
    services, tags = load("compose.yaml")["services"], {}
    for service in services.values():
        named = service["build"]["args"] if "build" in service else {"image": service["image"]}
        for argument, value in named.items() - {("TORCH_CUDA", "${TORCH_CUDA:-cu130}")}:
            variable, tag = re.fullmatch(r"\$\{([A-Z]+_IMAGE):-([\w./:-]+)\}", value).groups()  # type: ignore[union-attr]
            assert argument in ("image", variable)
            tags[variable] = tag
    assert all(name in (ROOT / "docs/deploy.md").read_text() for name in tags)
    for name in DOCKERFILES:
        (word, argument), *rest = instructions(name)
        variable, tag = argument.split("=")
        assert (word, tags[variable]) == ("ARG", tag)
        bases = [base.split()[0] for word, base in rest if word == "FROM"]
        assert set(bases) == {f"${{{variable}}}"}


@pytest.mark.parametrize(("name", "build"), [("Dockerfile.cpu", "cpu"), ("Dockerfile.cuda", "${TORCH_CUDA}")])
def test_an_image_takes_the_build_of_pytorch_for_its_device(name: str, build: str) -> None:
    installs = [rest for word, rest in instructions(name) if word == "RUN" and "pip install" in rest]
    assert len(installs) == 3
    assert "--no-deps --require-hashes --requirement image.txt" in installs.pop(0)
    pytorch, needed = installs[0].split(" && ")[:2]  # before the package, which takes any
    assert f"/whl/{build}" in pytorch
    assert "--no-deps" in pytorch  # that index lacks the versions that are pinned of what PyTorch needs
    assert "index-url" not in needed
    assert all("--constraint constraints.txt" in install for install in (pytorch, needed))
    assert '--no-deps --no-build-isolation ".[serve]" && pip check' in installs[1], "nothing else is downloaded"


def test_the_image_for_gpus_runs_with_what_triton_builds_launchers_with() -> None:
    """Without a compiler, the C library's headers and Python's, no kernel runs, which costs most of the speed."""
    words = [word for word, _ in instructions("Dockerfile.cuda")]
    last = instructions("Dockerfile.cuda")[len(words) - words[::-1].index("FROM") :]
    (installed,) = (rest for word, rest in last if word == "RUN" and "apt-get install" in rest)
    assert {"gcc", "libc6-dev", "python3-dev"} <= set(installed.split())


# -------------------------------------------------------------------------------- the composition


def test_the_composition_mounts_files_that_there_are_and_gives_little_away() -> None:
    services = load("compose.yaml")["services"]
    for name, service in services.items():
        assert "no-new-privileges:true" in service["security_opt"], name
        assert service["cap_drop"] == ["ALL"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), volume
    for name in ("specinfer", "specinfer-cuda"):
        service = services[name]
        assert service["read_only"]
        assert set(service["environment"]) <= variables() | {"HF_TOKEN"}
        assert (ROOT / service["build"]["dockerfile"]).exists()
        grace, drain = service["stop_grace_period"], service["environment"]["SPECINFER_SHUTDOWN_TIMEOUT"]
        assert float(grace.removesuffix("s")) > float(drain)


def test_what_a_model_on_a_gpu_needs_is_passed_on_by_the_composition() -> None:
    """Compose takes what has no value from the environment or from .env."""
    services = load("compose.yaml")["services"]
    passed_on = {"SPECINFER_DRAFTER", "SPECINFER_GPU_MEMORY_UTILIZATION", "HF_TOKEN"}
    for name in ("specinfer", "specinfer-cuda"):
        assert {key for key, value in services[name]["environment"].items() if value is None} == passed_on
    assert ("ARG", "TORCH_CUDA=cu130") in instructions("Dockerfile.cuda")
    assert "deploy/.env" in (ROOT / ".gitignore").read_text().split()  # it may hold a token


def test_prometheus_asks_the_server_with_a_key_that_can_do_nothing_else() -> None:
    (job,) = load("prometheus.yml")["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["server:8000"]
    services = load("compose.yaml")["services"]
    assert services["specinfer"]["networks"]["default"]["aliases"] == ["server"]
    assert job["authorization"]["credentials_file"] == "/run/secrets/metrics_key"
    assert services["prometheus"]["secrets"] == ["metrics_key"]
    assert services["specinfer"]["secrets"] == ["api_keys"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_keys_that_are_made_as_the_files_say_are_one_for_requests_and_one_for_metrics(tmp_path: Path) -> None:
    lines = [line[1:].strip() for line in (DEPLOY / "compose.yaml").read_text().splitlines() if line.startswith("#")]
    made = "\n".join(line for line in lines if "openssl" in line)
    assert made in (ROOT / "docs/deploy.md").read_text()
    (tmp_path / "deploy").mkdir()
    subprocess.run(["bash", "-c", made], cwd=tmp_path, check=True)
    keys = read_key_file("api_keys.txt", (tmp_path / "deploy/api_keys.txt").read_text())
    assert [sorted(key.roles) for key in keys.values()] == [["admin", "generate", "metrics"], ["metrics"]]
    assert list(keys)[1] == (tmp_path / "deploy/metrics_key.txt").read_text().strip()


# ------------------------------------------------------------------------------- metrics by name


@pytest.fixture(scope="module")
def exposed() -> set[str]:
    """The names of all series that a server may have."""
    with LLM("demo", drafters=["demo", "demo-2"], tree="1", select="hedge", adapt_drafters=True) as llm:
        registries = [Metrics(AsyncLLM(llm), Tally(), "demo").registry, RouterMetrics("demo").registry]
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"], "gauge": [""]}
        families = [family for registry in registries for family in registry.collect()]
        return {family.name + suffix for family in families for suffix in suffixes[family.type]}


def expressions(source: Any) -> list[str]:
    if isinstance(source, dict):
        direct = [value for key, value in source.items() if key == "expr"]
        return direct + [expr for value in source.values() for expr in expressions(value)]
    return [expr for value in source for expr in expressions(value)] if isinstance(source, list) else []


@pytest.mark.parametrize("name", ["grafana/dashboards/specinfer.json", "alerts.yml"])
def test_every_metric_that_is_asked_for_exists(name: str, exposed: set[str]) -> None:
    asked = expressions(load(name))
    assert len(asked) > 5
    source = "".join(Path(str(module.__file__)).read_text() for module in (metrics, replica_metrics))
    for expr in asked:
        named = set(re.findall(r"specinfer:\w+", expr))
        assert named <= exposed, expr
        labels = set(re.findall(r"by \((\w+)\)", expr)) | set(re.findall(r"(\w+)=~?\"", expr))
        unknown = {label for label in labels - {"le", "job", "instance", "replica"} if f'"{label}"' not in source}
        assert not unknown, expr


def test_the_dashboard_shows_all_that_speculation_exposes(exposed: set[str]) -> None:
    shown = " ".join(expressions(load("grafana/dashboards/specinfer.json")))
    for name in sorted(exposed):
        if "spec_decode" in name or "tree_nodes_b" in name or "_nodes_total" in name:
            assert name in shown, name


def test_panels_show_all_replicas_together() -> None:
    """With replicas each series is there once for each of them; what is not gathered would be shown as often."""
    gathered = re.compile(r"(?:sum|avg)(?: by \(([\w, ]+)\))? ?\((?:rate\()?(?=specinfer:)")
    for panel in load("grafana/dashboards/specinfer.json")["panels"]:
        for expr in expressions(panel):
            labels = gathered.findall(expr)
            assert len(labels) == expr.count("specinfer:") or panel["title"] == "Outputs of each replica", expr
            assert "replica" not in labels or panel["title"] == "Outputs of each replica", expr


def test_panels_do_not_overlap() -> None:
    panels = load("grafana/dashboards/specinfer.json")["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_grafana_finds_its_source_and_its_dashboard() -> None:
    (source,) = load("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    text = (DEPLOY / "grafana/dashboards/specinfer.json").read_text()
    assert set(re.findall(r'"uid": "(\w+)"', text)) == {source["uid"], "specinfer"}
    (provider,) = load("grafana/provisioning/dashboards/specinfer.yaml")["providers"]
    volumes = load("compose.yaml")["services"]["grafana"]["volumes"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in volumes


# ------------------------------------------------------------------------------ the unit, settings


def test_the_unit_starts_a_command_that_there_is() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their case
    unit.read(DEPLOY / "specinfer.service")
    words = unit["Service"]["ExecStart"].split()
    assert words[1] == "serve"
    assert {word for word in words if word.startswith("--")} <= flags()
    assert f"XDG_CACHE_HOME=/var/cache/{unit['Service']['CacheDirectory']} " in unit["Service"]["Environment"]
    assert unit["Service"]["NoNewPrivileges"] == unit["Service"]["DynamicUser"] == "yes"
    assert float(unit["Service"]["TimeoutStopSec"]) > load("config.yaml")["shutdown-timeout"]
    # An engine for which memory runs out is started again by the main process, which alone speaks to systemd.
    assert (unit["Service"]["OOMPolicy"], unit["Service"]["Type"]) == ("continue", "notify")
    assert unit["Service"].get("NotifyAccess", "main") == "main"


def test_the_unit_is_installed_from_files_and_an_extra_that_there_are() -> None:
    comments = [line[1:] for line in (DEPLOY / "specinfer.service").read_text().splitlines() if line.startswith("#")]
    words = " ".join(comments).split()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {word for word in words if word.startswith("'.[")} == {"'.[serve]'"}
    assert "serve" in extras
    assert all((ROOT / word).is_file() for word in words if word.startswith("deploy/"))


def test_the_example_settings_are_settings() -> None:
    assert {f"--{name}" for name in load("config.yaml")} <= flags()
    assert {name.replace("-", "_") for name in load("config.yaml")} <= settings()


def _kuberay() -> tuple[Any, Any]:
    """The service and the policy of the network."""
    service, policy = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
    return service["spec"], policy["spec"]


def _pod_templates(service: Any) -> list[Any]:
    cluster = service["rayClusterConfig"]
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_kuberay_names_flags_and_a_builder_that_there_are() -> None:
    service, _ = _kuberay()
    (application,) = yaml.safe_load(service["serveConfigV2"])["applications"]
    assert {f"--{name}" for name in application["args"]} <= flags()
    module, _, name = application["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    for template in _pod_templates(service):
        assert template["spec"]["terminationGracePeriodSeconds"] > float(application["args"]["shutdown-timeout"])


def test_pods_of_kuberay_have_no_privileges() -> None:
    for template in _pod_templates(_kuberay()[0]):
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True
        assert f"USER {context['runAsUser']}" in (DEPLOY / "Dockerfile.cpu").read_text()
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        writable = {volume["name"] for volume in pod["volumes"] if volume["emptyDir"] == {}}
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert not security.get("privileged")
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert mounts.keys() == {"/tmp", "/cache"}
            assert set(mounts.values()) <= writable
            assert container["resources"]["limits"]["memory"]


def test_only_pods_of_the_cluster_reach_rays_ports() -> None:
    service, policy = _kuberay()
    assert policy["policyTypes"] == ["Ingress"]
    labels = policy["podSelector"]["matchLabels"]
    assert labels  # no labels would select the pods of others, too
    for template in _pod_templates(service):
        assert labels.items() <= template["metadata"]["labels"].items()
    everywhere, operator, ingress = policy["ingress"]
    assert everywhere == {"from": [{"podSelector": {"matchLabels": labels}}]}
    ports = {port["name"]: port["containerPort"] for port in _head_ports(service)}
    assert {entry["port"] for entry in operator["ports"]} == {ports["dashboard"], ports["serve"]}
    assert {entry["port"] for entry in ingress["ports"]} == {ports["serve"]}
    for rule in (operator, ingress):
        for origin in rule["from"]:
            assert origin["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]


def _head_ports(service: Any) -> Any:
    return service["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"]


def test_what_health_checks_ask_for_exists() -> None:
    with LLM("demo", drafters=[]) as llm:
        paths = create_app(ServerState(AsyncLLM(llm), ServerConfig(), ("demo",))).openapi()["paths"]
    assert {"/health", "/health/ready"} <= set(paths)


# -------------------------------------------------------------------------------------------- docs


@pytest.mark.parametrize("name", ["serving.md", "deploy.md", "replicas.md", "reference/http.md"])
def test_docs_name_settings_that_there_are(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    of_compose = set(re.findall(r"\$\{(\w+):-", (DEPLOY / "compose.yaml").read_text()))
    assert set(re.findall(r"SPECINFER_[A-Z_]*[A-Z]", text)) <= variables() | of_compose


def test_docs_name_all_paths() -> None:
    text = (ROOT / "docs" / "reference" / "http.md").read_text()
    with LLM("demo", drafters=[]) as llm:
        paths = create_app(ServerState(AsyncLLM(llm), ServerConfig(), ("demo",))).openapi()["paths"]
    for path in paths:
        if "{" not in path:
            assert path.removeprefix("/v1") in text, path
    assert "<!-- table: request_fields -->" in text


@pytest.mark.parametrize("name", ["serving.md"])
def test_docs_name_metrics_that_there_are(name: str, exposed: set[str]) -> None:
    text = (ROOT / "docs" / name).read_text()
    part = text[text.index("## Metrics") : text.index("## Clients")]
    known = {series.removeprefix("specinfer:").removesuffix("_bucket") for series in exposed}
    named = set(re.findall(r"`([a-z_]+)(?:\{[a-z_]+\})?`", part))
    assert len(named) > 10
    assert named <= known
