"""The table of settings against the command line; files, variables and flags against each other."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

import pytest

from kvscope.monitor.base import limits
from kvscope.monitor.probes.publisher import EVENTS_ENDPOINT
from kvscope.monitor.service.service_config import HIDDEN, refuse_what_cannot_run, service_config, setting_lines
from kvscope.monitor.service.settings_file import BadConfiguration, Effective, SettingsLayers, line_of, settings_layers
from kvscope.monitor.service.settings_table import SETTINGS, SettingUser, settings_of
from kvscope.monitor.terminal.cli import main, parser

WHOLE = """\
targets = ["prometheus+http://user:pass@127.0.0.1:9090"]
events = ["tcp://127.0.0.1:5757", "ipc:///run/engine"]
metrics = ["http://127.0.0.1:8000/metrics"]
host = "0.0.0.0"
port = 8766
token = "very secret"
data = "state"
keep_days = 3
keep_bytes = "2G"
look_back = "1d"
memory_budget = "1G"
alert = ["https://example.org/a-secret-path"]
alert_private = true
public_url = "https://ops.example/kvscope"
alert_repeat = "30m"
alert_verdict = "confirmed"
alert_engines_only = true
webhook_secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
archive = "file:///archive"
otlp = "http://127.0.0.1:4318"
nats = ["nats://127.0.0.1:4222"]
nats_tenant = "team-a"
nats_agent = "node-7"
nats_creds = "/etc/hosts"
nats_ca = "/etc/hosts"
nats_cert = "/etc/hosts"
nats_key = "/etc/hosts"
zone = "zone-1"
node = "gpu-7"
service = "chat"
kv_role = "producer"
nats_share = true
otlp_sample = 0.1

