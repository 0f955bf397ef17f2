"""Refuses terms of a loss, noise and adapters that a rank cannot compute from its own tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.no_compile import no_compile
from megatron_cp.torch_private import version_of
from megatron_cp.transformers.logits import ChunkedLogits, chunked_loss

NEFTUNE = "It divides noise by the number of rows, and a rank has only a part of the rows."
_SHARES = (
    "The ranks' losses are summed. A term that is not a sum over tokens divided by num_items_in_batch, such as a "
    "mean or a penalty on weights, would count once for every rank. Set its weight to 0; in a loop of your own, "
    "add a penalty on weights divided by parallel.cp_size."
)


def check_additions(model: nn.Module) -> None:
    """Refuses adapters of PEFT and noise that a rank cannot compute from its own tokens.

    An adapter is accepted if it replaces modules that act on each token, as LoRA does. Not accepted are those that put
    virtual tokens before a row, that look for tokens in it, or whose forward does more than to call the model's.
    """
    adapters = getattr(model, "peft_config", None)
    for adapter in adapters.values() if isinstance(adapters, Mapping) else ():
        check_adapter(adapter)
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    if (alpha := getattr(embeddings, "neftune_noise_alpha", None)) is not None:
        raise ArgumentError("neftune_noise_alpha", alpha, "None", NEFTUNE)


def check_adapter(config: Any) -> None:
    """Refuses an adapter, by its configuration in PEFT, that does not act on each token by itself."""
    from peft import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.tuners.tuners_utils import BaseTuner

    kind = str(getattr(config.peft_type, "value", config.peft_type))
    tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type)
    why = None
    if config.is_prompt_learning:
        why = "It puts virtual tokens before a row, and so before the part of every rank."
    elif getattr(config, "alora_invocation_tokens", None) is not None:
        kind, why = (
            "activated LoRA",
            "It searches a row for its last invocation tokens, but a rank has only a part of the row.",
        )
    elif not (isinstance(tuner, type) and issubclass(tuner, BaseTuner) and tuner.forward is BaseTuner.forward):
        why = "Its forward does more than call the model: it adds to the loss, or reads whole rows."
    if why is not None:
        allowed = "adapters of modules that act on each token, such as LoraConfig"
        raise ArgumentError("peft_config", kind, allowed, why)


class TokenLoss:
    """A model's loss function, which keeps what it returned last.

    Attributes:
        function: the loss function.
        loss: the loss of the call that has not been checked yet; None before it.
        value: the number that it was; None if the last call of the model had no loss.
        follows: True to keep the graph of the model's loss too, which takes the memory of what it saved.
        node: the last node of that graph.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.loss: Tensor | None = None
        self.value: Tensor | None = None
        self.follows, self.node = False, None

    def __call__(self, logits: Any, *args: Any, **named: Any) -> Tensor:
        chunked = isinstance(logits, ChunkedLogits)
        loss = chunked_loss(self.function, logits, *args, **named) if chunked else self.function(logits, *args, **named)
        self.loss, self.value = loss, loss.detach().clone()
        return loss

    def __reduce__(self) -> Any:
        return TokenLoss, (self.function,)

    @no_compile
    def check(self, outputs: Any, where: str) -> None:
        """Refuses a model's outputs whose loss is not what the loss function returned."""
        own, self.loss = self.loss, None
        if own is None or outputs is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
        if loss is None:
            return
        is_same = loss is own and not loss.is_inference() and version_of(loss) == 0  # asks no device
        if not is_same and not equal(loss, self.value):
            raise ArgumentError(
                "model", f"a term that {where} adds to the loss of its tokens", "the loss of tokens alone", _SHARES
            )
        if self.follows:
            self.node = loss.grad_fn


def keep_token_loss(model: Any) -> None:
    """Makes a model's loss function one that keeps its result; once."""
    if not isinstance(model.loss_function, TokenLoss):
        model.loss_function = TokenLoss(model.loss_function)


def drop_token_loss(model: Any) -> None:
    """Undoes `keep_token_loss`."""
    if isinstance(kept := model.loss_function, TokenLoss):
        del model._loss_function
        if model.loss_function is not kept.function:
            model.loss_function = kept.function


def is_scaled(node: Any, before: Any, factor: int, by: str = "MulBackward0") -> bool:
    """True if a node of a graph is `before`, if `factor` is 1, or multiplies its result by `factor`; asks no device.

    With `by` "DivBackward0" it divides it.
    """
    if node is None or before is None:
        return False
    if node is before:
        return factor == 1
    if node.name() != by or node.next_functions[0][0] is not before:
        return False
    number = node._saved_other  # of a number that is no tensor, on the host
    return number is not None and number.device.type == "cpu" and bool(number.item() == factor)


class Share:
    """A loss as it was when this was made."""

    def __init__(self, loss: Tensor) -> None:
        self.node, self.value = loss.grad_fn, loss.detach().clone()

    def is_of(self, loss: Tensor, steps: int) -> bool:
        """True for that loss, divided by a number of steps or not. Numbers are compared if no graph says so."""
        node = loss.grad_fn
        if is_scaled(node, self.node, 1) or is_scaled(node, self.node, steps, "DivBackward0"):
            return True
        return equal(loss, self.value) or equal(loss, self.value / steps)


def equal(loss: Any, other: Any) -> bool:
    """True if two losses are the same number, or no number both."""
    return torch.allclose(loss.detach(), other.to(loss), rtol=0, atol=0, equal_nan=True)
