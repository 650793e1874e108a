"""The version of kvscope that runs."""

from importlib.metadata import PackageNotFoundError, version


def kvscope_version() -> str:
    """Return the installed version, or "not installed" in a checkout that no environment has installed."""
    try:
        return version("kvscope")
    except PackageNotFoundError:
        return "not installed"
