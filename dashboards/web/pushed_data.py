"""The component that data pushed by the service arrives in."""

from __future__ import annotations

from typing import ClassVar

from dash.development.base_component import Component


class PushedData(Component):
    """Passes each new `data` to a function of the page, `shows`, in assets/kvscope.js.

    It is no Input of a callback. Dash keeps every value that an Input ever had, to undo it: each second's page, for as
    long as the page is open.
    """

    _namespace = "kvscopePage"
    _type = "PushedData"
    _children_props: ClassVar[list[str]] = []  # type: ignore[misc]
    _base_nodes: ClassVar[list[str]] = ["children"]  # type: ignore[misc]

    def __init__(self, id: str, shows: str) -> None:
        self._prop_names = ["id", "shows", "data"]
        self._valid_wildcard_attributes: list[str] = []
        self.available_properties = self._prop_names
        self.available_wildcard_properties: list[str] = []
        super().__init__(id=id, shows=shows)  # type: ignore[no-untyped-call]
