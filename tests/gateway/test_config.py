"""Settings: a wrong one ends the process with a line that names it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from candor.settings import SettingError, resolve
from gateway.config import Config, template_text


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("CANDOR_HTTP", "nowhere", "nowhere"),
        ("CANDOR_DIALECT", "vllm-9", "CANDOR_DIALECT"),
        ("CANDOR_MAX_BODY_BYTES", "many", "CANDOR_MAX_BODY_BYTES"),
        ("CANDOR_MAX_LOGPROBS", "-1", "CANDOR_MAX_LOGPROBS"),
        ("CANDOR_ROOT_PATH", "x/", "root path"),
        ("CANDOR_RESPONSE_ROLE", "", "role"),
        ("CANDOR_REQUEST_ID_HEADERS", "x y", "header name"),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        resolve(Config, {}, {name: value})


def test_the_process_exits_with_2_on_a_wrong_setting() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "--http", "127.0.0.1:99999"],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert "99999" in done.stderr and len(done.stderr.splitlines()) == 1


def test_keys_and_names_are_lists() -> None:
    config = resolve(Config, {}, {"CANDOR_API_KEY": "a,b", "CANDOR_ALLOWED_ORIGINS": "http://x"})
    assert config.api_key == ("a", "b") and config.allowed_origins == ("http://x",)


def test_a_template_is_a_file_or_one_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages }}\n", encoding="utf-8")
    assert template_text(str(path)) == "{{ messages }}\n"
    assert template_text('{% for m in messages %}{{ m["content"] }}\\n{% endfor %}') == (
        '{% for m in messages %}{{ m["content"] }}\n{% endfor %}'
    )
    assert template_text(None) is None
    with pytest.raises(SettingError, match="neither a file nor a template"):
        template_text("no-such-file.jinja")
