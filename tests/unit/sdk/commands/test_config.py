"""The config file: which of file, variable and flag counts, and what is said of a file with mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from p2pserve.sdk.cli import PROGRAM_GROUP, main
from p2pserve.sdk.environment import read_config
from p2pserve.sdk.options.config import ConfigReader, options_of, walk_commands

from .parsing import parse

SECRET = "p2p_worker_aGVsbG8"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "p2pserve.toml"
    found.touch(mode=0o600)
    monkeypatch.setenv("P2PSERVE_CONFIG", str(found))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HOME", "BOOTSTRAP", "TOKEN", "TOKEN_FILE", "ADMIN_TOKEN"):
        monkeypatch.delenv(f"P2PSERVE_{name}", raising=False)
    return found


def test_a_flag_counts_before_a_variable_and_that_before_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("[join]\nmax-model-len = 1\n")
    assert parse(["join"]).max_model_len == 1
    monkeypatch.setenv("P2PSERVE_JOIN_MAX_MODEL_LEN", "2")
    assert parse(["join"]).max_model_len == 2
    assert parse(["join", "--max-model-len", "3"]).max_model_len == 3


@pytest.mark.parametrize("variable", ["P2PSERVE_JOIN_MAX_NUM_BATCHED_TOKENS", "P2PSERVE_JOIN_MAX_BATCHED_TOKENS"])
def test_a_variable_is_called_as_the_flag_is(
    variable: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "1024")
    assert parse(["join"]).max_batched_tokens == 1024
    assert main(["config", "check"]) == 0
    capsys.readouterr()
    assert main(["config", "show", "join", "--format", "json"]) == 0
    settings = {each["setting"]: each for each in json.loads(capsys.readouterr().out)["settings"]}
    assert settings["max-num-batched-tokens"]["where"] == variable


def test_a_section_counts_before_the_top(file: Path) -> None:
    file.write_text("codec = 'raw'\nsite = 'fra'\n[join]\ncodec = 'fp8'\n")
    assert (parse(["join"]).codec, parse(["bootstrap"]).codec) == ("fp8", "raw")
    assert parse(["join"]).site == parse(["bootstrap"]).site == "fra"


def test_sections_of_commands_below_others(file: Path) -> None:
    file.write_text("[inspect]\ntimeout-s = 7\n[inspect.path]\ntimeout-s = 8.5\nmegabytes = 3\n")
    with PROGRAM_GROUP.make_context("p2pserve", ["inspect", "plan"]) as root:
        group = PROGRAM_GROUP.get_command(root, "inspect")
        assert isinstance(group, click.Group)
        with group.make_context("inspect", ["plan"], parent=root) as context:
            plan, path = group.commands["plan"], group.commands["path"]
            assert plan.make_context("plan", [], parent=context).params["timeout_s"] == 7.0
            assert path.make_context("path", ["a", "b"], parent=context).params["timeout_s"] == 8.5


def test_values_reach_every_kind_of_option(file: Path) -> None:
    text = """
        home = "state"
        bootstrap = ["p2p_client_x", "203.0.113.8:4001"]
        [serve]
        served_model_name = "one"
        relay-private = true
        async-scheduling = false
        memory-gib = 12
        api-key-file = "~/keys"
        [generate]
        stop = ["a b", "c"]
        top-p = 0.5
        messages = "-"
    """
    file.write_text(text)
    serve, generate = parse(["serve", "bundled"]), parse(["generate"])
    assert serve.home == file.parent / "state"
    assert (serve.served_model_name, serve.relay_private, serve.async_scheduling) == (("one",), True, False)
    assert (serve.memory_gib, serve.api_key_file) == (12.0, Path("~/keys").expanduser())
    assert (generate.stop, generate.top_p, str(generate.messages)) == (["a b", "c"], 0.5, "-")
    assert generate.bootstrap == "p2p_client_x,203.0.113.8:4001"


def test_the_model_of_serve_and_flags_of_vllm(file: Path) -> None:
    file.write_text(
        """
        [serve]
        model = "bundled"
        vllm = { tool_call_parser = "hermes", enable-auto-tool-choice = true, log-error-stack = false }
        [join.vllm]
        max-logprobs = 5
        allowed-origins = ["*"]
        chat-template = "chat.jinja"
        """
    )
    flags = ("--tool-call-parser=hermes", "--enable-auto-tool-choice", "--no-log-error-stack")
    assert (parse(["serve"]).model, parse(["serve"]).vllm_options) == ("bundled", flags)
    assert parse(["serve", "another"]).model == "another"
    template = f"--chat-template={file.parent / 'chat.jinja'}"
    assert parse(["join"]).vllm_options == ("--max-logprobs=5", '--allowed-origins=["*"]', template)
    assert parse(["bootstrap"]).vllm_options == ()


@pytest.mark.parametrize(
    ("line", "model", "flags"),
    [
        (("--tool-call-parser", "openai"), "bundled", ("--enable-auto-tool-choice", "--tool-call-parser", "openai")),
        (("m", "--tool_call_parser=openai"), "m", ("--enable-auto-tool-choice", "--tool_call_parser=openai")),
        (("--no-enable-auto-tool-choice",), "bundled", ("--tool-call-parser=hermes", "--no-enable-auto-tool-choice")),
        (
            ("--site", "x", "--response-role", "y"),
            "bundled",
            (*("--tool-call-parser=hermes",), "--enable-auto-tool-choice", "--response-role", "y"),
        ),
    ],
)
def test_a_flag_on_the_command_line_counts_before_the_file_s(
    line: tuple[str, ...], model: str, flags: tuple[str, ...], file: Path
) -> None:
    vllm = "vllm = { tool-call-parser = 'hermes', enable-auto-tool-choice = true }"
    file.write_text(f"[serve]\nmodel = 'bundled'\n{vllm}\n")
    found = parse(["serve", *line])
    assert (found.model, found.vllm_options) == (model, flags)


def test_show_has_the_model_and_the_flags(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("[serve]\nmodel = 'bundled'\n[serve.vllm]\ntool-call-parser = 'hermes'\n")
    assert main(["config", "show", "--format", "json"]) == 0
    found = {each["setting"]: each for each in json.loads(capsys.readouterr().out)["settings"]}
    assert (found["model"]["value"], found["vllm"]["value"]) == ("bundled", ["--tool-call-parser=hermes"])
    assert {each["source"] for each in found.values()} == {"file"}


def test_options_that_are_commands_as_well_stand_under_shared(file: Path) -> None:
    file.write_text("[shared]\nbootstrap = 'h:1'\n[bootstrap]\nlisten = '0.0.0.0:9'\n[token.create]\nuses = 2\n")
    assert parse(["status"]).bootstrap == "h:1"
    assert parse(["bootstrap"]).listen == "0.0.0.0:9"
    assert main(["config", "check"]) == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[join]\nmax-modellen = 1", "[join] max-modellen: there is no such option; did you mean max-model-len?"),
        ("[gatway]\nhttp = 'h:1'", "[gatway] there is no such command; did you mean [gateway]?"),
        ("[token.creat]\nuses = 1", "[token.creat] there is no such command; did you mean [create]?"),
        ("max-tokens = 3", "max-tokens: it does not mean the same to every command; write it under [demo], "),
        ("bootstrp = 'h:1'", "bootstrp: there is no such option; did you mean bootstrap?"),
        ("serve = 'x'", "serve: it is a command; write its options under [serve]"),
        ("[generate]\nprompt = 'x'", "[generate] prompt: it is no option; give it on the command line"),
        ("[serve]\nmodel = 4", "[serve] model: 4 is not a text; write it in quotes"),
        ("[serve]\nvllm = { tensor-parallel-size = 2 }", "[serve] vllm: --tensor-parallel-size: --tp says how many"),
        ("[serve.vllm]\nserved-model-name = 'x'", "write it outside of the table, as served-model-name"),
        ("[serve.vllm]\nspeculative_config = { a = 1 }", "--speculative-config: engines do not speculate here yet"),
        ("[serve.vllm]\ntool-call-parsr = 'x'", "no such option; did you mean --tool-call-parser?"),
        ("[serve.vllm]\ntool-call-parser = true", "vllm: --tool-call-parser: it takes a value"),
        ("[serve.vllm]\nenable-auto-tool-choice = 'yes'", "--enable-auto-tool-choice: it is true or false"),
        (
            "[serve]\nvllm = ['--log-error-stack']",
            '[serve] vllm: it is a table: vllm = { tool-call-parser = "hermes" }',
        ),
        (
            "vllm = { response-role = 'x' }",
            "vllm: it does not mean the same to every command; write it under [bootstrap]",
        ),
        ("[shared.vllm]\nresponse-role = 'x'", "vllm: it does not mean the same to every command"),
        ("[join.http]\na = 1", "[join.http] is a section, and the option takes a value"),
        ("[join]\ntp = '2'", '[join] tp: "2" is not a whole number; write it without quotes'),
        ("[join]\ntp = true", "[join] tp: true is not a whole number"),
        ("[join]\ntp = 0", "[join] tp: 0 is less than 1"),
        ("[join]\nmemory-gib = 'all'", '[join] memory-gib: "all" is not a number'),
        ("[join]\nmemory-gib = nan", "[join] memory-gib: nan is not a number from 0 to a million"),
        ("site = 4", "site: 4 is not a text; write it in quotes"),
        ("site = ['a']", "site: it takes one value, and this is a list"),
        ("codec = 'zip'", "codec: 'zip' is not one of"),
        ("relay-private = 'yes'", 'relay-private: "yes" is not true or false'),
        ("[join]\nmax-model-len = 1\nmax_model_len = 2", "it is there twice"),
        ("site = 'a'\n[shared]\nsite = 'b'", "site: it is there twice, at the top and under [shared]"),
        ("[shared.join]\ntp = 1", "[shared.join] a section of a command is not below another: [join]"),
        ("shared = 1", "shared: it is a section"),
        ("[join]\nengine-channel = 3", "[join] engine-channel: there is no such option"),
        ("site = fra", "Invalid value (at line 1, column 8); a line is `key = value`, and texts stand in quotes"),
        ("bootstrap = 'h:1'\n[bootstrap]\n", "stands, as an option, under [shared]"),
    ],
)
def test_a_mistake_is_named_with_its_fix(text: str, says: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(text)
    assert main(["config", "check"]) == 2
    out, err = capsys.readouterr()
    said = out + err
    assert said.count("\n") == 1, said
    assert str(file) in said
    assert says in said
    # The command that it concerns does not run. Others do, if it is in a section of one.
    concerned = (
        "token" if "[token" in text else next((each for each in ("serve", "generate") if f"[{each}" in text), "join")
    )
    arguments = {"token": ["token", "list"], "serve": ["serve", "x"], "generate": ["generate", "x"]}.get(
        concerned, [concerned]
    )
    if "creat]" not in text:
        assert main(arguments) == 2
        assert says in capsys.readouterr().err


def test_other_commands_run_beside_a_wrong_section(file: Path) -> None:
    file.write_text("[bench]\nnonsense = 1\n")
    assert parse(["join", "--tp", "1"]).tp == 1


def test_a_file_that_was_named_and_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--config", str(tmp_path / "none.toml")]) == 2
    assert "none.toml is not there" in capsys.readouterr().err


def test_the_usual_file_need_not_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("P2PSERVE_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["config", "path"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/p2pserve/p2pserve.toml\n"
    assert parse(["join"]).tp is None
    (tmp_path / "p2pserve").mkdir()
    (tmp_path / "p2pserve" / "p2pserve.toml").write_text("tp = 2")
    assert parse(["join"]).tp == 2


def test_show_says_where_each_setting_comes_from(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(f"token = '{SECRET}'\n[join]\ntp = 2\nthreads = 3\napi-key = 'sk-1'\n")
    monkeypatch.setenv("P2PSERVE_JOIN_THREADS", "4")
    assert main(["config", "show", "join", "--format", "json"]) == 0
    said = capsys.readouterr().out
    assert SECRET not in said
    assert "sk-1" not in said
    found = {each["setting"]: each for each in json.loads(said)["settings"]}
    assert {name: (found[name]["value"], found[name]["source"]) for name in ("tp", "threads", "codec", "token")} == {
        "tp": (2, "file"),
        "threads": (4, "variable"),
        "codec": ("kv4", "default"),
        "token": ("set (p2p_worker_...)", "file"),
    }
    assert found["threads"]["where"] == "P2PSERVE_JOIN_THREADS"
    assert found["api-key"]["value"] == ["set"]
    assert main(["config", "show"]) == 0
    said = capsys.readouterr().out
    assert SECRET not in said
    assert "codec" not in said
    assert max(map(len, said.splitlines()[1:])) <= 80


def test_show_says_what_does_not_count(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("bootstrap = 'p2p_client_x'\n[join]\ntoken-file = 'worker'\n")
    assert main(["config", "show", "join", "--format", "json"]) == 0
    found = {each["setting"]: each for each in json.loads(capsys.readouterr().out)["settings"]}
    assert found["bootstrap"]["overruled_by"] == "token-file"
    monkeypatch.setenv("P2PSERVE_TOKEN", SECRET)
    assert main(["config", "show", "join", "--format", "json"]) == 0
    found = {each["setting"]: each for each in json.loads(capsys.readouterr().out)["settings"]}
    assert (found["token-file"]["overruled_by"], found["token"]["overruled_by"]) == ("token", None)


def test_show_of_every_command_agrees_with_what_it_parses(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("timeout-s = 3\nsite = 'fra'\ntp = 2\ncodec = 'raw'\n[sim]\nlose = ['a@1']\n")
    root = click.Context(PROGRAM_GROUP, info_name="p2pserve")
    compared = 0
    for path, command in walk_commands(root, (), PROGRAM_GROUP):
        if path[0] == "config":
            continue
        assert main(["config", "show", *path, "--format", "json"]) == 0
        shown = json.loads(capsys.readouterr().out)["settings"]
        values = ConfigReader(read_config(), root).find_values(path)
        parsed = click.Context(command, root, path[-1], default_map={name: each.value for name, each in values.items()})
        parsed.resilient_parsing = True
        command.parse_args(parsed, [])
        for each in shown:
            option = options_of(command)[each["setting"]]
            assert option.name is not None
            source = parsed.get_parameter_source(option.name)
            assert source is not None
            assert each["source"] == {"DEFAULT": "default", "DEFAULT_MAP": "file"}[source.name]
            if isinstance(each["value"], str | int | float) and each["setting"] not in {"home", "engine"}:
                value = parsed.params[option.name]
                assert each["value"] == (str(value) if isinstance(value, Path) else value)
                compared += 1
    assert compared > 100


def test_variables_that_stand_for_nothing_are_named(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("P2PSERVE_JOIN_MAX_MODELLEN", "4096")
    assert main(["config", "check"]) == 2
    out = capsys.readouterr().out
    assert out == (
        "P2PSERVE_JOIN_MAX_MODELLEN: no option has this variable; did you mean P2PSERVE_JOIN_MAX_MODEL_LEN?\n"
    )


def test_an_unknown_command_is_suggested(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "gatway"]) == 2
    assert "did you mean gateway?" in capsys.readouterr().err


def test_a_file_of_secrets_that_others_may_read_is_warned_of(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("site = 'fra'\n[join]\ntoken = 'p2p_worker_x'\n")
    file.chmod(0o644)
    parse(["bootstrap"])
    assert capsys.readouterr().err == ""
    parse(["join"])
    assert f"chmod 600 {file}" in capsys.readouterr().err


def test_what_is_nearer_to_the_user_counts_of_two_that_say_the_same(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("[join]\nport = 5000\n[serve]\nport = 5000\n")
    assert parse(["join", "--listen", "0.0.0.0:6000"]).port is None
    assert parse(["serve", "x", "--http", "127.0.0.1:6000"]).port is None
    monkeypatch.setenv("P2PSERVE_JOIN_LISTEN", "0.0.0.0:6001")
    assert parse(["join"]).port is None
    assert parse(["join", "--port", "7"]).port == 7
