"""Model names: a base model's, or a path to weights that were trained here."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from dataclasses import dataclass

from ....errors import NotFound, UnknownModel
from ....service.keys import Caller
from ....service.service import Service
from ....tokenization import Tokenizer
from .answers import Model, ModelList

SESSION_HEADER = "X-TrainSession-Session"
"""The session that the tokens are metered for, where it is not the one that the model's name says."""
_TRAINED = re.compile(r"ts://(?P<session>[a-z0-9_]{1,64})/(live|(snapshot|weights|state)/[A-Za-z0-9._-]{1,128})")
_OWNER = "trainsession"
_KEPT_TOKENIZERS = 16


@dataclass(frozen=True, slots=True)
class Served:
    """What a model's name stands for.

    Attributes:
        weights: As `Service.submit_samples` takes them.
        base_model: Whose tokenizer and chat template these are.
        payer: The session that the tokens are metered for; None: the one that owns the weights.
    """

    weights: dict[str, str]
    base_model: str
    payer: str | None


async def served(service: Service, caller: Caller, name: str, payer: str | None) -> Served:
    """Look a model up.

    Raises:
        UnknownModel: there is none of that name that the caller knows of.
    """
    if not name.startswith("ts://"):
        # Who is bound to a session has it pay; the service says whether these weights are that session's.
        payer = payer or _bound(caller)
        if payer is not None:
            return Served({"base_model": name}, name, payer)
        session = await service.base_sampler(caller.project, name)
        return Served({"base_model": name}, session.base_model, session.session_id)
    match = _TRAINED.fullmatch(name)
    if match is None:
        raise UnknownModel(
            f"unknown model {name!r}: expected a base model, ts://<session>/live, "
            "ts://<session>/weights/<name> or ts://<session>/snapshot/<id>",
            details={"key": "model"},
        )
    try:
        session = await service.get_session(caller.project, match["session"], caller.only)
    except NotFound as error:
        raise UnknownModel(f"unknown model {name!r}: {error.message}", details={"key": "model"}) from None
    return Served({"path": name}, session.base_model, payer)


async def listed(service: Service, caller: Caller) -> ModelList:
    """The base models, and the project's saved sampler weights; of a session, all that a key bound to it may sample."""
    bound = _bound(caller)
    if bound is None:
        names = [(model.name, 0, _OWNER) for model in service.list_base_models()]
    else:
        session = await service.get_session(caller.project, bound, caller.only)
        name = session.base_model if session.kind == "sampler" else f"ts://{bound}/live"
        names = [] if session.state == "closed" else [(name, int(session.created_at), bound)]
    names += [
        (checkpoint.path, int(checkpoint.created_at), checkpoint.session_id)
        for checkpoint in await service.list_checkpoints(caller.project, bound, caller.only)
        if checkpoint.kind == "weights"
    ]
    data = [Model(object="model", id=name, created=created, owned_by=owner) for name, created, owner in names]
    return ModelList(object="list", data=data)


async def found(service: Service, caller: Caller, name: str) -> Model:
    """One model, also a live session or a snapshot, which are not listed.

    Raises:
        UnknownModel: there is none of that name that the caller knows of.
    """
    for model in (await listed(service, caller)).data:
        if model.id == name:
            return model
    match = _TRAINED.fullmatch(name)
    if match is None or match[2] not in ("live", f"snapshot/{name.rpartition('/')[2]}"):
        raise UnknownModel(f"unknown model {name!r}", details={"key": "model"})
    try:
        session = await service.get_session(caller.project, match["session"], caller.only)
    except NotFound as error:
        raise UnknownModel(f"unknown model {name!r}: {error.message}", details={"key": "model"}) from None
    return Model(object="model", id=name, created=int(session.created_at), owned_by=session.session_id)


def _bound(caller: Caller) -> str | None:
    """The one session that the caller may sample; None for any."""
    return None if caller.only is None else caller.only.session_id


class Tokenizers:
    """Those in use: reading one takes up to a second, and a request needs it twice."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._known: OrderedDict[str, asyncio.Task[Tokenizer]] = OrderedDict()

    async def of(self, base_model: str) -> Tokenizer:
        """A base model's tokenizer. Raises what `Service.tokenizer_bundle` does."""
        task = self._known.get(base_model)
        if task is None:
            task = self._known[base_model] = asyncio.create_task(self._read(base_model))
            while len(self._known) > _KEPT_TOKENIZERS:
                self._known.popitem(last=False)
        self._known.move_to_end(base_model)
        try:
            return await asyncio.shield(task)
        except Exception:
            if self._known.get(base_model) is task:
                del self._known[base_model]
            raise

    async def _read(self, base_model: str) -> Tokenizer:
        _, files = await self._service.tokenizer_bundle(base_model)
        return await asyncio.to_thread(Tokenizer.from_files, files)
