"""What each kind of operation asks of the engine, and what it meters."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from ..engine import checkpoint as formats
from ..engine.api import AdapterState, EngineHandle, TrainItem, TrainOutput
from ..errors import (
    CheckpointMismatch,
    EngineError,
    IncompleteGradients,
    InvalidDatum,
    InvalidRequest,
    NotFound,
    TrainSessionError,
)
from .bodies import SAVE_KINDS, TRAINING_KINDS, Body, check_training
from .checkpoints import EXPORT_SECONDS, Checkpoints, Origin, already_exists
from .frozen import FrozenPool, Weights
from .log import OperationLog
from .scheduler import Ready
from .session import KeptForward, Operation, Session

logger = logging.getLogger(__name__)
_GRAPHS_PER_SESSION = 4
_MAX_UNFINISHED = 64
"""Results of one session that may wait for the disk before its next operation does."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How an operation came out of the engine.

    Attributes:
        value: Its result.
        error: Why it has none; it then changed nothing and costs nothing.
        tokens: What it meters, by kind; None where the result carries no usage.
        refund: Operation whose charges this one cancels (a kept forward, by its backward).
        also: A row to commit with it.
        later: Finishes the outcome outside the engine, while later operations run.
    """

    value: dict[str, Any] = field(default_factory=dict)
    error: TrainSessionError | None = None
    tokens: Mapping[str, int] | None = None
    refund: str | None = None
    also: Callable[[sa.Connection], None] | None = None
    later: Callable[[], Awaitable[Outcome]] | None = None


class Runner:
    """Runs operations of one engine; every method is called between two others of it.

    Args:
        scratch: Directory for merged exports, on the blobs' file system.
    """

    def __init__(
        self, handle: EngineHandle, checkpoints: Checkpoints, log: OperationLog, pool: FrozenPool, scratch: Path
    ) -> None:
        self._handle = handle
        self._checkpoints = checkpoints
        self._log = log
        self._pool = pool
        self._scratch = scratch

    async def train(self, work: Sequence[tuple[Session, Operation, Body]]) -> list[Outcome]:
        """Passes over data, merged into one; an item's error is its own."""
        items: list[TrainItem] = []
        outcomes: dict[int, Outcome] = {}
        where: list[int] = []
        for index, (session, operation, body) in enumerate(work):
            try:
                if not operation.checked:
                    check_training(operation.kind, body, self._handle.info)
            except InvalidRequest as error:
                outcomes[index] = Outcome(error=error)
                continue
            items.append(_item(session, operation, body))
            where.append(index)
        if items:
            results: list[TrainOutput | TrainSessionError] = await self._handle.call("train", items)
            for index, result in zip(where, results, strict=True):
                session, operation, body = work[index]
                if isinstance(result, TrainSessionError):
                    outcomes[index] = Outcome(error=result)
                    continue
                if operation.kind == "forward_keep":
                    await self._keep(session, operation, body)
                kind = "train" if operation.kind == "forward_backward" else "prefill"
                outcomes[index] = Outcome(value=_train_value(result), tokens={kind: body.tokens})
        return [outcomes[index] for index in range(len(work))]

    async def run(self, session: Session, operation: Operation, body: Body) -> Outcome:
        """Any operation that is not a pass over data of its own.

        Raises:
            TrainSessionError: it failed and changed nothing.
        """
        kind, params = operation.kind, body.params
        if kind == "optim_step":
            return await self._optim_step(session, body)
        if kind == "zero_grad":
            await self._handle.call("zero_grad", session.id)
            session.incomplete = ""
            return Outcome()
        if kind == "backward":
            return await self._backward(session, body)
        if kind == "skip":
            kept = session.kept.pop(operation.seq - 1, None)
            # In both cases gradients will not come, so the window lacks that part.
            if kept is not None or params.get("incomplete", False):
                session.incomplete = f"the operation of number {operation.seq} was cancelled or not accepted"
            if kept is not None:
                await self._handle.call("drop_graph", kept.operation.id)
            return Outcome()
        if kind == "snapshot":
            return await self._freeze(session, operation)
        if kind == "load_state":
            return await self._load_state(session, params)
        if kind in SAVE_KINDS:
            return await self._save(session, operation, params)
        if kind == "export":
            return await self._export(session, bool(params.get("merged", False)))
        raise AssertionError(f"no operation kind {kind!r}")

    async def drop_old_graphs(self, session: Session, seconds: float) -> None:
        """Free graphs whose backward did not come in time; it will run its forward again."""
        limit = time.time() - seconds
        for seq in [seq for seq, kept in session.kept.items() if kept.kept_at < limit]:
            await self._handle.call("drop_graph", session.kept.pop(seq).operation.id)

    async def _keep(self, session: Session, operation: Operation, body: Body) -> None:
        session.kept[operation.seq] = KeptForward(operation, body, time.time())
        while len(session.kept) > _GRAPHS_PER_SESSION:
            oldest = session.kept.pop(min(session.kept))
            await self._handle.call("drop_graph", oldest.operation.id)

    async def _optim_step(self, session: Session, body: Body) -> Outcome:
        if session.incomplete and not body.params.get("allow_incomplete", False):
            raise IncompleteGradients(
                f"{session.incomplete}: a step would use part of the batch. Call zero_grad() and submit the batch "
                "again, or pass allow_incomplete=True."
            )
        metrics = await self._handle.call("optim_step", session.id, body.adam)
        session.incomplete = ""
        return Outcome(value={"metrics": metrics})

    async def _backward(self, session: Session, body: Body) -> Outcome:
        seq = body.params["forward_seq"]
        kept = session.kept.get(seq) or await self._logged_forward(session, seq)
        _check_gradients(body, kept.body)
        try:
            await self._handle.call("backward", kept.operation.id, body.gradients)
        except NotFound:  # the engine let the graph go, or it is another engine: run the forward again
            results = await self._handle.call("train", [_item(session, kept.operation, kept.body)])
            if isinstance(results[0], TrainSessionError):
                raise results[0] from None
            await self._handle.call("backward", kept.operation.id, body.gradients)
        session.kept.pop(seq, None)
        tokens = {"train": kept.body.tokens, "prefill": -kept.body.tokens}
        return Outcome(tokens=tokens, refund=kept.operation.id)

    async def _logged_forward(self, session: Session, seq: int) -> KeptForward:
        found = await self._log.forward(session.id, seq)
        if found is None:
            raise InvalidRequest(
                f"forward_seq: operation {seq} is not a forward_keep that succeeded", details={"key": "forward_seq"}
            )
        operation_id, body = found
        return KeptForward(Operation(operation_id, seq, "forward_keep"), body, time.time())

    async def _freeze(self, session: Session, operation: Operation) -> Outcome:
        # A replay in inexact arithmetic would make other weights under the frozen ones' name.
        if not self._pool.holds(operation.id) and (not operation.replay or self._handle.info.exact):
            await self._handle.call("freeze", session.id, operation.id)
            self._pool.added(self._handle, Weights(operation.id, session.project, session.id))
        return Outcome(value={"weights": {"operation_id": operation.id}})

    async def _load_state(self, session: Session, params: Mapping[str, Any]) -> Outcome:
        path, optimizer = params["path"], bool(params.get("optimizer", False))
        if session.completions:  # a save before it may still be on its way to the disk
            await asyncio.wait(list(session.completions.values()))
        row = await self._checkpoints.find(session.project, path)
        check_loadable(row, path, optimizer, self._handle.info.identity, session.base_model)
        state = await self._checkpoints.load(row)
        await self._handle.call("restore", session.id, state, optimizer=optimizer)
        session.incomplete = ""
        session.snapshot_due = True  # the checkpoint may be deleted; a replay must not need it
        return Outcome(value={"path": path})

    async def _save(self, session: Session, operation: Operation, params: Mapping[str, Any]) -> Outcome:
        kind = "state" if operation.kind == "save_state" else "weights"
        name, overwrite = params.get("name"), bool(params.get("overwrite", False))
        if name and not overwrite and await self._checkpoints.exists(session.project, session.id, kind, name):
            raise already_exists(session.id, kind, name)
        state: AdapterState = await self._handle.call("capture", session.id, optimizer=kind == "state")

        async def publish() -> Outcome:
            write = formats.state_to_files if kind == "state" else formats.adapter_to_peft
            published = await self._checkpoints.publish(
                _origin(session, state),
                kind,
                write(state, session.base_model),
                name=name,
                overwrite=overwrite,
                ttl_seconds=params.get("ttl_seconds"),
                has_optimizer=kind == "state" and state.has_optimizer,
            )
            return Outcome(value={"path": published.path, "size_bytes": published.size_bytes}, also=published.insert)

        return Outcome(later=publish)

    async def _export(self, session: Session, merged: bool) -> Outcome:
        if merged:
            self._scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryDirectory(dir=self._scratch) as directory:
                await self._handle.call("export_merged", session.id, directory)
                files = {file.name: file for file in sorted(Path(directory).iterdir()) if file.is_file()}
                return await self._publish_export(session, files)
        state = await self._handle.call("capture", session.id, optimizer=False)
        files = formats.adapter_to_peft(state, session.base_model)
        return Outcome(later=lambda: self._publish_export(session, files))

    async def _publish_export(self, session: Session, files: Mapping[str, bytes | Path]) -> Outcome:
        origin = Origin(
            project=session.project,
            session_id=session.id,
            base_model=session.base_model,
            base_identity=self._handle.info.identity,
            lora=session.lora,
        )
        published = await self._checkpoints.publish(origin, "weights", files, ttl_seconds=EXPORT_SECONDS, listed=False)
        return Outcome(value={"path": published.path}, also=published.insert)


