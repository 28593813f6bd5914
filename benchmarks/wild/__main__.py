"""Map other people's models and hold each to the laws: one table by family.

    python -m benchmarks.wild [PART OF A NAME ...] [--exactly] [--limit SECONDS]
        [--json FILE]

Needs the libraries of the extra ``wild``; families whose library is missing are left
out. Every model is mapped and trained in a process of its own, in float64, on one
thread. *useful*: at p = .5 at most .6 of the learnable entries are active; *weak*: at
most .9; *useless*: more. *wrong*: a law does not hold.
"""

import argparse
import copy
import json
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import defaultdict
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import fedspu
import fedspu.neurons.slim
from benchmarks.wild import stub
from fedspu.neurons.calls import Wide, as_double, call, copy_model, outputs_of

CLASSES = ("useful", "weak", "useless", "crash", "too slow", "wrong", "not built")
_HF = "transformers.modeling_utils"
LIBRARIES = {
    "hf-text": _HF, "hf-causal": _HF, "hf-vision": _HF, "hf-audio": _HF,
    "vit-pytorch": "vit_pytorch", "timm-vit": "timm", "timm-cnn": "timm",
    "pytorchcv": "pytorchcv.model_provider", "smp": "segmentation_models_pytorch",
    "monai": "monai.networks.nets", "x-transformers": "x_transformers",
    "tabular": "rtdl_revisiting_models", "pyg": "torch_geometric.nn",
    "held-out-hf": _HF, "held-out-timm": "timm",
}  # fmt: skip


def examine(model: nn.Module, example: Any) -> dict[str, Any]:
    """What the table of one model is worth, how long it took, and what is wrong."""
    before = copy.deepcopy(model.state_dict())
    start = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        neurons = fedspu.map_neurons(model, example)
    seconds = time.process_time() - start
    active = fedspu.choose_random(neurons, 0.5, fedspu.stream(0, "wild"))
    learnable = neurons.shapes.keys() - neurons.statistics
    blocks = {n: w for n, w in neurons.blocks(active).items() if n in learnable}
    total = sum(torch.Size(neurons.shapes[name]).numel() for name in blocks)
    kept = sum(fedspu.extract(before, {n: w})[n].numel() for n, w in blocks.items())
    sliced = fedspu.neurons.slim.slimmable(neurons, active)
    slim = neurons.num_entries(sliced) / max(1, neurons.num_entries())
    return {
        "share": kept / max(1, total),
        "slim": slim,
        "whole": [g.name for g in neurons.groups if not g.slim and g.size > 1],
        "seconds": seconds,
        "groups": len(neurons.groups),
        "permutable": sum(group.permutable for group in neurons.groups),
        "warnings": [str(w.message) for w in caught if w.category is not UserWarning],
        "wrong": _violations(model, example, neurons, active, before),
    }


def _violations(
    model: nn.Module, example: Any, neurons: Any, active: Any, before: Any
) -> list[str]:
    """The laws that do not hold for this model."""
    wrong = []
    after = model.state_dict()
    if any(not torch.equal(after[n], t) for n, t in before.items()):
        wrong.append("mapping changed the model")
    blocks = neurons.blocks(active)
    state = fedspu.state_of(model)
    merged = fedspu.merge(state, blocks, fedspu.extract(state, blocks))
    if any(not torch.equal(merged[name], state[name]) for name in state):
        wrong.append("extract and merge is not the identity")
    expected = _dense_step(model, example, blocks)
    if expected is None:
        return wrong
    for layout in ("auto", "index"):
        error = _partial_step(
            copy_model(model), example, neurons, active, expected, layout, 0.0
        )
        if error:  # reordered sums are rounded otherwise; some models amplify that
            noise = _rounding(model, example, blocks, expected)
            error = _partial_step(
                copy_model(model), example, neurons, active, expected, layout, noise
            )
        if error:
            wrong.append(f"{layout}: {error}")
    if _trains(model, example):
        kept = fedspu.neurons.slim.slimmable(neurons, active)
        slim = fedspu.slim_model(model, neurons, kept)
        shapes = {name: t.shape for name, t in fedspu.state_of(slim).items()}
        smaller = fedspu.extract(state, neurons.blocks(kept))
        if any(shapes[name] != part.shape for name, part in smaller.items()):
            wrong.append("a slim copy does not have the payload's shapes")
        if not _trains(slim, example):
            wrong.append("a slim copy cannot be trained, the model can")
    return wrong


def _trains(model: nn.Module, example: Any) -> bool:
    """Whether a copy takes a step in training mode, with finite gradients."""
    copied = copy_model(model).train()
    try:
        loss = _loss(copied, example)
        if loss is None:
            return False
        loss.backward()  # type: ignore[no-untyped-call]  # PyTorch's
    except Exception:  # the model's own
        return False
    return all(
        p.grad is None or bool(p.grad.isfinite().all()) for p in copied.parameters()
    )


def _loss(model: nn.Module, example: Any) -> Tensor | None:
    rng = torch.Generator().manual_seed(1)
    total = None
    with Wide():  # float32 inside a model is rounded otherwise once sums are reordered
        outputs = outputs_of(call(model, example))
    for out in outputs:
        if out.requires_grad:
            weight = torch.rand(out.shape, generator=rng, dtype=torch.float64)
            term = (out * weight).mean()
            total = term if total is None else total + term
    return total


