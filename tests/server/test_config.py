"""Settings of the server: where they come from, which goes first, and what is refused."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specinfer.cli.app import app
from specinfer.cli.serve import _keep_files
from specinfer.cli.values import join_dotted
from specinfer.core.limits import TenantLimits
from specinfer.server import process
from specinfer.server.config import ServerConfig
from specinfer.server.keys import ROLES, KeySettings
from specinfer.server.listening import listening
from specinfer.server.process import Service

KEY = "a-long-key-of-one"
Result = Any


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the one who runs the tests."""
    for name in list(os.environ):
        if name.startswith("SPECINFER_") and name != "SPECINFER_NATIVE":
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's process must not fork."""
    monkeypatch.setattr("specinfer.cli.serve.is_supported", lambda: False)


@pytest.mark.parametrize(
    ("words", "is_supervised"),
    [
        ((), True),
        (("--single-process",), False),
        (("--nnodes", "2", "-pp", "2", "--master-addr", "127.0.0.1", "--insecure-cluster"), False),
    ],
)
def test_the_server_has_a_parent_unless_it_is_one_process_by_request_or_one_rank_of_several_machines(
    words: tuple[str, ...], is_supervised: bool, served: list[Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervised = []

    def supervise(work: Callable[[None], int], listener: socket.socket, **options: bool | str | float) -> int:
        supervised.append(listener.getsockname())
        return 0

    monkeypatch.setattr("specinfer.cli.serve.is_supported", lambda: True)
    monkeypatch.setattr("specinfer.cli.serve.supervise", supervise)
    start("demo", "--port", "0", *words)
    assert (len(supervised), len(served)) == ((1, 0) if is_supervised else (0, 1))


def test_files_of_an_engine_that_died_are_kept(tmp_path: Path) -> None:
    trace, steps = tmp_path / "trace.jsonl", tmp_path / "steps"
    for number in (1, 2):
        trace.write_text(f"trace {number}")
        steps.write_text(f"steps {number}")
        _keep_files(str(trace), steps, None)
    trace.write_text("")
    _keep_files(trace, steps, os.devnull)
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {
        "trace.1.jsonl": "trace 1", "trace.2.jsonl": "trace 2", "steps.1": "steps 1", "steps.2": "steps 2",
        "trace.jsonl": "",
    }  # fmt: skip


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Service]:
    """What would be served."""
    services: list[Service] = []

    def run(service: Service, _: object) -> int:
        services.append(service)
        return 0

    monkeypatch.setattr(process, "run", run)
    return services


def start(*words: str, code: int = 0, env: dict[str, str] | None = None) -> Result:
    result = CliRunner().invoke(app, ["serve", *words], env=env)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def refusal(*words: str, **settings: Any) -> str:
    (line,) = start(*words, code=2, **settings).stderr.splitlines()
    assert line.startswith("specinfer: error: ")
    return str(line)


def write(folder: Path, text: str) -> str:
    path = folder / "server.yaml"
    path.write_text(text)
    return str(path)


# ------------------------------------------------------------------------------------------- layers


def test_the_command_line_goes_before_the_environment_before_the_file_before_the_default(
    served: list[Service], tmp_path: Path
) -> None:
    path = write(tmp_path, "port: 1\nmax-num-queued-reqs: 2\nping_seconds: 3\nstream-interval: 4\n")
    env = {"SPECINFER_PORT": "10", "SPECINFER_MAX_NUM_QUEUED_REQS": "20", "SPECINFER_PING_SECONDS": ""}
    shown = start("demo", "--config", path, "--port", "100", env=env).stderr
    (service,) = served
    assert service.config.port == 100
    assert service.limits.max_num_queued_reqs == 20
    assert service.config.ping_seconds == 3  # an empty variable is none
    assert service.config.stream_interval == 4
    assert service.config.shutdown_timeout == 20
    assert "command line: port=100" in shown
    assert "environment: max_num_queued_reqs=20" in shown
    assert "file: ping_seconds=3.0, stream_interval=4" in shown


def test_variables_that_are_no_settings_are_named_without_their_values(served: list[Service]) -> None:
    links = {"SPECINFER_SERVICE_HOST": "10.0.0.1", "SPECINFER_PORT_8000_TCP_ADDR": "10.0.0.1"}
    shown = start("demo", env={"SPECINFER_API_KEYS": KEY, "SPECINFER_TREE": "off"} | links).stderr
    assert "left aside: SPECINFER_API_KEYS (see" in shown
    assert KEY not in shown
    assert "left aside" not in start("demo", env={"SPECINFER_NATIVE": "always", "SPECINFER_TREE": "off"} | links).stderr


def test_a_variable_that_kubernetes_sets_is_not_taken_for_the_port(served: list[Service]) -> None:
    env = {"SPECINFER_PORT": "tcp://10.0.0.1:8000"}
    assert "enableServiceLinks: false" in start("demo", env=env, code=2).stderr
    start("demo", "--port", "8000", env=env)
    assert served[0].config.port == 8000


def test_without_a_model_the_chat_model_is_served_or_the_code_pair(
    served: list[Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Path | None] = [Path("chat.gguf"), None]
    monkeypatch.setattr("specinfer.demo.chat_model.find_chat_model", lambda: found.pop(0))
    assert "is not installed" not in start().stderr
    assert "demo-chat is not installed, so demo" in start().stderr
    assert [(service.model, service.names) for service in served] == [
        ("demo-chat", ("demo-chat",)),
        ("demo", ("demo",)),
    ]


def test_all_kinds_of_values_come_from_each_place(served: list[Service], tmp_path: Path) -> None:
    text = """
model: demo
served-model-name: [one, two]
drafter: [ngram, suffix]
tree: 1,1
no-page: true
no-docs: false
queue-timeout: 1.5
max-num-queued-tokens: 1000
allowed-hosts: [LLM.example]
uds:
"""
    start("--config", write(tmp_path, text))
    env = {
        "SPECINFER_MODEL": "demo",
        "SPECINFER_SERVED_MODEL_NAME": "one two",
        "SPECINFER_DRAFTER": "ngram suffix",
        "SPECINFER_TREE": "1,1",
        "SPECINFER_NO_PAGE": "1",
        "SPECINFER_QUEUE_TIMEOUT": "1.5",
        "SPECINFER_MAX_NUM_QUEUED_TOKENS": "1000",
        "SPECINFER_ALLOWED_HOSTS": "LLM.example",
    }
    start(env=env)
    start(env={"SPECINFER_CONFIG": write(tmp_path, text)})
    words = "--served-model-name one --served_model_name two --drafter ngram --drafter suffix --tree 1,1 --no-page"
    more = "--queue-timeout 1.5 --max_num_queued_tokens 1000 --allowed-hosts LLM.example"
    start("demo", *words.split(), *more.split())
    for service in served:
        assert service.model == "demo"
        assert service.names == ("one", "two")
        names = ("one", "two")
        assert service.config == ServerConfig(page=False, allowed_hosts=("llm.example",), served_model_name=names)
        assert (service.limits.queue_timeout, service.limits.max_num_queued_tokens) == (1.5, 1000)
    assert len(served) == 4


def test_limits_get_through(served: list[Service]) -> None:
    start("demo", "--max-tree-nodes", "7", "--max-headers", "8", "--ping-seconds", "9")
    config = served[0].config
    assert (config.max_tree_nodes, config.max_headers, config.ping_seconds) == (7, 8, 9.0)


def test_the_model_on_the_command_line_goes_first(served: list[Service], tmp_path: Path) -> None:
    start("demo", "--config", write(tmp_path, "model: another"))
    start("demo", env={"SPECINFER_MODEL": "another"})
    assert [service.model for service in served] == ["demo", "demo"]
    assert "name one" in refusal("demo", "--model", "another")
    start()
    assert served[-1].model == "demo-chat", "where none is named"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("prot: 80", "'prot' is not a setting"),
        ("config: other.yaml", "'config' is not a setting"),
        ("help: true", "'help' is not a setting"),
        ("5: 6", "5 is not a setting"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "given twice"),
        ("port: many", "server.yaml: port must be an integer, not 'many'"),
        ("port: 80.5", "port must be an integer"),
        ("port: true", "port must be an integer"),
        ("no-page: maybe", "no-page must be true or false"),
        ("- port", "names and values"),
        ("port: [", "not valid YAML"),
        ("port: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(served: list[Service], tmp_path: Path, text: str, part: str) -> None:
    assert part in refusal("demo", "--config", write(tmp_path, text))
    assert not served


def test_a_file_that_is_not_there_is_named(served: list[Service], tmp_path: Path) -> None:
    assert "No such file" in refusal("demo", "--config", str(tmp_path / "missing.yaml"))
    (tmp_path / "empty.yaml").write_text("")
    start("--config", str(tmp_path / "empty.yaml"))
    assert served[-1].model == "demo-chat"


def test_keys_come_from_all_places_and_are_not_shown(served: list[Service], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"# of the page\n{KEY}-file\n\n{KEY}\n")
    results = [
        start("demo", "--api-key", KEY, "--api-key", f"{KEY}-2", "--api-key-file", str(keys)),
        start("demo", env={"SPECINFER_API_KEY": f"{KEY} {KEY}-2"}),
        start("demo", "--config", write(tmp_path, f"api-key: [{KEY}]")),
    ]
    assert [service.config.api_keys for service in served] == [
        (KEY, f"{KEY}-2", f"{KEY}-file"),
        (KEY, f"{KEY}-2"),
        (KEY,),
    ]
    for result in results:
        assert KEY not in result.output
        assert "api_key=***" in result.stderr


def test_help_has_sections_and_names_variables() -> None:
    shown = start("--help", env={"COLUMNS": "200"}).stdout
    for part in ("Address", "Access", "Limits", "Watching", "Speculation", "SPECINFER_PORT", "--otlp-endpoint"):
        assert part in shown


def test_keys_of_a_file_may_have_roles(served: list[Service], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}-users generate\n{KEY}-prometheus  metrics\n{KEY}-both generate, metrics\n{KEY}\n")
    start("demo", "--api-key-file", str(keys))
    (service,) = served
    assert {key: each.roles for key, each in service.config.key_settings.items() if each.roles != ROLES} == {
        f"{KEY}-users": ("generate",),
        f"{KEY}-prometheus": ("metrics",),
        f"{KEY}-both": ("generate", "metrics"),
    }
    assert len(service.config.api_keys) == 4
    keys.write_text(f"{KEY} administer\n")
    assert f"--api-key-file: {keys}, line 1: 'administer' after a key" in refusal("demo", "--api-key-file", str(keys))
    keys.write_text(f"# of users\n{KEY}\nshort metrics\n")
    assert f"--api-key-file: {keys}, line 3: a key needs" in refusal("demo", "--api-key-file", str(keys))
    keys.write_text(f"{KEY} metrics\n{KEY} generate\n")
    assert f"{keys}, line 2: the key is in an earlier line too" in refusal("demo", "--api-key-file", str(keys))


def test_keys_of_a_file_may_have_names_and_limits(served: list[Service], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(
        f"{KEY}-a generate name=alice max-num-seqs=4 max_num_queued_reqs=0\n{KEY}-b max-tokens-per-minute=600\n"
        f"{KEY}-c max-connections=8 generate, metrics max-incoming-bytes=1000000\n"
    )
    start("demo", "--api-key-file", str(keys))
    (service,) = served
    assert service.config.tenants == {
        "alice": KeySettings(
            name="alice", roles=("generate",), limits=TenantLimits(max_num_seqs=4, max_num_queued_reqs=0)
        ),
        "key-2": KeySettings(limits=TenantLimits(max_tokens_per_minute=600)),
        "key-3": KeySettings(
            roles=("generate", "metrics"), limits=TenantLimits(max_connections=8, max_incoming_bytes=1_000_000)
        ),
    }


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("max-num-seqs=0", "max-num-seqs must be at least 1, not 0"),
        ("max-num-seqs=many", "max-num-seqs must be a whole number, not 'many'"),
        ("max-num-seqs=-1", "max-num-seqs must be a whole number, not '-1'"),
        (
            "max-tokens=5",
            "'max-tokens' is not a setting of a key; use name, max-num-seqs, max-num-queued-reqs, max-tok",
        ),
        ("max-num-seqs=1 max_num_seqs=2", "max-num-seqs is given twice; give it once"),
        ("name=", "name: is empty; write a name after ="),
        ("name=a/b", "name: 'a/b' must be up to 64 letters"),
    ],
)
def test_a_bad_setting_of_a_key_is_named_with_its_line(line: str, part: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"# of users\n{KEY} generate {line}\n")
    shown = refusal("demo", "--api-key-file", str(keys))
    assert f"--api-key-file: {keys}, line 2: {part}" in shown
    assert KEY not in shown


def test_two_keys_have_different_names(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}-a name=key-2\n{KEY}-b\n")
    assert "--api-key-file: two keys have the name key-2" in refusal("demo", "--api-key-file", str(keys))


def test_a_file_of_settings_that_is_missing_is_named_by_its_flag() -> None:
    assert "error: --config: /no/such/file cannot be read: No such file" in refusal("demo", "--config", "/no/such/file")


def test_a_speculative_config_comes_as_json_or_by_its_keys(served: list[Service], tmp_path: Path) -> None:
    flag = "--speculative-config"
    dotted = [f"{flag}.method", "ngram", "--speculative_config.num_speculative_tokens=4", "demo"]
    assert join_dotted(flag, dotted) == ["demo", flag, '{"method": "ngram", "num_speculative_tokens": 4}']
    assert join_dotted(flag, ["demo", "--tree", "1,1"]) == ["demo", "--tree", "1,1"]
    for key in ("num_speculative_tokens", "num-speculative-tokens"):
        assert join_dotted(flag, [f"{flag}.{key}", "4"]) == [flag, '{"num_speculative_tokens": 4}']
    start(*dotted)
    start("demo", "--config", write(tmp_path, "speculative-config: {method: ngram, num_speculative_tokens: 4}"))
    assert "choose one" in refusal(*dotted, f"{flag}={{}}")
    assert "a key and a value" in refusal("demo", f"{flag}.method")
    assert "'x' is not known" in refusal("demo", f"{flag}.x", "1")


# ------------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--port", "65536"], "port must be from 0 to 65535"),
        (["--host", "0.0.0.0"], "there is no API key"),
        (["--host", "192.168.1.1"], "--insecure"),
        (["--host", "::"], "there is no API key"),
        (["--api-key", "short"], "at least 8"),
        (["--api-key", "with a space in it"], "--api-key"),
        (["--api-key-file", "/no/such/file"], "--api-key-file"),
        (["--max-body-bytes", "0"], "--max-body-bytes must be at least 1"),
        (["--body-timeout", "0"], "--body-timeout"),
        (["--body-timeout", "nan"], "--body-timeout"),
        (["--queue-timeout", "-1"], "--queue-timeout"),
        (["--request-timeout", "inf"], "--request-timeout"),
        (["--max-num-queued-reqs", "-1"], "--max-num-queued-reqs"),
        (["--max-num-queued-tokens", "0"], "--max-num-queued-tokens"),
        (["--log-level", "loud"], "--log-level must be one of"),
        (["--root-path", "llm"], "--root-path"),
        (["--otlp-endpoint", "localhost:4318"], "--otlp-endpoint"),
        (["--trace", "/nowhere/trace.jsonl"], "trace: /nowhere/trace.jsonl cannot be written"),
        (["--ssl-certfile", "cert.pem"], "--ssl-certfile and --ssl-keyfile"),
        (["--allowed-origins", "chat.example.org"], "--allowed-origins"),
        (["--chat-template", "/no/such/file"], "--chat-template"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_a_bad_setting_is_named_in_one_line(words: list[str], part: str) -> None:
    assert part in refusal("demo", *words)


def test_secrets_do_not_show_in_refusals() -> None:
    assert "hush" not in refusal("demo", "--api-key", "hush hush hush")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_this_machine_needs_no_key(host: str) -> None:
    ServerConfig(host=host)


def test_other_machines_need_a_key_or_a_word() -> None:
    for more in ({"api_keys": (KEY,)}, {"insecure": True}, {"uds": "/run/specinfer.sock"}):
        ServerConfig(host="0.0.0.0", **more)  # type: ignore[arg-type]


def test_a_server_that_is_open_to_all_logs_a_warning(served: list[Service]) -> None:
    assert "no key is asked for" in start("demo", "--host", "0.0.0.0", "--insecure").stderr
    for words in (["--insecure"], ["--host", "0.0.0.0", "--api-key", KEY]):
        assert "no key is asked for" not in start("demo", *words).stderr


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs both kinds of addresses")
def test_all_addresses_are_those_of_both_families() -> None:
    with listening(ServerConfig(host="::", port=0, insecure=True)) as listener:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, listener.getsockname()[1]), 5).close()


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        shown = start("demo", "--port", str(taken.getsockname()[1]), code=2).stderr
    (line,) = [line for line in shown.splitlines() if "error:" in line]
    assert "in use" in line


def test_a_certificate_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.pem")
    words = ["--port", "0", "--ssl-certfile", missing, "--ssl-keyfile", missing]
    (line,) = [line for line in start("demo", *words, code=2).stderr.splitlines() if "error:" in line]
    assert "--ssl-certfile" in line


def test_what_loading_refuses_is_one_line(tmp_path: Path) -> None:
    for words, part in (((str(tmp_path),), str(tmp_path)), (("demo", "--tree", "zigzag"), "tree")):
        shown = start(*words, "--port", "0", code=2).stderr
        (line,) = [line for line in shown.splitlines() if line.startswith("specinfer: error:")]
        assert part in line
