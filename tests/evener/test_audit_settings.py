"""Which changes of a loss's settings require a new audit."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from evener.torch.audit.settings import STILL, LossSettings  # noqa: E402


class Layer(torch.nn.Linear):  # type: ignore[name-defined]
    """A layer defined by the program, with a flag and a counter."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.capacity: float | None = None
        self.calls = 0


class Pace:
    limit = 1.0


class Holder:
    """An object such as a trainer, whose class has attributes that all of its instances share."""

    pace = Pace()


def look(settings: LossSettings, times: int, model: Any, **given: Any) -> list[bool]:
    """Return whether each of several checks finds a change, while a counter increases."""
    found = []
    for _ in range(times):
        model.calls += 1
        found.append(settings.have_changed([model], **given))
    return found


def test_a_flag_of_a_layer_is_news_once_and_a_counter_never() -> None:
    settings, model = LossSettings(), Layer()
    assert not any(look(settings, 10, model))
    model.capacity = 1.5
    assert look(settings, 3, model) == [True, False, False]


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (0.5, 0.25),
        (True, False),
        (None, "mean"),
        ([1.0], 1.0),
        (torch.ones(1), torch.ones(1)),
        (Pace(), Pace()),
        (1, True),
    ],
)
def test_a_change_of_one_layer_is_seen_where_all_others_stay(was: Any, now: Any) -> None:
    settings, layers = LossSettings(), torch.nn.Sequential(Layer(), Layer(), Layer())
    layers[1].setting = was
    assert not any(settings.have_changed([layers]) for _ in range(2 * STILL))
    layers[1].setting = now
    changes = [settings.have_changed([layers]) for _ in range(2)]
    assert changes == [not isinstance(was, list), False]


def test_what_changes_all_the_time_is_no_news() -> None:
    settings, model = LossSettings(), Layer()
    look(settings, 1 + STILL, model)
    for step in range(2 * STILL):
        model.capacity = float(step)
        assert settings.have_changed([model]) is (step == 0)


def test_variables_around_a_function_that_is_made_anew_are_followed() -> None:
    settings, model = LossSettings(), Layer()
    options = {"keep": 1.0}
    factor = 0.0

    def make() -> Any:
        return lambda rows: rows * factor * options["keep"]

    for _ in range(2 * STILL):
        assert not settings.have_changed([model], make())
    factor = 0.5
    assert settings.have_changed([model], make())
    for _ in range(2 * STILL):
        assert not settings.have_changed([model], make())
    options["keep"] = 0.25
    assert settings.have_changed([model], make())


def test_an_object_that_a_class_holds_is_followed() -> None:
    settings, model, holder = LossSettings(), Layer(), Holder()
    assert not any(look(settings, 2 * STILL, model, holders=[holder]))
    Pace.limit = 0.7
    try:
        assert settings.have_changed([model], holders=[holder])
    finally:
        Pace.limit = 1.0


def test_variables_of_a_script_are_followed_by_its_code() -> None:
    variables: dict[str, Any] = {"late": False}
    code = compile("loss * late", "train.py", "exec")
    settings, model = LossSettings(), Layer()
    assert not any(look(settings, 2 * STILL, model, code=(code, variables)))
    variables["late"] = True
    assert settings.have_changed([model], code=(code, variables))
