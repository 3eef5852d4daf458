"""`python -m trainsession.cli`."""

from __future__ import annotations

from . import app

app()
