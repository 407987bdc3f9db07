"""Checks that UCCL itself is not installed. Two packages with one name would mix their files."""

from importlib import metadata
from pathlib import Path

#: Files that only UCCL's distribution contains.
_FILES = ("p2p.*.so", "p2p.so", "ep.*.so", "ep.so", "lib/*.so*", "_rocm_init.py")


def refuse_beside_upstream(folder: Path | None = None) -> None:
    """Raises ``ImportError`` if UCCL itself is installed, too."""
    found = _upstream_files(folder or Path(__file__).parent) or _upstream_distribution()
    if found:
        raise ImportError(
            f"peerway-uccl and UCCL itself both provide the package 'uccl' ({found} belongs to UCCL): "
            "uninstall one of them and reinstall the other"
        )


def _upstream_files(folder: Path) -> str:
    return next((str(file) for pattern in _FILES for file in sorted(folder.glob(pattern))), "")


def _upstream_distribution() -> str:
    try:
        return f"the distribution uccl {metadata.version('uccl')}"
    except metadata.PackageNotFoundError:
        return ""
