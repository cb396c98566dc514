"""The user's settings of the app, and the TOML file that keeps them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from evener.errors import as_request_error
from evener.system.files import write_atomically

ThemeName = Literal["dark", "light", "contrast"]
FILE_NAME = "settings.toml"


class AlertSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The thresholds of alerts, and what to do when one is raised.

    An alert is raised for a device that is throttled for more than `throttled_percent` of the time,
    and for a training run below `plan_percent` of its plan's samples/s.
    """

    bell: bool = False  # ring the terminal's bell
    command: str = ""  # a program with its arguments, started for each alert
    throttled_percent: Annotated[float, Meta(gt=0, le=100)] = 20.0  # in % of the time
    plan_percent: Annotated[float, Meta(gt=0, le=100)] = 90.0  # in % of the plan's samples/s


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of the app. The fields have the same names as in the TOML file."""

    theme: ThemeName = "dark"
    interval_seconds: Annotated[float, Meta(ge=0.1, le=3600)] = 1.0  # seconds between readings
    graph_seconds: Annotated[float, Meta(ge=1, le=3600)] = 120.0  # least seconds that graphs show
    common_scale: bool = True  # one scale for all devices' graphs
    log_axes: bool = True  # logarithmic axes for a search's curves
    hidden_columns: tuple[str, ...] = ()  # keys of the Monitor's hidden columns
    alerts: AlertSettings = AlertSettings()


def settings_path() -> Path:
    """Return the path of the settings file in the user's configuration directory."""
    import platformdirs

    return Path(platformdirs.user_config_dir("evener")) / FILE_NAME


def load_settings(path: Path) -> tuple[Settings, str]:
    """Read the settings file, and return the settings and an error message or "".

    If the file is missing, unreadable or invalid, returns the default settings. A missing file is
    not an error.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return msgspec.convert(tomllib.loads(text), Settings), ""
    except FileNotFoundError:
        return Settings(), ""
    except (OSError, ValueError) as error:  # msgspec's and tomllib's errors are ValueErrors
        reason = error.strerror if isinstance(error, OSError) else error
        return Settings(), f"The settings in {path} are ignored: {reason}."


def save_settings(path: Path, settings: Settings) -> None:
    """Write the settings that differ from their defaults.

    Raises RequestError if the file can't be written.
    """
    import tomli_w

    changed = _changed(settings, Settings())
    with as_request_error(f"The settings can't be kept in {path}", "They hold until the app ends."):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, tomli_w.dumps(changed).encode())


def _changed(settings: msgspec.Struct, usual: msgspec.Struct) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        before = getattr(usual, name)
        if isinstance(value, msgspec.Struct):
            value = _changed(value, before)
            before = {}
        if value != before:
            found[name] = value
    return found