[thresholds]
leak.finished-held.grace_s = 30
"stuck.head-of-line.grace_s" = 60.5
"""


def command(name: str) -> argparse.ArgumentParser:
    (commands,) = (a for a in parser(only=(name,))._actions if isinstance(a, argparse._SubParsersAction))
    found = commands.choices[name]
    assert isinstance(found, argparse.ArgumentParser)
    return found


@pytest.mark.parametrize("name", ["serve", "agent", "hub"])
def test_every_flag_has_its_key_and_every_key_its_flag(name: SettingUser) -> None:
    actions = {action.dest: action for action in command(name)._actions if action.dest not in ("help", "config")}
    settings = settings_of(name)
    assert set(actions) == set(settings)
    for key, setting in settings.items():
        action = actions[key]
        assert [setting.option] == (action.option_strings or [action.dest])
        assert action.default is argparse.SUPPRESS
        assert isinstance(action, argparse._AppendAction) == (setting.shape == "list" and bool(action.option_strings))
        assert setting.shape == "switch" or action.type is setting.parse


def effective(tmp_path: Path, text: str, *flags: str, **environment: str) -> Effective:
    (tmp_path / "kvscope.toml").write_text(text)
    parsed = command("serve").parse_args(["--config", str(tmp_path / "kvscope.toml"), *flags])
    layers = settings_layers(parsed)
    return SettingsLayers(layers.flags, layers.path, environment).read()


def test_the_file_of_the_test_has_every_key() -> None:
    assert set(tomllib.loads(WHOLE)) == set(SETTINGS) - {"recording"}


def test_a_key_counts_as_its_flag_does(tmp_path: Path) -> None:
    config = service_config(effective(tmp_path, WHOLE))
    flags = [
        *("prometheus+http://user:pass@127.0.0.1:9090", "--events", "tcp://127.0.0.1:5757"),
        *("--events", "ipc:///run/engine", "--metrics", "http://127.0.0.1:8000/metrics", "--host", "0.0.0.0"),
        *("--port", "8766", "--token", "very secret", "--data", "state", "--keep-days", "3", "--keep-bytes", "2G"),
        *("--archive", "file:///archive", "--look-back", "1d", "--memory-budget", "1G"),
        *("--alert", "https://example.org/a-secret-path"),
        *("--alert-private", "--public-url", "https://ops.example/kvscope"),
        *("--alert-repeat", "30m", "--alert-verdict", "confirmed", "--alert-engines-only"),
        *(
            "--webhook-secret",
            "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            "--otlp",
            "http://127.0.0.1:4318",
            "--otlp-sample",
            "0.1",
        ),
        *("--nats", "nats://127.0.0.1:4222", "--nats-tenant", "team-a", "--nats-agent", "node-7", "--nats-share"),
        *("--zone", "zone-1", "--node", "gpu-7", "--service", "chat", "--kv-role", "producer"),
        *(f"--nats-{name}=/etc/hosts" for name in ("creds", "ca", "cert", "key")),
        *("--set", "leak.finished-held.grace_s=30", "--set", "stuck.head-of-line.grace_s=60.5"),
    ]
    same = service_config(SettingsLayers(settings_layers(command("serve").parse_args(flags)).flags, None, {}).read())
    assert vars(config.settings) == vars(same.settings)
    assert vars(config) | {"settings": None} == vars(same) | {"settings": None}


def test_a_flag_counts_before_a_variable_and_a_variable_before_the_file(tmp_path: Path) -> None:
    text = 'token = "of the file"\nport = 1\nalert = ["https://file.example"]'
    read = effective(tmp_path, text, "--port", "2", KVSCOPE_TOKEN="of a variable", KVSCOPE_DATA="/variable")
    assert (read["token"], read.layers["token"]) == ("of a variable", "environment")
    assert (read["port"], read.layers["port"]) == (2, "flag")
    assert (read["alert"], read.layers["alert"]) == (("https://file.example",), "file")
    assert (read["data"], read.layers["data"]) == (Path("/variable"), "environment")
    assert (read["host"], read.layers["host"]) == ("127.0.0.1", "default")


def test_by_default_the_stream_of_this_machine_is_read(tmp_path: Path) -> None:
    assert service_config(effective(tmp_path, "")).events == (EVENTS_ENDPOINT,)
    assert service_config(effective(tmp_path, "", KVSCOPE_EVENTS="tcp://a:1,tcp://b:2")).events == (
        "tcp://a:1",
        "tcp://b:2",
    )
    assert service_config(effective(tmp_path, "", KVSCOPE_EVENTS="")).events == ()
    assert service_config(effective(tmp_path, 'metrics = ["http://a:1/metrics"]')).events == ()


# -------------------------------------------------------------------- monitor config check

WRONG = {
    'port = "many"': ("1: port", "is not a port"),
    "\n\nprot = 1": ("3: prot", "did you mean port?"),
    "port = [1]": ("1: port", "a list cannot stand here"),
    "port = true": ("1: port", "true cannot stand here"),
    'events = "tcp://127.0.0.1:5757"': ("1: events", 'write a list: events = ["…"]'),
    "alert_private = 1": ("1: alert_private", "write true or false"),
    'public_url = "ops.example"': ("1: public_url", "not the address of a page"),
    'public_url = "https://ops.example?team=a"': ("1: public_url", "neither a query nor a password"),
    "thresholds = 3": ("1: thresholds", "write a table"),
    "[thresholds]\n\nleak.finished-held.grace_s = 'x'": ("1: thresholds", "is not a number"),
    "[thresholds]\n\nleak.finished-held.grce_s = 3": ("3: thresholds", "near it are leak.finished-held.grace_s"),
    "port = 1\nport = 2": ("2: ", "this is not TOML"),
    "port = 1\n\n[": ("3: ", "this is not TOML"),
    "keep_days = 3": ("1: keep_days", "set data, too"),
    "otlp_sample = 0.5": ("1: otlp_sample", "set otlp, too"),
    "otlp_sample = 5": ("1: otlp_sample", "not a share from 0 to 1"),
    'otlp = "nowhere"': ("1: otlp", "grpc://HOST:4317"),
    'host = "0.0.0.0"': ("1: host", "set a token"),
    'metrics = ["nonsense"]': ("1: metrics", "is not an address"),
    'events = ["tcp://127.0.0.1"]': ("1: events", "is not an endpoint"),
    'targets = ["gopher://a"]': ("1: targets", "no source reads this scheme"),
    'targets = ["http://127.0.0.1:8765"]': ("1: targets", "the address of a kvscope service"),
    'alert = ["http://127.0.0.1/hook"]': ("1: alert", "--alert-private allows that"),
    'archive = "s3://a/b"': ("1: archive", "set data, too"),
    'data = "here"\narchive = "ftp://a/b"': ("2: archive", "name s3://BUCKET/PREFIX"),
    "port = 1\nfile_sd = {}": ("2: file_sd", "write [[file_sd]], with two brackets"),
    "\n[[file_sd]]\nfils = []": ("2: file_sd", "unknown field `fils`"),
    "[[file_sd]]\nfiles = ['a']\n[[file_sd]]\nfiles = 'a'": ("3: file_sd", "Expected `array`"),
    "[[file_sd]]\nfiles = ['a']\n[[file_sd]]\nfiles = ['a']": ("3: file_sd", "is there twice"),
    "[[http_sd]]\nurl = 'nonsense'": ("1: http_sd", "is not an address"),
    "[[http_sd]]\nurl = 'http://a'\nrefresh = '0s'": ("1: http_sd", "refresh is 1s or more"),
    "[[dns]]\nnames = ['a']\ntype = 'A'": ("1: dns", "needs a port"),
    "[[dns]]\nnames = ['a']\nnameserver = 'here'": ("1: dns", "nameserver is IP:PORT"),
    "[[dns]]\nnames = ['a']\nnameserver = '10.0.0.1:99999'": ("1: dns", "nameserver is IP:PORT"),
    "[[kubernetes]]\nnamespace = 'a'": ("1: kubernetes", "missing required field `selector`"),
    "recording = ['here']\n[[file_sd]]\nfiles = ['a']": ("1: recording", "alone"),
    'recording = ["here"]\ndata = "there"': ("1: recording", "alone"),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_problem_is_named_with_its_line_key_and_remedy(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVSCOPE_TOKEN", raising=False)
    path = tmp_path / "kvscope.toml"
    path.write_text(text)
    assert main(["config", "check", str(path)]) == 2
    stated = capsys.readouterr()
    place, remedy = WRONG[text]
    assert stated.out == ""
    (line,) = stated.err.splitlines()
    assert line.startswith(f"monitor: {path}:{place}")
    assert remedy in line


def test_every_problem_is_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kvscope.toml"
    path.write_text('port = "x"\nhots = "a"\nkeep_bytes = "much"')
    assert main(["serve", "--config", str(path)]) == 2
    assert [line.split(":")[2] for line in capsys.readouterr().err.splitlines()] == ["1", "2", "3"]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kvscope.toml"
    assert main(["config", "check", str(path)]) == 2
    assert f"{path}: cannot be read: No such file" in capsys.readouterr().err
    path.write_bytes(b"host = 1\n\xff")
    assert main(["config", "check", str(path)]) == 2
    assert f"{path}:2: this is not UTF-8" in capsys.readouterr().err
    path.write_bytes(b"#" * (limits.CONFIGURATION_BYTES + 1))
    assert main(["config", "check", str(path)]) == 2
    assert "has more than 1,048,576 bytes" in capsys.readouterr().err


def test_a_good_file_is_shown_without_its_secrets_and_reads_back_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting in SETTINGS.values():
        monkeypatch.delenv(setting.variable or "NONE", raising=False)
    path = tmp_path / "kvscope.toml"
    path.write_text(WHOLE)
    assert main(["config", "check", str(path)]) == 0
    shown = capsys.readouterr().out
    for secret in ("very secret", "a-secret-path", "whsec_M", "pass", "bearer's"):
        assert secret not in shown
    assert f'alert = ["{HIDDEN}"]  # file' in shown.splitlines()
    secrets = {key: value for key, value in tomllib.loads(WHOLE).items() if SETTINGS[key].is_secret or key == "targets"}
    again = effective(tmp_path, shown)
    before = effective(tmp_path, WHOLE)
    assert {key for key in SETTINGS if again[key] != before[key]} == set(secrets)
    assert next(iter(setting_lines(again))) == 'targets = ["prometheus+http://127.0.0.1:9090"]  # file'


def test_discoveries_are_shown_as_they_can_be_read_again(tmp_path: Path) -> None:
    text = (
        '[[file_sd]]\nfiles = ["a/*.json"]\nlabels = { kvscope_events = "5757" }\n[[http_sd]]\nurl = "http://u:p@a:1/x"'
    )
    read = effective(tmp_path, text)
    assert service_config(read).events == ()
    shown = "\n".join(setting_lines(read))
    assert "u:p" not in shown
    again = effective(tmp_path, shown)
    assert again.discovery[0] == read.discovery[0]
    assert again.discovery[1].name == read.discovery[1].name


def test_the_files_in_the_docs_can_be_used(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "scale-out.md").read_text()
    blocks = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        refuse_what_cannot_run(effective(tmp_path, block, "--data", str(tmp_path)))


def test_a_problem_of_a_flag_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="--keep-days: this limits what --data DIR keeps"):
        service_config(effective(tmp_path, "", "--keep-days", "3"))


def test_a_line_is_found_by_table_and_quoted_key() -> None:
    text = '# port = 1\n[thresholds]\nleak.a = 1\n"leak.b" = 2\n[[file_sd]]\nfiles = []\n'
    assert line_of(text, "thresholds.leak.a") == 3
    assert line_of(text, "thresholds.leak.b") == 4
    assert line_of(text, "thresholds") == 2
    assert line_of(text, "file_sd.files") == 6
    assert line_of(text, "port") == 0
