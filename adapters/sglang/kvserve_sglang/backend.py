"""SGLang's closed list of transfer backends, extended by one member without an edit of SGLang."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

NAME = "kvserve"
ClassHook = Callable[..., Any]


def add_choice() -> None:
    """Let ``--disaggregation-transfer-backend`` accept the name."""
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES, add_disagg_transfer_backend_choices

    if NAME not in DISAGG_TRANSFER_BACKEND_CHOICES:
        add_disagg_transfer_backend_choices([NAME])


def add_member(enum: type[Enum]) -> Enum:
    """The member of ``TransferBackend`` with our name, added in place.

    A replaced Enum would not be seen by modules that hold the old one, and two plugins could not both replace it.
    """
    if NAME in enum._value2member_map_:
        return enum(NAME)
    member: Any = object.__new__(enum)
    member._name_, member._value_, member.__objclass__ = NAME.upper(), NAME, enum
    member._sort_order_ = len(enum._member_names_)
    enum._member_names_.append(member._name_)
    enum._member_map_[member._name_] = member
    enum._value2member_map_[NAME] = member
    type.__setattr__(enum, member._name_, member)
    if enum(NAME) is not member:
        raise TypeError(f"{enum.__name__} did not take the member {NAME!r}")
    return enum(NAME)


def class_hook(member: Enum, classes: Callable[[], dict[str, type]]) -> ClassHook:
    """An AROUND hook for ``get_kv_class``: ours for our member, by the value of ``KVClassType``."""

    def chosen(original: ClassHook, transfer_backend: Enum, class_type: Enum) -> Any:
        if transfer_backend is not member or class_type.value == "kvargs":
            return original(transfer_backend, class_type)
        return classes()[class_type.value]

    return chosen
