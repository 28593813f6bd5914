"""A client: it answers messages, trains on its own examples, and keeps its memory."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from time import perf_counter, process_time
from typing import Protocol

import torch
from torch import Tensor

from fedspu.errors import (
    FedSPUError,
    MethodError,
    ModelError,
    StorageError,
    TrainingError,
)
from fedspu.federation.checks import check_broadcast, read_request
from fedspu.federation.client_memory import LostError, Shelf, ShelfError
from fedspu.federation.engine import Answer, Cost, Missing
from fedspu.federation.finishing import finish
from fedspu.federation.messages import (
    JudgeReply,
    JudgeRequest,
    Packet,
    Reply,
    Request,
    Seconds,
    TrainReply,
    TrainRequest,
    pack_reply,
)
from fedspu.federation.plan import Plan
from fedspu.federation.workbench import Placed, Workbench
from fedspu.imports import raised
from fedspu.methods.method import (
    ClientRound,
    Memory,
    ModelState,
    Trained,
    Turn,
    Which,
    answered,
    offer_to,
)
from fedspu.neurons.blocks import extract, merge
from fedspu.neurons.slim import slim_state, slimmable
from fedspu.neurons.table import Active, State
from fedspu.random_streams import stream, torch_stream
from fedspu.training.augmentation import make_augmentation
from fedspu.training.early_stopping import blended_loss, has_stopped
from fedspu.training.epochs import LocalTraining, check_finite
from fedspu.training.evaluation import Score, evaluate_each
from fedspu.training.loading import seconds_of_loading
from fedspu.training.logit_adjustment import with_offsets


class Examples(Protocol):
    """Clients' own examples: one client's on a device, everyone's in a simulation."""

    def part(self, client: int, name: str) -> tuple[Tensor, Tensor]:
        """A client's own ``train``, ``val`` or ``test`` examples."""


