"""Laws here don't time what they test: other work on the machine must not fail them."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("evener", deadline=None)
settings.load_profile("evener")
