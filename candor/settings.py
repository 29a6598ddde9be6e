"""Settings: one frozen dataclass per service, each field an environment variable, a flag and a help line.

    @dataclass(frozen=True)
    class Config:
        http: str = setting("127.0.0.1:8000", "address of the HTTP door", unit="host:port")

    config = load(Config, prog="python -m gateway")

A value comes from the flag, else from `CANDOR_<FIELD>`, else from the default. A wrong one ends the process
with exit code 2 and one line that names it.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import logging
import os
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from candor.variables import VARIABLES

log = logging.getLogger("candor.settings")

C = TypeVar("C")
PREFIX = "CANDOR_"


class SettingError(ValueError):
    """A setting has a value it cannot have; the message names setting, value and what is allowed."""


def setting(
    default: Any,
    help: str,
    *,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
    secret: bool = False,
) -> Any:
    """Declare one setting. Sequences of strings (type `tuple[str, ...]`) are written with commas.

    `minimum` and `maximum` are inclusive. A `secret` is never printed.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "help": help,
            "unit": unit,
            "minimum": minimum,
            "maximum": maximum,
            "choices": tuple(choices),
            "secret": secret,
        },
    )


def env_name(field: str) -> str:
    """The environment variable of a field."""
    return PREFIX + field.upper()


def flag_name(field: str) -> str:
    """The command line flag of a field."""
    return "--" + field.replace("_", "-")


def load(
    cls: Callable[..., C],
    *,
    prog: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> C:
    """Read settings for one process; exits 2 with one clear line on a wrong value."""
    argv = sys.argv[1:] if argv is None else argv
    environ = os.environ if environ is None else environ
    parser = _parser(cls, prog)
    given = vars(parser.parse_args(argv))
    try:
        check_variables(environ, [row[1] for row in describe(cls)])
        return resolve(cls, given, environ)
    except SettingError as error:
        parser.exit(2, f"{prog}: {error}\n")


def check_variables(environ: Mapping[str, str], own: Sequence[str] = ()) -> None:
    """Refuse a CANDOR_ variable that nobody reads, if it looks like one that is meant to be read.

    Raises SettingError. A process sees its neighbours' variables too, so it knows all their names.
    """
    known = {*VARIABLES, *own}
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            if close:
                raise SettingError(f"{name} is no setting; did you mean {close[0]}?")
            # Before logs are set up, so the message alone must say it.
            log.warning("%s is no setting", name)


def resolve(
    cls: Callable[..., C], given: Mapping[str, str | None], environ: Mapping[str, str]
) -> C:
    """Build the settings from flag texts and environment. Raises SettingError."""
    values = {}
    kinds = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        text, source = given.get(f.name), flag_name(f.name)
        if text is None:
            text, source = environ.get(env_name(f.name)), env_name(f.name)
        if text is not None:
            values[f.name] = _parse(text, kinds[f.name], f.metadata, source)
    return cls(**values)


def describe(cls: Any) -> list[tuple[str, str, str, str, str]]:
    """(flag, variable, default, unit, help) per setting, for generated documentation."""
    rows = []
    for f in dataclasses.fields(cls):
        default = "" if f.default is None else _show(f.default)
        rows.append(
            (flag_name(f.name), env_name(f.name), default, f.metadata["unit"], f.metadata["help"])
        )
    return rows


def _parser(cls: Any, prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=(cls.__doc__ or "").strip())
    for flag, variable, default, unit, help_text in describe(cls):
        unit = f", {unit}" if unit else ""
        default = f"default {default}" if default else "unset by default"
        text = f"{help_text} ({default}{unit}; {variable})".replace("%", "%%")
        parser.add_argument(flag, dest=flag[2:].replace("-", "_"), metavar="VALUE", help=text)
    return parser


def _show(value: Any) -> str:
    return (
        ",".join(value)
        if isinstance(value, tuple)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


def _parse(text: str, kind: Any, rule: Mapping[str, Any], source: str) -> Any:
    optional = type(None) in typing.get_args(kind)
    if optional:
        (kind,) = (k for k in typing.get_args(kind) if k is not type(None))
        if text == "":
            return None
    shown = "***" if rule["secret"] else repr(text)
    if typing.get_origin(kind) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if kind is bool:
        words = {"1": True, "true": True, "yes": True, "on": True}
        words |= {"0": False, "false": False, "no": False, "off": False}
        if text.lower() not in words:
            raise SettingError(f"{source}={shown} is not a boolean (true or false)")
        return words[text.lower()]
    if kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise SettingError(f"{source}={shown} is not {what}") from None
        low, high = rule["minimum"], rule["maximum"]
        if number != number or (low is not None and number < low):
            raise SettingError(f"{source}={shown} is below the least allowed value {low}")
        if high is not None and number > high:
            raise SettingError(f"{source}={shown} is above the largest allowed value {high}")
        return number
    if rule["choices"] and text not in rule["choices"]:
        raise SettingError(f"{source}={shown} is none of {', '.join(rule['choices'])}")
    return text


def host_port(address: str) -> tuple[str, int]:
    """Split `host:port` (IPv6 hosts in brackets). Raises SettingError."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise SettingError(f"address {address!r} is not host:port")
    return host.strip("[]"), int(port)
