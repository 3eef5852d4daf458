"""Say how much pip would download for torch, and warn before it is more than 1 GB.

    python requirements/check_download.py <arguments of pip install>

On a terminal the user is asked; elsewhere the warning is printed and the installation goes on.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path

WARN_ABOVE_BYTES = 1_000_000_000
HEAVY_PREFIXES = ("torch", "nvidia", "cuda", "triton")
"""Packages whose sizes are asked for; all others together are small."""

ADVICE = """
WARNING: pip is about to download {gigabytes:.1f} GB, because this torch comes with CUDA.
A CPU build is about 0.2 GB. To choose it, point pip to an index of CPU builds before you go on, for
example the one that https://pytorch.org/get-started/locally shows for "CPU", and run this again:
    PIP_EXTRA_INDEX_URL=<that index> make setup
"""


def resolved_files(arguments: list[str]) -> dict[str, str]:
    """Package name to the address of the file that pip would install."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--report", str(report), *arguments]
        subprocess.run(command, check=True)
        return {
            item["metadata"]["name"].lower(): item["download_info"]["url"]
            for item in json.loads(report.read_text())["install"]
        }


def size_of(address: str) -> int:
    """Bytes of a file; 0 where its server does not say."""
    if address.startswith("file:"):
        path = Path(urllib.request.url2pathname(urllib.parse.urlparse(address).path))
        return path.stat().st_size if path.is_file() else 0
    request = urllib.request.Request(address, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.headers.get("Content-Length") or 0)
    except OSError:  # a server that only pip can talk to: no size, no warning
        return 0


def main() -> int:
    heavy = [url for name, url in resolved_files(sys.argv[1:]).items() if name.startswith(HEAVY_PREFIXES)]
    total = sum(map(size_of, heavy))
    if total <= WARN_ABOVE_BYTES:
        return 0
    print(ADVICE.format(gigabytes=total / 1e9), file=sys.stderr)
    if not sys.stdin.isatty():
        return 0
    return 0 if input("Download it all the same? [y/N] ").strip().lower() in ("y", "yes") else 1


if __name__ == "__main__":
    sys.exit(main())