def check_loadable(row: Any, path: str, optimizer: bool, identity: str | None, base_model: str) -> None:
    """Raise `CheckpointMismatch` where a checkpoint cannot go into a session of this base model."""
    if identity is not None and row.base_identity and row.base_identity != identity:
        raise CheckpointMismatch(
            f"{path} was made on {row.base_model} ({row.base_identity}); this session's base model is "
            f"{base_model} ({identity})",
            details={"checkpoint": row.base_model, "session": base_model},
        )
    if optimizer and not row.has_optimizer:
        raise CheckpointMismatch(
            f"{path} has no optimizer state (it is a {row.kind} checkpoint); load it without the optimizer, or "
            "load one that save_state made",
            details={"path": path, "kind": row.kind},
        )


def _item(session: Session, operation: Operation, body: Body) -> TrainItem:
    return TrainItem(
        adapter_id=session.id,
        data=body.data,
        loss_fn=body.params.get("loss_fn"),
        loss_fn_config=body.params.get("loss_fn_config") or {},
        backward=operation.kind == "forward_backward",
        keep_graph=operation.id if operation.kind == "forward_keep" else None,
    )


def _train_value(output: TrainOutput) -> dict[str, Any]:
    return {"outputs": [{"logprobs": logprobs} for logprobs in output.logprobs], "metrics": output.metrics}


