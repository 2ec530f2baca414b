"""What holds for every command, also for one that is added tomorrow: format, environment, examples, help."""

import re
import shlex
from collections.abc import Iterator

import click
import pytest

from p2pserve.sdk.cli import PROGRAM_GROUP
from p2pserve.sdk.options.catalogue import COMMANDS

Found = tuple[click.Context, click.Command]

WITHOUT_FORMAT = {"completion": "prints a script for a shell"}
"""Commands that know no --format, each with the reason. Every entry must be in use."""

WATCHED = [("topology",), ("status",), ("models", "list")]
"""Commands that show how a network is, which changes: they take --watch."""

SHARED = {
    *("P2PSERVE_HOME", "P2PSERVE_CONFIG", "P2PSERVE_BOOTSTRAP", "P2PSERVE_TOKEN", "P2PSERVE_TOKEN_FILE"),
    "P2PSERVE_ADMIN_TOKEN",
}
"""Variables that stand for an option of several commands."""


def all_commands() -> dict[tuple[str, ...], Found]:
    """Every command that does something, by the words that name it, with the context that it is found in."""

    def walk(group: click.Group, context: click.Context, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None, name
            inner = click.Context(command, info_name=name, parent=context)
            if isinstance(command, click.Group):
                yield from walk(command, inner, (*words, name))
            else:
                found[*words, name] = inner, command
                yield (*words, name)

    found: dict[tuple[str, ...], Found] = {}
    root = click.Context(PROGRAM_GROUP, info_name="p2pserve", auto_envvar_prefix="P2PSERVE")
    assert list(walk(PROGRAM_GROUP, root, ()))
    return found


EVERY = all_commands()
NAMES = [" ".join(words) for words in EVERY]


def options_of(command: click.Command) -> list[click.Option]:
    return [each for each in command.params if isinstance(each, click.Option)]


@pytest.mark.parametrize("words", EVERY, ids=NAMES)
def test_a_command_prints_json_where_asked(words: tuple[str, ...]) -> None:
    formats = [each for each in options_of(EVERY[words][1]) if each.opts == ["--format"]]
    if words[0] in WITHOUT_FORMAT:
        assert not formats
        return
    (given,) = formats
    assert isinstance(given.type, click.Choice)
    assert given.type.choices[1] == "json"
    for same in ("table", "text"):
        assert given.type_cast_value(EVERY[words][0], same) == given.type.choices[0] == given.default


def test_exceptions_are_in_use() -> None:
    assert WITHOUT_FORMAT.keys() <= COMMANDS.keys()


@pytest.mark.parametrize("words", EVERY, ids=NAMES)
def test_every_option_has_a_variable(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Named after the command and the option, or shared between commands; what is in it reaches the option."""
    context, command = EVERY[words]
    prefix = "_".join(("P2PSERVE", *words)).upper().replace("-", "_")
    for each in options_of(command):
        assert each.name is not None
        variable = each.envvar or f"{prefix}_{each.name.upper()}"
        assert isinstance(variable, str)
        assert variable in SHARED or variable.startswith(prefix), variable
        monkeypatch.setenv(variable, "given")
        assert each.resolve_envvar_value(context) == "given", variable
        monkeypatch.delenv(variable)
        assert each.resolve_envvar_value(context) is None


@pytest.mark.parametrize("words", EVERY, ids=NAMES)
def test_options_are_written_alike_and_explained(words: tuple[str, ...]) -> None:
    for each in options_of(EVERY[words][1]):
        for name in (*each.opts, *each.secondary_opts):
            assert re.fullmatch(r"--[a-z0-9]+(-[a-z0-9]+)*", name), name
        if each.hidden:
            continue
        assert each.help, each.opts
        assert not each.help.endswith("."), each.opts
        assert each.is_flag or each.metavar or isinstance(each.type, click.Choice) or each.name == "slo", each.opts


@pytest.mark.parametrize("words", EVERY, ids=NAMES)
def test_examples_are_of_the_command_and_understood(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    command = EVERY[words][1]
    head, _, text = (command.epilog or "").partition("\n")
    assert re.fullmatch("Examples?:", head)
    lines = [
        re.sub(r'^eval "\$\((.*)\)"$', r"\1", line.strip()) for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines()
    ]
    ours = [shlex.split(line, comments=True) for line in lines if "p2pserve" in line]
    assert any(tuple(line[1 : len(words) + 1]) == words for line in ours), "no example of the command itself"
    monkeypatch.setenv("P2PSERVE_BOOTSTRAP", "p2p_client_ksTEs...")
    for program, *arguments in ours:
        assert program == "p2pserve"
        current: click.Command = PROGRAM_GROUP
        context = PROGRAM_GROUP.make_context("p2pserve", list(arguments))
        while isinstance(current, click.Group):
            found = current.get_command(context, arguments.pop(0))
            assert found is not None
            current, context = found, found.make_context(found.name, list(arguments), parent=context)


@pytest.mark.parametrize("words", EVERY, ids=NAMES)
def test_the_help_is_a_sentence_and_fits(words: tuple[str, ...]) -> None:
    context, command = EVERY[words]
    assert command.help
    assert command.help[0].isupper()
    assert command.help.endswith(".")
    context.max_content_width = context.terminal_width = 80
    assert max(map(len, command.get_help(context).splitlines())) <= 80


@pytest.mark.parametrize("words", EVERY, ids=NAMES)
def test_a_mistyped_option_is_suggested(words: tuple[str, ...]) -> None:
    """With an underscore, as in Python."""
    context, command = EVERY[words]
    names = [name for each in options_of(command) for name in each.opts if name.count("-") > 2]
    if not names or command.context_settings.get("ignore_unknown_options"):
        return
    wrong = "--" + names[0].removeprefix("--").replace("-", "_")
    with pytest.raises(click.NoSuchOption) as caught:
        command.parse_args(context, [wrong])
    assert names[0] in caught.value.format_message()


@pytest.mark.parametrize("words", WATCHED)
def test_what_changes_can_be_watched(words: tuple[str, ...]) -> None:
    assert any(each.opts == ["--watch"] for each in options_of(EVERY[words][1]))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_catalogue_says_what_a_command_does(name: str) -> None:
    about = COMMANDS[name].about
    assert about[0].islower()
    assert not about.endswith(".")
