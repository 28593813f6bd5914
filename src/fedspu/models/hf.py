"""A Hugging Face model: ``hf:FOLDER``, as ``save_pretrained`` wrote it (extra: hf).

``config.json`` says what the model is, by its ``architectures``; weights are taken
from ``model.safetensors`` if the folder has it, and are random otherwise. Nothing is
fetched, and no code in the folder is run.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedspu.errors import ModelError, how_to_install

PREFIX = "hf:"
LARGEST_CONFIG = 2**20
WANTED = "expected a folder that save_pretrained of Hugging Face transformers wrote"


class HuggingFaceModel(nn.Module):
    """Takes one tensor of examples and returns scores, as all models of fedspu do.

    Tokens are a tensor (n, length); places with the padding token are not attended to,
    and columns in which every row has padding are left out where that changes nothing.
    """

    def __init__(self, model: nn.Module, padding: int | None) -> None:
        super().__init__()
        self.model, self.padding = model, padding

    def forward(self, x: Tensor) -> Tensor:
        """Scores: (n, classes), or (n, length, tokens)."""
        given: dict[str, Any] = {}
        if not x.is_floating_point() and self.padding is not None:
            is_token = x != self.padding
            if self._scores_whole_rows:
                length = int(is_token.any(0).nonzero().max()) + 1
                x, is_token = x[:, :length], is_token[:, :length]
            given["attention_mask"] = is_token.long()
        name: str = self.model.main_input_name  # type: ignore[assignment]  # theirs
        scores: Tensor = self.model(**{name: x}, **given).logits
        return scores

    @property
    def _scores_whole_rows(self) -> bool:
        return type(self.model).__name__.endswith("SequenceClassification")


def build(name: str, num_outputs: int | None) -> nn.Module:
    """The model in the folder; a classifier gets as many outputs as the data needs."""
    folder = Path(name.removeprefix(PREFIX))
    kind = _architecture(folder, name)
    library = _library()
    maker = getattr(library, kind, None)
    if maker is None or not hasattr(maker, "from_pretrained"):
        raise ModelError(
            f"model = {name!r}: its architecture {kind!r} is not one of transformers "
            f"{library.__version__}; {WANTED}"
        )
    given: dict[str, Any] = {"local_files_only": True}
    try:
        config = library.AutoConfig.from_pretrained(folder, **given)
        config.use_cache = False
        if num_outputs is not None and kind.endswith("Classification"):
            config.num_labels = num_outputs
        if (folder / "model.safetensors").exists():
            model = maker.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # a head for other classes is made anew
                **given,
            )
        else:
            model = maker(config)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"model = {name!r}: {line}; {WANTED}") from None
    return HuggingFaceModel(model, getattr(config, "pad_token_id", None))


def padding_of(name: str) -> int | None:
    """The token that means padding; None if the model has none."""
    found = _config(Path(name.removeprefix(PREFIX)), name).get("pad_token_id")
    return found if isinstance(found, int) else None


def _architecture(folder: Path, name: str) -> str:
    listed = _config(folder, name).get("architectures")
    if not isinstance(listed, list) or len(listed) != 1 or not str(listed[0]):
        raise ModelError(
            f"model = {name!r}: config.json has architectures = {json.dumps(listed)}; "
            'expected one, as in ["BertForSequenceClassification"]: save the model '
            "itself with save_pretrained, not only its config"
        )
    return str(listed[0])


def _config(folder: Path, name: str) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        with file.open("rb") as opened:
            found = json.loads(opened.read(LARGEST_CONFIG))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not JSON"
        raise ModelError(f"model = {name!r}: {file}: {reason}; {WANTED}") from None
    if not isinstance(found, dict):
        raise ModelError(f"model = {name!r}: {file}: not a table; {WANTED}")
    return found


def _library() -> Any:
    try:
        import transformers
    except ImportError:
        raise ModelError(
            "a model hf:FOLDER needs Hugging Face transformers; install it with: "
            f"{how_to_install('hf')}"
        ) from None
    library: Any = transformers
    library.logging.set_verbosity_error()  # a new head is what was asked for
    library.logging.disable_progress_bar()
    return library