def _check_gradients(body: Body, forward: Body) -> None:
    if len(body.gradients) != len(forward.data):
        raise InvalidRequest(
            f"gradients: {len(body.gradients)} tensors for the {len(forward.data)} datums of the forward",
            details={"key": "gradients"},
        )
    for index, (gradient, datum) in enumerate(zip(body.gradients, forward.data, strict=True)):
        shape = datum.loss_fn_inputs["target_tokens"].shape
        if gradient.shape != shape:
            raise InvalidDatum(
                f"datum {index}: gradients has shape {gradient.shape}, its target_tokens {shape}",
                details={"datum": index, "key": "gradients"},
            )


def _origin(session: Session, state: AdapterState) -> Origin:
    return Origin(
        project=session.project,
        session_id=session.id,
        base_model=session.base_model,
        base_identity=state.base_identity,
        lora=state.config,
    )


def as_ours(error: Exception, operation_id: str) -> TrainSessionError:
    """A fault of our own code fails one operation, not its lane; its traceback goes to the log only."""
    if isinstance(error, TrainSessionError):
        return error
    logger.error("operation %s failed unexpectedly", operation_id, exc_info=error)
    return EngineError(
        f"the service failed while it ran {operation_id}; its log has the details",
        details={"operation_id": operation_id},
    )


def is_pass(operation: Operation) -> bool:
    """It runs over data, so it has a cost and may share a pass."""
    return operation.kind in TRAINING_KINDS


def ready_of(session: Session) -> Ready | None:
    """What the session would run next; None where it has nothing, or waits for the disk."""
    operation = session.head
    if operation is None or operation.error is not None or len(session.completions) >= _MAX_UNFINISHED:
        return None
    passes = is_pass(operation)
    tokens = max(1, operation.tokens) if passes else 0
    # One under which the engine ended runs alone: others must not pay if it does so again.
    mergeable = passes and not operation.losses and not operation.faults
    return Ready(session.project, session.id, tokens, mergeable)


def after(session: Session, operation: Operation, outcome: Outcome) -> tuple[int, Any]:
    """Steps and progress of the session behind an operation."""
    step, progress = session.step, session.progress
    if operation.kind == "optim_step" and outcome.error is None and not operation.replay:
        step = int(outcome.value["metrics"].get("step", step + 1))
        if operation.body is not None and operation.body.progress is not None:
            progress = operation.body.progress
    return step, progress
