"""Types of arguments. They describe arrays of other packages without importing these."""

from __future__ import annotations

from typing import Any, Protocol


class SupportsArrayInterface(Protocol):
    """An array such as NumPy's."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


class SupportsDataPtr(Protocol):
    """A tensor such as torch's."""

    def data_ptr(self) -> int: ...
    def numpy(self) -> Any: ...


class TorchDtype(Protocol):
    """A ``torch.dtype``. A NumPy dtype has no such attribute."""

    @property
    def is_floating_point(self) -> bool: ...
