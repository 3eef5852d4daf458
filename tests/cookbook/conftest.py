from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An embedded service of this test's own, whatever the user's environment says."""
    home = tmp_path / "home"
    monkeypatch.setenv("TRAINSESSION_HOME", str(home))
    monkeypatch.delenv("TRAINSESSION_BASE_URL", raising=False)
    return home
