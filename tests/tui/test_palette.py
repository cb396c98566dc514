"""Every key of a screen is in the palette, is found by its words, and does what the key does."""

from __future__ import annotations

from typing import Any

import pytest
from textual.command import CommandPalette

from evener.tui.palette import APP_KEYS, AppProvider, KeysProvider, offered_keys
from tests.support.pilots import open_form, text, until


async def _found(app: Any, query: str) -> list[str]:
    provider = KeysProvider(app.screen)
    return [str(hit.prompt) async for hit in provider.search(query)]


@pytest.mark.parametrize("screen", ["1", "2", "3", "4"])
async def test_every_key_is_found_by_its_words(app_of: Any, screen: str) -> None:
    app = app_of()
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "GPU:0" in text(app, "#devices"), "the devices")
        await pilot.press(screen)
        await pilot.pause()
        keys = list(offered_keys(app.screen))
        assert keys
        for offered in keys:
            description = offered.binding.description
            assert any(description in each for each in await _found(app, description))
            words = [word for word in description.split() if len(word) > 3] or [description]
            hits = [each for word in words[:1] for each in await _found(app, word)]
            assert any(description in each for each in hits), f"by {words[0]} alone"


async def test_what_every_screen_can_do_is_found_with_its_key(app_of: Any) -> None:
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "GPU:0" in text(app, "#devices"), "the devices")
        provider = AppProvider(app.screen)
        titles = [command.title for command in app.get_system_commands(app.screen)]
        assert {*APP_KEYS} <= {*titles}
        for title in titles:
            word = title.split()[-1].lower()
            found = {hit.text: str(hit.prompt) async for hit in provider.search(word)}
            assert title in found, f"by {word} alone"
            assert found[title].split()[0] == APP_KEYS.get(title, title.split()[0])


async def test_keys_of_a_result_are_found_by_their_words(app_of: Any, searches: Any) -> None:
    """The palette opens over a result, with the keys that it has then."""
    app = app_of(session_maker=searches)
    async with app.run_test(size=(80, 24)) as pilot:
        await open_form(pilot)
        await pilot.press("ctrl+s")
        await until(pilot, lambda: app.balance.finished is not None, "the result")
        await pilot.pause()
        keys = list(offered_keys(app.screen))
        assert {"Write the plan", "Report", "New search"} <= {
            each.binding.description for each in keys
        }
        for offered in keys:
            description = offered.binding.description
            assert any(description in each for each in await _found(app, description))


@pytest.mark.parametrize(
    ("screen", "query", "hit"),
    [
        ("1", "sample faster", "Read more often"),
        ("1", "kill", "Signal"),
        ("1", "zoom", "Longer time in graphs"),
        ("2", "export", "Write the plan"),
        ("2", "resume", "Continue"),
        ("2", "html", "Report"),
        ("2", "axes", "Linear or log axes"),
    ],
)
async def test_keys_are_found_by_words_that_people_use(
    app_of: Any, searches: Any, screen: str, query: str, hit: str
) -> None:
    app = app_of(session_maker=searches)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "GPU:0" in text(app, "#devices"), "the devices")
        await pilot.press(screen)
        if screen == "2":
            await until(pilot, lambda: "[x] GPU:1" in text(app, "#pick-devices"), "the form")
            await pilot.press("ctrl+s")
            await until(pilot, lambda: app.balance.ended, "the result")
            await pilot.pause(0.2)
        assert any(hit in each for each in await _found(app, query))


async def test_a_command_does_what_its_key_does(app_of: Any) -> None:
    app = app_of()
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "GPU:0" in text(app, "#devices"), "the devices")
        await pilot.press("ctrl+p")
        await until(pilot, lambda: isinstance(app.screen, CommandPalette), "the palette")
        await pilot.press(*"pause")
        await pilot.pause(1.0)
        await pilot.press("enter")
        await until(pilot, lambda: "paused" in text(app, "#host"), "the pause")
        assert await _found(app, "signal"), "keys of a panel without the focus, too"
        assert not await _found(app, "delete"), "keys of other screens don't work here"


async def test_keys_are_spelled_as_on_every_page(app_of: Any) -> None:
    app = app_of()
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        await until(pilot, lambda: "Ctrl-S Start" in text(app, "#keys"), "the form's keys")
        assert "^" not in text(app, "#keys")


async def test_what_has_no_effect_is_not_offered(app_of: Any) -> None:
    app = app_of(readonly=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "GPU:0" in text(app, "#devices"), "the devices")
        assert not await _found(app, "signal")
