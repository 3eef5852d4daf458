"""Two `trainsession serve` on one database, while the one that has the session is killed, or stopped for a while."""

from __future__ import annotations

from pathlib import Path

from tests.faults.two_servers import trials
from tests.postgres import PostgresServer


def test_a_loop_does_not_notice_that_one_of_two_servers_died_or_hung(
    tmp_path: Path, tiny_model: Path, postgres_server: PostgresServer
) -> None:
    assert trials(tmp_path, str(tiny_model), postgres_server, [2, 3]) == 2
