"""serve --replicas on the command line: what is refused before anything is started."""

import importlib.util
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specinfer.cli import replicas
from specinfer.cli.app import app
from specinfer.cli.replicas import ReplicaOptions
from specinfer.cli.serve_replicas import build
from specinfer.core.systems import usable_cpus
from specinfer.server import logs


@pytest.fixture(autouse=True)
def _own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "configure", lambda *_: None)  # of the whole process


def refused(*words: str) -> str:
    """The one line that says why."""
    result = CliRunner().invoke(app, ["serve", "demo", *words])
    assert result.exit_code == 2, result.output
    return result.stderr


def test_replicas_need_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "specinfer.server.replicas.replica_set", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'specinfer[ray]'" in refused("--replicas", "2")


@pytest.mark.parametrize("flag", ["--ray-address=auto", "--replica-cpus=1", "--scale-ttft=1", "--scale-requests=2"])
def test_options_of_replicas_need_replicas(flag: str) -> None:
    assert "works with --replicas" in refused(flag)


@pytest.mark.parametrize(
    "words", [["--nnodes", "2", "--master-addr", "a", "--insecure-cluster"], ["--master-port", "29500"]]
)
def test_a_replica_is_on_one_machine(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "check_installed", lambda: None)
    assert "--nnodes, --node-rank, --master-addr, --master-port: " in refused("--replicas", "2", "-tp", "2", *words)
    assert "-tp must be" in refused("--replicas", "2", "-tp", "0")


def test_replicas_are_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "check_installed", lambda: None)
    assert "--single-process: each replica is a process of its own" in refused("--replicas", "2", "--single-process")


def test_ranks_of_a_replica_share_what_it_is_given() -> None:
    options = ReplicaOptions(replicas="2", replica_cpus=9.0, ray_address="auto")
    assert [options.resources("cpu", ranks).num_threads for ranks in (1, 2, 4, 16)] == [9, 4, 2, 1]
    assert [options.resources("cuda", ranks).gpus for ranks in (1, 4)] == [1, 4]
    assert ReplicaOptions(replicas="2", replica_gpus=2.0, ray_address="auto").resources("cuda", 4).gpus == 2


def test_replicas_fit_the_cores_of_the_machine() -> None:
    cores = usable_cpus()
    options = ReplicaOptions(replicas="1:3")
    assert 3 * options.resources("cpu").cpus <= cores
    assert options.resources("cpu").gpus == 0
    with pytest.raises(ValueError, match="replica_cpus: 3 replicas"):
        ReplicaOptions(replicas="3", replica_cpus=float(cores)).resources("cpu")
    on_cluster = ReplicaOptions(replicas="300", ray_address="auto")
    assert on_cluster.resources("cuda").gpus == 1
    assert on_cluster.resources("cpu").cpus == 1


def test_an_application_for_rays_own_ports_leaves_them_to_ray() -> None:
    with pytest.raises(ValueError, match="port: "):
        build({"model": "demo", "replicas": "2", "port": "8000"})
    with pytest.raises(ValueError, match="API key"):  # others can reach it
        build({"model": "demo", "replicas": "2", "ray-address": "auto"})
    with pytest.raises(ValueError, match="give a number"):
        build({"model": "demo", "insecure": True})
    with pytest.raises(ValueError, match="No such option"):
        build({"model": "demo", "replicass": "2"})


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs specinfer[ray]")
@pytest.mark.distributed
def test_ray_is_started_on_purpose_only() -> None:
    """What asks for it once it has been left must not get another, open one."""
    program = """
from specinfer.server.replicas import replica_set
import ray
try:
    ray.put(1)
except Exception as error:
    print(type(error).__name__, ray.is_initialized())
"""
    environment = os.environ | {"PYTHONPATH": str(Path(replicas.__file__).parents[2])}
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["RaySystemError", "False"]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs specinfer[ray]")
@pytest.mark.filterwarnings("ignore:Using extra keyword:DeprecationWarning")  # of Ray with newer versions of pydantic
def test_our_own_ray_is_for_this_user_and_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import ray_constants

    from specinfer.server.replicas import replica_set

    settings: dict[str, Any] = {}
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    monkeypatch.setattr(replica_set.ray, "init", lambda **given: settings.update(given))
    monkeypatch.setattr(replica_set.serve, "start", lambda **_: None)
    cluster = replica_set.Cluster()
    cluster.join()
    folder = Path(settings["_temp_dir"])
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert settings["include_dashboard"] is False
    assert not ray_constants.ENABLE_RAY_CLUSTER  # its address is that of loopback then
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
    cluster.leave()
    assert not folder.parent.exists()
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    settings.clear()
    replica_set.Cluster("auto").join()
    assert "_temp_dir" not in settings
    assert ray_constants.ENABLE_RAY_CLUSTER


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs specinfer[ray]")
@pytest.mark.filterwarnings("ignore:Using extra keyword:DeprecationWarning")  # of Ray with newer versions of pydantic
def test_an_application_holds_both_deployments() -> None:
    flags: dict[str, Any] = {"model": "demo", "replicas": "1:3", "ray-address": "auto", "insecure": True}
    assert type(build(flags)).__name__ == "Application"


def test_settings_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, read = tmp_path / "serve.yaml", []

    def serve(context: Any, told: Any, _: Any) -> int:
        file.write_text("replicas: '2:3'\nmax-num-seqs: 3\nray-address: auto")
        read.extend([told, replicas.read_again(context)])
        return 0

    monkeypatch.setattr(replicas, "check_installed", lambda: None)
    monkeypatch.setattr(replicas, "serve", serve)
    file.write_text("replicas: '2'\nmax-num-seqs: 5\nray-address: auto")
    result = CliRunner().invoke(app, ["serve", "demo", "--config", str(file), "--max-model-len", "128"])
    assert result.exit_code == 0, result.output
    before, after = read
    assert (before.scaling.max_replicas, before.settings.engine.max_num_seqs) == (2, 5)
    assert (after.scaling.max_replicas, after.settings.engine.max_num_seqs) == (3, 3)
    assert before.settings.engine.max_model_len == after.settings.engine.max_model_len == 128