def _dense_step(model: nn.Module, example: Any, blocks: Any) -> Any:
    """Every learnable tensor after a plain step in which frozen entries stay."""
    dense = copy_model(model)
    loss = _loss(dense, example)
    if loss is None:
        return None
    try:
        loss.backward()  # type: ignore[no-untyped-call]  # PyTorch's
    except Exception:  # the model's own: it cannot be trained like this at all
        return None
    expected = {}
    for name, parameter in dense.named_parameters():
        if parameter.requires_grad:
            step = torch.zeros_like(parameter)
            if parameter.grad is not None:
                part = fedspu.extract({name: parameter.grad}, {name: blocks[name]})
                step = fedspu.merge({name: step}, {name: blocks[name]}, part)[name]
            expected[name] = (parameter.detach() - 0.1 * step, step)
    return expected


def _rounding(model: nn.Module, example: Any, blocks: Any, expected: Any) -> float:
    """How far a plain step moves if the weights change in their last bit."""
    other = copy_model(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 4.4e-16 * torch.randint(-1, 2, parameter.shape).double())
    moved = _dense_step(other, example, blocks)
    return max(
        0.1 * float((moved[name][1] - step).abs().max())
        for name, (_, step) in expected.items()
        if step.numel()
    )


def _partial_step(
    model: nn.Module,
    example: Any,
    neurons: Any,
    active: Any,
    expected: Any,
    layout: Any,
    noise: float,
) -> str:
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    with fedspu.partial_training(model, neurons, active, layout=layout) as trainable:
        optimizer = torch.optim.SGD(trainable, lr=0.1)
        loss = _loss(model, example)
        assert loss is not None
        loss.backward()  # type: ignore[no-untyped-call]  # PyTorch's
        optimizer.step()
    scale = max(
        (float(s.abs().max()) for _, s in expected.values() if s.numel()), default=1
    )
    for name, parameter in model.named_parameters():
        if name in expected:
            wanted, step = expected[name]
            if not torch.equal(parameter[step == 0], own[name][step == 0]) and not (
                torch.allclose(
                    parameter[step == 0], own[name][step == 0], 0, 1e-14 * scale
                )
            ):
                return f"frozen entries of {name} moved"
            allowed = max(1e-9 * max(scale, 1), 100 * noise)
            if float((parameter - wanted).abs().max()) > allowed:
                return f"the step of {name} is not the masked dense step"
    return ""


def _in_child(name: str, limit: int) -> dict[str, Any]:
    """Examine one model in a process of its own; its CPU time is limited."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(readable)
        soon = int(time.process_time()) + limit
        resource.setrlimit(resource.RLIMIT_CPU, (soon, soon + 5))
        result = _guarded(name)
        with os.fdopen(writable, "w") as sink:
            json.dump(result, sink)
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as source:
        text = source.read()
    _, status = os.waitpid(child, 0)
    if text:
        found: dict[str, Any] = json.loads(text)
        return found
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return {"class": "too slow", "seconds": limit}
    return {"class": "crash", "error": "died"}


def _guarded(name: str) -> dict[str, Any]:
    from benchmarks.wild import MODELS

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, example = MODELS[name]()
            model, example = model.double().eval(), as_double(example)
            call(model, example)
            call(model, example)
        except Exception as error:
            return {"class": "not built", "error": str(error)[:200]}
        try:
            found = examine(model, example)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{os.path.basename(last.filename)}:{last.lineno}"
            return {
                "class": "crash",
                "error": f"{type(error).__name__} {where}: {error}"[:300],
            }
    share = found["share"]
    kind = "useful" if share <= 0.6 else "weak" if share <= 0.9 else "useless"
    return {"class": "wrong" if found["wrong"] else kind, **found}


def table(results: dict[str, dict[str, Any]]) -> str:
    """One line for each family, and one for all."""
    families: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, result in results.items():
        families[name.split("/")[0]].append(result)
    families["all"] = list(results.values())
    head = ("family", "tried", *CLASSES, "median s", "slowest s")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for family, found in families.items():
        counts = [sum(r["class"] == kind for r in found) for kind in CLASSES]
        times = [r["seconds"] for r in found if "share" in r] or [0.0]
        row = [family, len(found), *counts, f"{median(times):.1f}", f"{max(times):.1f}"]
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Examine the chosen models and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--exactly", action="store_true", help="names, not parts")
    parser.add_argument("--limit", type=int, default=60, help="CPU seconds per model")
    parser.add_argument("--json", help="write every result to this file")
    given = parser.parse_args()
    stub.install()
    from benchmarks.wild import MODELS

    results: dict[str, dict[str, Any]] = {}
    missing = set()
    for name in MODELS:
        if given.exactly:
            is_wanted = name in given.names
        else:
            is_wanted = not given.names or any(part in name for part in given.names)
        if not is_wanted:
            continue
        library = LIBRARIES[name.split("/")[0]]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                __import__(library)
        except ImportError:
            missing.add(library)
            continue
        result = results[name] = _in_child(name, given.limit)
        notes = result.get("error") or "; ".join(result.get("wrong", []))
        share, slim = result.get("share", 0), result.get("slim", 1)
        print(
            f"{name:45} {result['class']:9} {share:.2f} slim {slim:.2f} "
            f"{result.get('seconds', 0):5.1f} s  {notes}",
            flush=True,
        )
        if given.json:
            with open(given.json, "w", encoding="utf-8") as sink:
                json.dump(results, sink, indent=1)
    if missing:
        print(f"left out, because not installed: {', '.join(sorted(missing))}")
    print(table(results))


if __name__ == "__main__":
    main()
