"""Read this process's resident bytes in the host's memory, now and at their peak. Linux only."""

from pathlib import Path


def resident() -> int:
    return status("VmRSS")


def peak() -> int:
    """Read the peak since the process began, or since `forget_peak`."""
    return status("VmHWM")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def status(key: str) -> int:
    """Read a line of /proc/self/status, which counts in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024
