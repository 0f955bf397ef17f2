"""Swaps a model's linear layers and attention function for ours, and back."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from types import MethodType
from typing import Any

from packaging.version import Version
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version

from megatron_cp.errors import ArgumentError
from megatron_cp.planner.batch import AttentionSpec, LinearSpec, Slot
from megatron_cp.transformers import logits, towers
from megatron_cp.transformers.additions import drop_token_loss, keep_token_loss
from megatron_cp.transformers.attention import NAME, SLOT, planned_attention, planned_batch
from megatron_cp.transformers.calls import LAYERS, Layers, run_checked
from megatron_cp.transformers.heads import has_head
from megatron_cp.transformers.indexers import IndexerRows, indexer_rows, is_indexer
from megatron_cp.transformers.logits import ChunksRows
from megatron_cp.transformers.mixers import check_activation, mixer_family
from megatron_cp.transformers.slots import attention_slot, is_attention
from megatron_cp.transformers.towers import TowerPlans, tower_of

# Class names of modules that mix tokens and are neither softmax attention nor a family of `mixers`.
_MIXES = re.compile(
    r"(Mixer|MambaLayer|DeltaNet\w*|DeltaAttention|DeltaRule|LinearAttention|LightningAttention|ShortConv(olution)?|"
    r"RecurrentBlock|Indexer|Compressor|Rwkv\w*|Retention|[ms]LSTM\w*)$"
)

# Classes whose forward takes `**kwargs` and does not pass them to its layers, with the first version that does.
_DROPS_ARGUMENTS = {
    "FalconH1Model": "5.13", "FalconH1DecoderLayer": "5.17", "Mamba2Block": "5.17", "Mamba2Model": "5.17",
    "NemotronHBlock": "5.17", "Mamba2ForCausalLM": None, "NemotronDecoderLayer": None, "StableLmDecoderLayer": None,
}  # fmt: skip
_DROPPING = frozenset(
    name for name, since in _DROPS_ARGUMENTS.items() if since is None or Version(transformers_version) < Version(since)
)


def slots_of(model: PreTrainedModel, attention_args: dict[str, Any], linear_args: dict[str, Any]) -> dict[str, Slot]:
    """Returns the spec of every layer that mixes tokens, by its module's name."""
    config = model.config.get_text_config()
    found: dict[str, Slot] = {}
    for name, module in text_modules(model):
        family = mixer_family(module)
        if family is not None:
            _check_forward(name, module)
            for label, child in module.named_children():
                if isinstance(child, nn.Conv1d):
                    _check_loaded(f"{name}.{label}", child)
            check_activation(module)
            found[name] = family.slot(module, **linear_args)
        elif is_attention(module, config):
            found[name] = spec = attention_slot(module, config, **attention_args)
            if spec.latent is not None:
                _check_loaded(f"{name}.kv_b_proj", module.get_submodule("kv_b_proj"))
        elif is_indexer(module):
            continue
        elif _MIXES.search(type(module).__name__) or any(isinstance(child, nn.Conv1d) for child in module.children()):
            remedy = "Its state, or its choice of keys, would be lost between ranks. Train it without cp."
            raise ArgumentError("model", f"{type(module).__name__} in {name or 'it'}", "layers that are known", remedy)
    if not found:
        raise ArgumentError("model", type(model).__name__, "a model with attention or linear layers")
    if attention_args.get("latents") and not any(getattr(slot, "latent", None) for slot in found.values()):
        remedy = (
            "latents=True needs multi-latent attention whose class has expand_kv, as newer classes of transformers "
            "have."
        )
        raise ArgumentError("latents", True, f"False for {type(model).__name__}", remedy)
    if any(isinstance(slot, AttentionSpec) for slot in found.values()) and not model._can_set_attn_implementation():
        remedy = "The model calls its own attention."
        raise ArgumentError(
            "model",
            type(model).__name__,
            "models whose attention goes through transformers' AttentionInterface",
            remedy,
        )
    return found


def _check_forward(name: str, module: nn.Module) -> None:
    """Refuses a forward of the instance's own, unless it calls that of the class by a method that the instance keeps.

    `accelerate`'s hooks do. Any other would be called in place of ours.
    """
    kept = (value for value in vars(module).values() if _is_method_of(module, type(module), value))
    if "forward" in vars(module) and not any(method.__name__ == "forward" for method in kept):
        remedy = f"Remove it (del model.{name}.forward), or write it into a class. Hooks of accelerate may stay."
        raise ArgumentError(
            "model", f"{name} with a forward of its own", "layers with the forward of their class", remedy
        )


