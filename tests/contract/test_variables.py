"""The list of all CANDOR_ variables is what the services and the command read."""

from __future__ import annotations

import re
from pathlib import Path

import engine.config
import gateway.config
import scheduler.config
import tokenizer_svc.config
from candor.settings import describe
from candor.variables import VARIABLES

ROOT = Path(__file__).parents[2]
CONFIGS = (gateway.config, scheduler.config, engine.config, tokenizer_svc.config)


def read() -> set[str]:
    """Every variable that some process reads: settings by declaration, the rest by name in the code."""
    settings = {row[1] for module in CONFIGS for row in describe(module.Config)}
    sources = [
        *ROOT.glob("candor/**/*.py"),
        *ROOT.glob("engine/**/*.py"),
        *ROOT.glob("gateway/**/*.py"),
    ]
    named = {
        name
        for path in [*sources, *ROOT.glob("scheduler/**/*.py"), *ROOT.glob("tokenizer_svc/**/*.py")]
        if path.name != "variables.py"
        for name in re.findall(r'"(CANDOR_[A-Z_]+[A-Z])"', path.read_text())
    }
    return settings | named


def test_the_list_is_complete_and_has_nothing_else() -> None:
    assert sorted(VARIABLES) == sorted(read())