class Client:
    """Answers requests as bytes; uses only the plan, its examples and its shelf.

    A device has one of these. In a simulation, one plays all the clients of a process.
    """

    def __init__(
        self, plan: Plan, examples: Examples, shelf: Shelf, device: torch.device
    ) -> None:
        self.plan, self.examples, self.shelf = plan, examples, shelf
        self.device = device
        self.workbench = Workbench(plan, device)
        self._checked: State | None = None

    def respond(
        self, packet: Packet, broadcast: State | None = None
    ) -> Answer | Missing:
        """The answer to a request, or why there is none: one client's turn is lost.

        Two errors are not the client's own and are raised: its shelf cannot be used, or
        the method's answers cannot. All others that its code raises cost its turn.
        """
        try:
            up = self.answer(packet, broadcast)
        except (ShelfError, MethodError):
            raise
        except FedSPUError as error:
            return Missing(str(error), has_failed=True)
        except (Exception, SystemExit) as error:  # the user's own code, or PyTorch
            return Missing(f"it raised {raised(error)}", has_failed=True)
        return Answer(up, Cost.of(packet, up))

    def answer(self, packet: Packet, broadcast: State | None = None) -> Packet:
        """The reply to a request; ``broadcast`` is what was sent to all clients alike.

        What the client keeps is put on its shelf before it replies.
        """
        request = read_request(self.plan, packet)
        if broadcast is not None and broadcast is not self._checked:
            check_broadcast(self.plan, broadcast)
            self._checked = broadcast  # many clients of a simulation are sent the same
        reply, took = self.reply(request, broadcast)
        return replace(pack_reply(self.plan, request, reply), took=took)

    def reply(
        self, request: Request, broadcast: State | None = None
    ) -> tuple[Reply, Seconds]:
        """The reply to a request, and how long it took to compute."""
        memory = Memory()
        if needs_memory(self.plan, request):
            memory = self._remember(request)
        began, cpu_began = self._clocks()

        def took() -> Seconds:
            now, cpu_now = self._clocks()
            return Seconds(now - began, cpu_now - cpu_began)

        if isinstance(request, JudgeRequest):
            return self.judge(request, memory, broadcast), took()
        reply, kept = self.take_turn(request, memory)
        seconds = took()
        self.shelf.put(request.client, request.round, kept)
        return reply, seconds

    @staticmethod
    def _clocks() -> tuple[float, float]:
        """The clock and the CPU's clock; both stand still while PyTorch loads."""
        loading, cpu_loading = seconds_of_loading()
        return perf_counter() - loading, process_time() - cpu_loading

    def _remember(self, request: Request) -> Memory:
        try:
            return self.shelf.get(request.client, request.last)
        except StorageError as error:
            raise LostError(str(error)) from error

    # A turn (Algorithm 1, lines 8 to 11, and Algorithm 2, lines 8 to 16) --------------

    def take_turn(
        self, request: TrainRequest, memory: Memory
    ) -> tuple[TrainReply, Memory]:
        """Merge what was received, train, and stop if the loss no longer falls."""
        plan, method = self.plan, self.plan.method
        turn = self._turn(request, memory)
        if request.is_finish:
            return self._finish(turn)

        # Choose the neurons that train; the rest are frozen, or cut off if slim.
        begin = ModelState(turn.merged)
        active: Active = answered(method, "keep", method.keep(turn), dict)
        if method.is_slim:
            held = slimmable(plan.neurons, active)
            begin = ModelState(slim_state(begin.state, plan.neurons, held), held)

        # Train.
        local = turn.prepare(begin, "batches", _inside(active, begin))
        sent = plan.leaving(local.neurons.blocks(local.active))
        trained = answered(method, "train", method.train(turn, local), Trained)
        own = None
        if method.keeps_own:
            offsets, two = local.offsets, turn.x[:2]
            state = with_offsets(trained.own, offsets, local.model, two)
            own = replace(begin, state=state)
        check_finite(trained.sent, local.settings)
        if trained.own is not trained.sent:
            check_finite(trained.own, local.settings)

        # Stop once the loss no longer falls.
        losses, val_loss = memory.losses, None
        rule = plan.settings.early_stopping
        if rule.on:
            judged = own or replace(begin, state=trained.sent)
            val_loss = self._validation_loss(turn, judged)
            losses = (*losses, blended_loss(trained.loss, val_loss, rule.blend))

        reply = TrainReply(
            round=request.round,
            client=request.client,
            active=active if request.offer else None,
            payload=extract(trained.sent, sent) if request.offer else {},
            num_examples=len(turn.x),
            train_loss=trained.loss,
            val_loss=val_loss,
            has_stopped=rule.on and has_stopped(losses, rule.patience),
        )
        # The rule looks back as far as its patience, and no farther.
        return reply, Memory(own, losses[-rule.patience :], trained.extra)

    def _finish(self, turn: Turn) -> tuple[TrainReply, Memory]:
        """Keep the best of the client's own model and the server's, trained."""
        plan = self.plan
        part = turn.validation()

        def judge(model: ModelState) -> Score:
            return self._evaluate(self.workbench.place(model), [part])[0]

        best = finish(turn, plan.method, plan.settings, judge)
        reply = TrainReply(
            round=turn.now.round,
            client=turn.now.client,
            active=None,
            payload={},
            num_examples=len(turn.x),
            train_loss=best.train_loss,
            val_loss=best.score.loss,
            has_stopped=False,
        )
        return reply, replace(turn.memory, own=ModelState(best.state))

    def _turn(self, request: TrainRequest, memory: Memory) -> Turn:
        plan, offer = self.plan, request.offer
        now = plan.client_round(request.round, request.client)
        x, y = self._part(now.client, "train")
        return Turn(
            now=now,
            offer=offer,
            where=plan.travelling(offer.active) if offer else {},
            payload=request.payload,
            own=_full(plan, memory.own, request.initial),
            memory=memory,
            x=x,
            y=y,
            task=plan.task,
            prepare=partial(self._prepare, now, x, y),
            validation=partial(self._part, now.client, "val"),
        )

    def _prepare(
        self,
        now: ClientRound,
        x: Tensor,
        y: Tensor,
        model: ModelState,
        purpose: str,
        active: Active | None = None,
    ) -> LocalTraining:
        """A model on the workbench, ready for local epochs."""
        placed = self.workbench.place(model)
        return self._training(now, x, y, placed, purpose, active)

    def _training(
        self,
        now: ClientRound,
        x: Tensor,
        y: Tensor,
        placed: Placed,
        purpose: str,
        active: Active | None = None,
    ) -> LocalTraining:
        name = (now.round, now.client)
        dropout = "dropout" if purpose == "batches" else f"{purpose} dropout"
        settings = self.plan.train_settings(now.round)
        return LocalTraining(
            model=placed.model,
            neurons=placed.neurons,
            active=placed.neurons.everything() if active is None else active,
            x=x,
            y=y,
            task=self.plan.task,
            settings=settings,
            rng=stream(now.seed, purpose, *name),
            augmentation=make_augmentation(
                settings, stream(now.seed, f"{purpose} augmentation", *name)
            ),
            dropout=partial(torch_stream, now.seed, dropout, *name),
        )

    def _validation_loss(self, turn: Turn, model: ModelState) -> float:
        """A model's loss on the client's validation part, without any fine-tuning."""
        placed = self.workbench.place(model)
        if self.plan.method.ready is not None:
            local = self._training(turn.now, turn.x, turn.y, placed, "ready")
            self.plan.method.ready(local, "global")
        part = self._part(turn.now.client, "val")
        loss = self._evaluate(placed, [part])[0].loss
        if not isfinite(loss):
            lr = self.plan.train_settings(turn.now.round).lr
            raise TrainingError(
                f"the validation loss is {loss}; lower train.lr (it is {lr})"
            )
        return loss

    def _part(self, client: int, name: str) -> tuple[Tensor, Tensor]:
        x, y = self.examples.part(client, name)
        return x.to(self.device), y.to(self.device)

    # The model a client would use -----------------------------------------------------

    def judge(
        self, request: JudgeRequest, memory: Memory, global_state: State | None
    ) -> JudgeReply:
        """How well a model does on the client's own test and validation examples."""
        t, client = request.round, request.client
        placed = self.ready_model(t, client, memory, global_state, request.which)
        # With the paper's split, the parts are the same.
        is_paper = self.plan.settings.data.split == "paper"
        names = ["test"] if is_paper else ["test", "val"]
        parts = [self._part(client, name) for name in names]
        scores = self._evaluate(placed, parts)
        for name, score in zip(names, scores, strict=True):
            self._check_score(name, score)
        test, val = scores[0], scores[-1]
        num_examples = len(parts[0][0])
        return JudgeReply(t, client, num_examples, test.loss, test.value, val.value)

    def _check_score(self, part: str, score: Score) -> None:
        if not (isfinite(score.loss) and isfinite(score.value)):
            raise TrainingError(
                f"on its {'validation' if part == 'val' else part} examples the loss "
                f"is {score.loss} and the {self.plan.task.metric.title} "
                f"{score.value}; expected finite numbers: lower train.lr, or check "
                "the metric of the task"
            )

    def _evaluate(
        self, placed: Placed, parts: Sequence[tuple[Tensor, Tensor]]
    ) -> list[Score]:
        kernels = self.plan.settings.train.kernels
        return evaluate_each(placed.model, parts, self.plan.task, kernels)

    def ready_model(
        self,
        t: int,
        client: int,
        memory: Memory,
        global_state: State | None,
        which: Which = "personal",
    ) -> Placed:
        """The client's model after round t, or the server's, ready to be judged."""
        method = self.plan.method
        now = self.plan.client_round(t, client)
        model = judged_model(self.plan, now, memory, global_state, which)
        placed = self.workbench.place(model)
        if method.ready is not None:
            x, y = self._part(client, "train")
            method.ready(self._training(now, x, y, placed, "adapt"), which)
        return placed


