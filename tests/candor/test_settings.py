"""Settings: flag over variable over default; a wrong value ends the process with one line."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from candor.settings import SettingError, describe, host_port, load, resolve, setting


@dataclass(frozen=True)
class Config:
    """A service."""

    http: str = setting("127.0.0.1:8000", "the door", unit="host:port")
    slots: int = setting(8, "seats", minimum=1, maximum=256)
    share: float = setting(0.5, "a share", minimum=0, maximum=1)
    strict: bool = setting(True, "be strict")
    names: tuple[str, ...] = setting((), "names")
    limit: int | None = setting(None, "a limit", minimum=1)
    runner: str = setting("fast", "how", choices=("fast", "slow"))
    key: str = setting("", "a key", secret=True, choices=("", "k"))


def test_flag_wins_over_variable_and_variable_over_default() -> None:
    environ = {"CANDOR_SLOTS": "3", "CANDOR_SHARE": "0.25", "CANDOR_NAMES": "a, b,,c"}
    config = load(Config, prog="x", argv=["--slots", "5", "--strict", "off"], environ=environ)
    assert (config.slots, config.share, config.strict) == (5, 0.25, False)
    assert (config.names, config.limit, config.http) == (("a", "b", "c"), None, "127.0.0.1:8000")


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("slots", "0", "least allowed value 1"),
        ("slots", "257", "largest allowed value 256"),
        ("slots", "2.5", "not a whole number"),
        ("share", "nan", "allowed value 0"),
        ("strict", "perhaps", "not a boolean"),
        ("runner", "warp", "none of fast, slow"),
        ("limit", "-1", "least allowed value 1"),
    ],
)
def test_a_wrong_value_names_the_setting_the_value_and_the_limit(
    field: str, value: str, word: str
) -> None:
    with pytest.raises(SettingError) as caught:
        resolve(Config, {}, {f"CANDOR_{field.upper()}": value})
    message = str(caught.value)
    assert f"CANDOR_{field.upper()}" in message and value in message and word in message


def test_a_wrong_value_ends_the_process_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(Config, prog="svc", argv=["--slots", "zero"], environ={})
    assert caught.value.code == 2
    assert capsys.readouterr().err == "svc: --slots='zero' is not a whole number\n"


def test_a_secret_is_never_shown() -> None:
    with pytest.raises(SettingError) as caught:
        resolve(Config, {}, {"CANDOR_KEY": "hunter2"})
    assert "hunter2" not in str(caught.value)


def test_help_lists_every_setting_with_unit_default_and_variable(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        load(Config, prog="svc", argv=["--help"], environ={})
    text = " ".join(capsys.readouterr().out.split())
    assert "the door (default 127.0.0.1:8000, host:port; CANDOR_HTTP)" in text
    assert all(flag in text for flag, *_ in describe(Config))


@pytest.mark.parametrize("address", ["8000", "host:", "host:99999", "host:x"])
def test_an_address_without_a_port_is_refused(address: str) -> None:
    with pytest.raises(SettingError, match="host:port"):
        host_port(address)


def test_addresses_are_split_at_the_last_colon() -> None:
    assert host_port("[::1]:8000") == ("::1", 8000)


def test_a_mistyped_variable_stops_the_process_and_is_told_its_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        load(Config, prog="svc", argv=[], environ={"CANDOR_SLTS": "3"})
    assert caught.value.code == 2
    assert capsys.readouterr().err == "svc: CANDOR_SLTS is no setting; did you mean CANDOR_SLOTS?\n"


def test_a_variable_of_a_neighbour_is_nothing_to_complain_about() -> None:
    assert load(Config, prog="svc", argv=[], environ={"CANDOR_LEASE_MS": "5000"}).slots == 8
