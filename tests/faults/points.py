"""Named instants at which a process can be killed: just before a line of the product runs.

No code of the product knows of it. In a nursery (`tests.faults.nursery`) the modules below are compiled with a call
of `reached` before those lines. It counts, and, where it was told to, kills its process with SIGKILL, which nothing
in it can catch.

Environment of a process:

    TRAINSESSION_CRASH_AT    ["name", k], ... as JSON: die when the point is reached the k-th time, one after the other
    TRAINSESSION_CRASH_DIR   which of them happened (``fired-0``, ...), shared by all processes and restarts of a trial;
                             ``hits-0`` has a line for each point reached before the first death, ``hits-1`` after it
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

import trainsession

AT = "TRAINSESSION_CRASH_AT"
DIRECTORY = "TRAINSESSION_CRASH_DIR"
SOURCE = Path(trainsession.__file__).parent


@dataclass(frozen=True)
class Point:
    """Before the first statement of a function, or before the ``nth`` one of it with this text."""

    name: str
    file: str
    function: str
    before: str = ""
    nth: int = 0


POINTS = [
    # What a call goes through.
    Point("accept.entered", "service/submission.py", "Submission._accept"),
    Point("accept.body_kept", "service/submission.py", "Submission._accept", "accepted = await self._log.accept("),
    Point("accept.in_transaction", "service/log.py", "OperationLog.accept.<locals>.write", "_INSERT.run("),
    Point("accept.committed", "service/submission.py", "Submission._accept", "session.pending[accepted.seq] ="),
    Point("accept.before_reply", "service/submission.py", "Submission._accept", "return accepted.operation_id", 1),
    Point("samples.body_kept", "service/sample_submission.py", "SampleSubmission._log_samples", "logged = await"),
    Point("samples.committed", "service/sample_submission.py", "SampleSubmission._log_samples", "if logged.earlier"),
    Point("samples.handed_over", "service/samples.py", "Samples._feed", "handle.sample("),
    Point("samples.drawn", "service/samples.py", "Samples._finish"),
    Point("samples.written", "service/samples.py", "Samples._write_result", "self._end(run"),
    Point("samples.streamed", "service/samples.py", "Samples.stream", "position += 1"),
    Point("session.committed", "service/sessions.py", "Sessions.create", "if new:"),
    Point("session.attached", "service/sessions.py", "Sessions.attach", "for row in withdrawn"),
    Point("poll.entered", "service/outcomes.py", "Outcomes.poll"),
    Point("poll.answered", "service/outcomes.py", "Outcomes.poll", "return Results("),
    # The database and the blobs.
    Point("commit.before", "store/database.py", "Database._attempt", "transaction.commit()"),
    Point("commit.after", "store/database.py", "Database._attempt", "return None"),
    Point("blob.before", "store/blobs_local.py", "LocalBlobs.put", "self._write("),
    Point("blob.written", "store/blobs_local.py", "LocalBlobs._write", "self._fsync(descriptor)"),
    Point("blob.synced", "store/blobs_local.py", "LocalBlobs.put", "self._publish("),
    Point("blob.linked", "store/blobs_local.py", "LocalBlobs._publish", "self._fsync_directory()"),
    Point("blob.published", "store/blobs_local.py", "LocalBlobs._publish", "source.unlink()"),
    Point("blob.named", "store/blobs_local.py", "LocalBlobs.put", "return Blob("),
    Point("blob.deleted", "store/blobs_local.py", "LocalBlobs.delete"),
    # The end of an operation.
    Point("complete.entered", "service/completion.py", "Completion.complete"),
    Point("complete.result_kept", "service/completion.py", "Completion._write_end", "await self._log.finish(", 1),
    Point("complete.in_transaction", "service/ledger.py", "settle", "if ending.charges:"),
    Point("complete.charged", "service/ledger.py", "settle", "if ending.refund is not None:"),
    Point("complete.before_reply", "service/completion.py", "Completion.complete", "self._outcomes.publish(result)"),
    # Checkpoints and snapshots.
    Point("save.captured", "service/runner.py", "Runner._save", "return Outcome(later=publish)"),
    Point("save.file", "service/checkpoints.py", "Checkpoints.publish", "blobs[file_name] = await"),
    Point("save.published", "service/runner.py", "Runner._save.<locals>.publish", 'return Outcome(value={"path"'),
    Point("save.before_row", "service/checkpoints.py", "Checkpoints.publish.<locals>.insert", "sa.insert(checkpoints)"),
    Point("snapshot.before_capture", "service/recovery.py", "Recovery.snapshot", "state = await handle.call("),
    Point("snapshot.captured", "service/recovery.py", "Recovery.snapshot", "await pool.save("),
    Point("snapshot.blob_kept", "service/recovery.py", "Recovery._write", "if before:"),
    Point("snapshot.replaced", "service/recovery.py", "_replace", "covered = sa.and_("),
    Point("frozen.captured", "service/frozen.py", "FrozenPool._save", "data = await"),
    Point("frozen.blob_kept", "service/frozen.py", "FrozenPool._save", "surplus = await"),
    Point("frozen.written", "service/frozen.py", "FrozenPool._save", "resident.saved = True"),
    Point("frozen.brought_back", "service/frozen.py", "FrozenPool.acquire", 'await handle.call("add_snapshot"'),
    # Coming back.
    Point("recovery.queued", "service/recovery.py", "Recovery.queue", "session.next_run = 1 if"),
    Point("recovery.rewound", "service/recovery.py", "Recovery.rewind", "session.lost = False"),
    Point("recovery.read", "service/recovery.py", "Recovery.bring_in", 'await handle.call("add_adapter"'),
    Point("recovery.restoring", "service/recovery.py", "Recovery.bring_in", 'await handle.call("restore"'),
    Point("recovery.resident", "service/recovery.py", "Recovery.bring_in", "session.resident = True"),
    Point("recovery.replayed", "service/lane.py", "Lane._settle", "if outcome.error is not None and session.fatal"),
    # The engine's process.
    Point("engine.loaded", "runtime/worker.py", "_serve", 'send("ready"'),
    Point("engine.call", "runtime/worker.py", "_serve.<locals>.call", 'send("done"'),
    Point("engine.add_adapter", "engine/engine.py", "LocalEngine.add_adapter", "self._trained[adapter_id] ="),
    Point("engine.forward", "engine/trainer.py", "Trainer._forward", "h_TE = self.model.hidden("),
    Point("engine.forward_kept", "engine/trainer.py", "Trainer._run_kept", "self._kept[forward_id] ="),
    Point("engine.backward", "engine/trainer.py", "Trainer._flow", "torch.autograd.backward("),
    Point("engine.in_backward", "engine/linear.py", "_MultiLoraProducts.backward", "dlow_SR ="),
    Point("engine.backward_done", "engine/trainer.py", "Trainer._collecting", "finished = True"),
    Point("engine.gradient", "engine/trainer.py", "Trainer._collecting", "parameter.grad = new if"),
    Point("engine.step", "engine/optim.py", "optim_step", "step = state.step + 1"),
    Point("engine.moments", "engine/optim.py", "optim_step", "torch._foreach_addcmul_(exp_avg_sq"),
    Point("engine.parameter", "engine/optim.py", "optim_step", "parameter.grad = None"),
    Point("engine.stepped", "engine/optim.py", "optim_step", "state.exp_avg, state.exp_avg_sq, state.step ="),
    Point("engine.capture", "engine/engine.py", "LocalEngine.capture", "return AdapterState("),
    Point("engine.freeze", "engine/engine.py", "LocalEngine.freeze", "self._snapshots[snapshot_id] ="),
    Point("engine.restore", "engine/engine.py", "LocalEngine.restore", "parameter.grad = gradient"),
    Point("engine.prefill", "engine/sampler/sampler.py", "Sampler._prefill"),
    Point("engine.decode", "engine/sampler/sampler.py", "Sampler._decode"),
    Point("engine.token", "engine/sampler/sampler.py", "Sampler._append", "sample.output.append("),
]


def instrumented(file: str) -> ast.Module:
    """The module with a call of ``__crash_point__(name)`` before each of its points.

    Raises:
        LookupError: a point's function or text is not there any more.
    """
    text = (SOURCE / file).read_text()
    tree, source = ast.parse(text), text.splitlines()
    functions = dict(_functions(tree, ""))
    places: list[tuple[list[ast.stmt], ast.stmt, str]] = []
    for point in POINTS:
        if point.file != file:
            continue
        if point.function not in functions:
            raise LookupError(f"{point.name}: {file} has no function {point.function}")
        found = [
            (block, statement)
            for block, statement in _statements(functions[point.function])
            if any(point.before in line for line in source[statement.lineno - 1 : _own_end(statement)])
        ]
        if len(found) <= point.nth:
            raise LookupError(f"{point.name}: {point.function} of {file} has no {point.before!r}")
        places.append((*found[point.nth], point.name))
    for block, statement, name in places:
        call = ast.parse(f"__crash_point__({name!r})").body[0]
        for node in ast.walk(call):
            ast.copy_location(node, statement)
        block.insert(block.index(statement), call)
    return tree


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
            yield from _functions(child, f"{prefix}{child.name}.<locals>.")
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def _statements(node: ast.AST) -> Iterator[tuple[list[ast.stmt], ast.stmt]]:
    """Each statement below ``node`` but docstrings and those of functions in it, with the block that holds it."""
    for name in ("body", "orelse", "handlers", "finalbody"):
        block = getattr(node, name, [])
        for child in block:
            if isinstance(child, ast.ExceptHandler):
                yield from _statements(child)
            elif not _is_text(child):
                yield block, child
                if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield from _statements(child)


def _own_end(statement: ast.stmt) -> int:
    """Its last line, or the last one before its first block."""
    body = getattr(statement, "body", None)
    return body[0].lineno - 1 if body else statement.end_lineno or statement.lineno


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        return compile(instrumented(str(Path(self.path).relative_to(SOURCE))), self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if f"{fullname.replace('.', '/')}.py" not in {f"trainsession/{point.file}" for point in POINTS}:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None
        spec.loader = _Loader(fullname, str(spec.origin))
        return spec


class _Counting:
    """The points of this process."""

    def __init__(self, directory: Path, schedule: list[tuple[str, int]]) -> None:
        self._directory = directory
        self._schedule = schedule
        self._stage = 0
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._hits = -1

    def reached(self, name: str) -> None:
        with self._lock:
            self._advance()
            os.write(self._hits, f"{name}\n".encode())
            if self._stage >= len(self._schedule) or self._schedule[self._stage][0] != name:
                return
            self._counts[name] += 1
            if self._counts[name] == self._schedule[self._stage][1]:
                (self._directory / f"fired-{self._stage}").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)

    def _advance(self) -> None:
        """Whether another process died where it should."""
        while (self._directory / f"fired-{self._stage}").exists():
            self._stage += 1
            self._counts.clear()
            self._hits = -1
        if self._hits < 0:
            path = self._directory / f"hits-{self._stage}"
            self._hits = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)


_counting: _Counting | None = None


def _crash_point(name: str) -> None:
    if _counting is not None:
        _counting.reached(name)


def instrument() -> None:
    """From here on, modules with points are imported with them."""
    imported = [point.file for point in POINTS if f"trainsession.{point.file[:-3].replace('/', '.')}" in sys.modules]
    assert not imported, f"imported too early: {imported}"
    import builtins

    builtins.__crash_point__ = _crash_point  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _Finder())


def start() -> None:
    """Count, and die, in this process, if its environment says so."""
    global _counting
    if DIRECTORY in os.environ:
        schedule = [(name, count) for name, count in json.loads(os.environ.get(AT, "[]"))]
        _counting = _Counting(Path(os.environ[DIRECTORY]), schedule)


def hits(directory: Path, stage: int = 0) -> Counter[str]:
    """How often each point was reached before death number ``stage``."""
    path = directory / f"hits-{stage}"
    return Counter(path.read_text().split()) if path.exists() else Counter()
