"""Simulated devices as evener asks for them: nothing of this machine is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from evener.errors import RequestError

from ..backend import Backend
from ..listing import Discovery
from ..types import Source, Term
from .machine_file import catalogue, load_machine


class SimulatedDevices(Backend):
    """Devices of the catalogue, or of a machine file."""

    kind = "sim"
    own_memory = False
    simulated = True

    def find(self, terms: Sequence[Term], variables: Mapping[str, str]) -> Discovery:
        """The devices of the catalogue that the terms name, or all of a machine file."""
        files = [term.pick for term in terms if term.pick.lower().endswith(".toml") or "/" in term.pick]
        if files and len(terms) > 1:
            raise RequestError(
                f"The machine file {files[0]!r} can't be combined with other devices.", "Add them to the file."
            )
        machine = load_machine(files[0]) if files else catalogue([term.pick for term in terms])
        limits = (terms[0].limit,) * len(machine.devices) if files else tuple(term.limit for term in terms)
        if any(limits):
            machine = msgspec.structs.replace(machine, limits=limits)
        return Discovery(machine.described(), (), machine)

    def open_source(self, found: Discovery) -> Source:
        """A source whose readings are computed from the machine's physics."""
        from .source import SimulatedSource

        assert found.machine is not None
        return SimulatedSource(found.machine)