def _check_loaded(name: str, module: nn.Module) -> None:
    """Refuses weights that a hook loads when their module is called: the layer reads them without a call."""
    if "forward" in vars(module) and any(each.is_meta for each in module.parameters()):
        remedy = "Keep the weights of this layer on a device: cpu_offload and device_map move them away between calls."
        raise ArgumentError("model", f"{name}, whose weights are loaded when it is called", "weights in place", remedy)


def text_modules(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Returns all modules but vision and audio towers, which every rank runs whole, with their own attention."""
    text = model.config.get_text_config()
    towers = [
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and module.config not in (text, model.config)
    ]
    return [(name, module) for name, module in model.named_modules() if not f"{name}.".startswith(tuple(towers))]


def swap_in(model: PreTrainedModel, slots: dict[str, Slot], logit_rows: int | None = None) -> Any:
    """Replaces the model's layers by ours. Returns the name of the attention implementation that it had."""
    AttentionInterface.register(NAME, planned_attention)
    modules = dict(model.named_modules())
    keep_token_loss(model)
    for prefix, above in modules.items():
        layers = {name: modules[name] for name in slots if not prefix or name.startswith(f"{prefix}.")}
        if layers and isinstance(above, PreTrainedModel):
            _check_calls(above, Layers(layers, has_head(model) if above is model else None))
    for above in {id(modules[above]): modules[above] for name in slots for above in _parent_names(name)}.values():
        if _drops_arguments(above) and not isinstance(above, _PassesPlans):
            _become(above, _derived(_PassesPlans, type(above), type(above).__name__))
    for name, slot in slots.items():
        module = modules[name]
        setattr(module, SLOT, slot)
        if isinstance(slot, LinearSpec) and not isinstance(module, _Planned):
            _become(module, _derived(_Planned, type(module), f"ContextParallel{type(module).__name__}"))
        if isinstance(slot, AttentionSpec) and slot.latent is not None and not isinstance(module, _KeepsLatents):
            keeps = _KeepsLatents if slot.topk is None else _Selects
            _become(module, _derived(keeps, type(module), type(module).__name__))
        if isinstance(slot, AttentionSpec) and slot.indexer is not None:
            indexer: Any = module.indexer
            setattr(indexer, SLOT, slot)
            if not isinstance(indexer, _GivesRows):
                _become(indexer, _derived(_GivesRows, type(indexer), type(indexer).__name__))
    if logit_rows is not None:
        # Adapters of the head that were made after it was swapped in are copies of it.
        heads = [each for each in modules.values() if logits.ROWS in vars(each)] or [model.get_output_embeddings()]
        for head in heads:
            setattr(head, logits.ROWS, logit_rows)
            if not isinstance(head, _ChunksRows):
                _become(head, _derived(_ChunksRows, type(head), type(head).__name__))
    if (tower := tower_of(model)) is not None:
        AttentionInterface.register(towers.NAME, towers.tower_attention)
        for module, is_windowed in towers.attention_of(tower):
            setattr(module, towers.WINDOWED, is_windowed)
            if not isinstance(module, _SplitsImages):
                _become(module, _derived(_SplitsImages, type(module), type(module).__name__))
    return set_attention(model, NAME)


def _check_calls(model: PreTrainedModel, layers: Layers) -> None:
    """Makes a model check its calls: the enabled one, and those in it, which may be called in its place."""
    setattr(model, LAYERS, layers)
    if not isinstance(model, _CheckedCall):
        first = _CheckedCallPassesPlans if _drops_arguments(model) else _CheckedCall
        _become(model, _derived(first, type(model), type(model).__name__))  # the name is saved with a model


def check_own_forwards(model: PreTrainedModel) -> None:
    """Makes a forward that stands before that of a model's class, such as TRL's, check its calls as well.

    Only once: a forward that is set later, such as that of our trainers, may take whole batches.
    """
    for each in model.modules():
        forward = vars(each).get("forward")
        if LAYERS in vars(each) and forward is not None:
            checked = functools.partial(run_checked, each, forward)
            vars(each)["forward"] = functools.update_wrapper(checked, forward)


def _become(module: nn.Module, kind: type) -> None:
    """Changes a module's class, and that of its methods that the instance keeps, as accelerate's hooks keep `forward`.

    A hook's `forward` stands before that of the class, and calls the method that it kept.
    """
    before, module.__class__ = type(module), kind
    for name, value in list(vars(module).items()):
        if _is_method_of(module, before, value):
            vars(module)[name] = MethodType(getattr(kind, value.__name__), module)


def _is_method_of(module: nn.Module, kind: type, value: object) -> bool:
    """True if a value is a method of the class, bound to the module."""
    if not isinstance(value, MethodType) or value.__self__ is not module:
        return False
    return getattr(kind, value.__name__, None) is value.__func__


def _parent_names(name: str) -> list[str]:
    """Returns the names of the modules that contain a module, with the model's name `""`."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))]


def _drops_arguments(module: nn.Module) -> bool:
    """True if the module's layers are not given the keyword arguments that the module is called with.

    Its class is one that drops them, its forward takes no `**kwargs`, or that of a mixer in it takes none. In a class
    that drops them and is not known here, layers refuse the call, since they are not given the batch.
    """
    if isinstance(module, nn.ModuleList | nn.ModuleDict):  # containers are never called
        return False
    if any(kind.__name__ in _DROPPING for kind in type(module).__mro__):
        return True
    mixers = (child for child in module.children() if mixer_family(child) is not None)
    return not all(_takes_others(type(each)) for each in (module, *mixers))


def _takes_others(kind: type[nn.Module]) -> bool:
    """True if the forward of a class takes any keyword argument."""
    parameters = inspect.signature(kind.forward).parameters.values()
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


def swap_out(model: PreTrainedModel, attention: Any) -> None:
    """Restores the model's own layers and the attention implementation that it had."""
    drop_token_loss(model)
    for module in model.modules():
        for name in (SLOT, LAYERS):
            if name in vars(module):
                delattr(module, name)
        # fully_shard derives a class from ours, and its forward runs the stock one without SLOT.
        if type(module) in _DERIVED.values():
            _become(module, type(module).__bases__[1])
    set_attention(model, attention)


def is_swapped(model: nn.Module) -> bool:
    """True if the model's layers are ours."""
    return any(SLOT in vars(module) for module in model.modules())


def set_attention(model: PreTrainedModel, name: str) -> str:
    """Sets the text model's attention implementation by name. Returns the name of the previous one."""
    text = model.config.get_text_config()
    before = text._attn_implementation
    key = next((key for key in model.config.sub_configs if getattr(model.config, key, None) is text), None)
    model.set_attn_implementation(name if key is None else {key: name})
    return before


def copy_configs(model: PreTrainedModel) -> None:
    """Gives a model and its modules copies of their configurations, which other models may share."""
    copies: dict[int, Any] = {}  # deepcopy's memo keeps a text configuration the same object as the whole one's
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                vars(module)[name] = copy.deepcopy(value, copies)


class _Derived:
    """The base of classes that are made at run time, and so are pickled by the classes they are made from."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind = type(self)
        if kind not in _DERIVED.values():
            return super().__reduce_ex__(protocol)
        return _unpickled, (*kind.__bases__, kind.__name__), vars(self).copy()


class _Planned(_Derived):
    """A mixin before a class of transformers' mixers: runs the layer by the batch's plan."""

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None,
        cp_batch: Any = None, **others: Any,
    ) -> Tensor:  # fmt: skip
        if SLOT not in vars(self):  # disabled
            stock = super().forward  # type: ignore[misc]
            return stock(hidden_states, cache_params=cache_params, attention_mask=attention_mask, **others)
        given = {"cache_params": cache_params, "attention_mask": attention_mask}
        for name, value in given.items():
            if value is not None:
                raise ArgumentError(
                    name, type(value).__name__, "None", "Call the model with ContextParallel.shard's batch."
                )
        module: Any = self
        family = mixer_family(module)
        assert family is not None
        return family.mixed(module, hidden_states[0], planned_batch(cp_batch))[None]


class _KeepsLatents(_Derived):
    """A mixin before a class of multi-latent attention: gives attention its latents, which it expands on arrival."""

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        if SLOT not in vars(self):  # disabled
            expanded: tuple[Tensor, Tensor] = super().expand_kv(kv_nope, k_rot)  # type: ignore[misc]
            return expanded
        return k_rot, kv_nope


class _NoMask:
    """A stand-in for the mask of layers that select keys, of which they take a part for their indexer."""

    def __getitem__(self, _: object) -> None:
        return None


class _Selects(_KeepsLatents):
    """A mixin before a class of attention with an indexer, whose layers must have a mask."""

    def forward(self, *args: Any, attention_mask: Tensor | None = None, **others: Any) -> Any:
        stock = super().forward  # type: ignore[misc]
        if SLOT not in vars(self):  # disabled
            return stock(*args, attention_mask=attention_mask, **others)
        return stock(*args, attention_mask=_NoMask() if attention_mask is None else attention_mask, **others)


class _GivesRows(_Derived):
    """A mixin before an indexer's class: returns the rows by which attention chooses keys."""

    def forward(self, hidden_states: Tensor, *args: Any, **others: Any) -> IndexerRows | Tensor:
        if SLOT not in vars(self):  # disabled
            stock = super().forward  # type: ignore[misc]
            found: Tensor = stock(hidden_states, *args, **others)
            return found
        return indexer_rows(self, hidden_states, *args)


class _PassesPlans(_Derived):
    """A mixin before a class whose forward drops keyword arguments: passes the batch's plans to the layers by hooks."""

    def forward(self, *args: Any, cp_batch: Any = None, **others: Any) -> Any:
        model: Any = self
        if cp_batch is None:
            return super().forward(*args, **others)  # type: ignore[misc]
        hooks = [
            below.register_forward_pre_hook(
                lambda _, inputs, named: (inputs, {**named, "cp_batch": cp_batch}), with_kwargs=True
            )
            for below in _with_slots(model)
        ]
        try:
            return super().forward(*args, **others)  # type: ignore[misc]
        finally:
            for hook in hooks:
                hook.remove()


class _SplitsImages(_Derived):
    """A mixin before the class of a tower's attention: attends over the ranks where images are split."""

    def forward(self, *args: Any, cp_tower: TowerPlans | None = None, **others: Any) -> Any:
        stock = super().forward  # type: ignore[misc]
        if cp_tower is None:
            return stock(*args, **others)
        own: Any = vars(self)["config"]
        vars(self)["config"] = asking = copy.copy(own)
        asking._attn_implementation_internal = towers.NAME
        try:
            return stock(*args, cp_tower=cp_tower, **others)
        finally:
            vars(self)["config"] = own


class _ChunksRows(ChunksRows, _Derived):
    """The mixin of heads."""


class _CheckedCall(_Derived):
    """A mixin before the class of a model: checks its calls with a rank's rows."""

    def forward(self, *args: Any, **given: Any) -> Any:
        return run_checked(self, super().forward, *args, **given)  # type: ignore[misc]


class _CheckedCallPassesPlans(_CheckedCall, _PassesPlans):
    """Both mixins, for an enabled model whose forward drops keyword arguments."""


def _with_slots(module: nn.Module) -> list[nn.Module]:
    """Returns the modules that `module` calls and that have a spec or contain a module with one."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found += _with_slots(child)
        elif any(SLOT in vars(each) for each in child.modules()):
            found.append(child)
    return found


_DERIVED: dict[tuple[type, type], type] = {}  # by (mixin, stock class), so that modules of a class share one


def _unpickled(first: type, kind: type, name: str) -> Any:
    """Returns an instance, without its state, of the class that a pickle names."""
    AttentionInterface.register(NAME, planned_attention)
    AttentionInterface.register(towers.NAME, towers.tower_attention)
    return object.__new__(_derived(first, kind, name))


def _derived(first: type, kind: type, name: str) -> type:
    """Returns the class `kind` with the mixin `first` before it; parameters and their names are the same."""
    if (first, kind) not in _DERIVED:
        # transformers looks up by the class's full name what a model records, such as hidden states.
        contents: dict[str, Any] = {"__module__": kind.__module__}
        if hasattr(first, "forward"):
            contents["forward"] = _forward_of(first, kind)
        _DERIVED[first, kind] = type(name, (first, kind), contents)
    return _DERIVED[first, kind]


def _forward_of(first: Any, kind: Any) -> Any:
    """Returns the forward of a derived class. Trainers read from its signature which arguments a model takes."""

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **given: Any) -> Any:
        # A wrapper that kept this function, such as accelerate's for autocast, calls it when the model is disabled too.
        run = first.forward if isinstance(self, first) else kind.forward
        return run(self, *args, **given)

    return forward