def judged_model(
    plan: Plan,
    now: ClientRound,
    memory: Memory,
    global_state: State | None,
    which: Which,
) -> ModelState:
    """The values of the model that is judged, before it is made ready."""
    method = plan.method
    if which == "personal" and (memory.own is not None or method.keeps_own):
        return memory.own or ModelState(plan.initial)
    if global_state is None:
        raise ModelError("a request to judge came without the server's model")
    if which == "personal" and method.judged_by == "slice":
        offer = offer_to(method, now)
        assert offer is not None  # such a method exchanges something
        active = offer.active
        return ModelState(slim_state(global_state, plan.neurons, active), active)
    return ModelState(global_state)


def needs_memory(plan: Plan, request: Request) -> bool:
    """Whether a client needs what it keeps to reply; not for the server's model."""
    if not isinstance(request, JudgeRequest):
        return True
    return request.which == "personal" and (plan.method.keeps_own or plan.finishes)


def _full(plan: Plan, own: ModelState | None, initial: State | None) -> State:
    """The client's own model at full size; entries that it lacks come from w0."""
    if own is None:
        return initial or plan.initial
    if own.active is None:
        return own.state
    shapes = {name: tuple(tensor.shape) for name, tensor in plan.initial.items()}
    return merge(plan.initial, plan.neurons.blocks(own.active, shapes), own.state)


def _inside(active: Active, model: ModelState) -> Active:
    """Active neurons, as positions inside a model that may be slim."""
    if model.active is None:
        return active
    return {
        name: torch.searchsorted(model.active[name], indices)
        for name, indices in active.items()
    }
