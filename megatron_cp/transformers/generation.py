"""Context parallelism for TRL's trainers that generate what they learn from: GRPOTrainer and RLOOTrainer.

    class LongGRPOTrainer(ContextParallelGRPOMixin, GRPOTrainer): ...

    args = GRPOConfig(..., parallelism_config=Parallelism(cp_size=2))

TRL's configurations refuse accelerate's `ParallelismConfig`, which shards batches before there are completions. Here
the ranks of a group have the same prompts, completions and rewards, and the model computes its share of them when the
trainer asks for log-probabilities.
"""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import set_seed
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.transformers.preference import ContextParallelPreferenceMixin

# Arguments whose numbers depend on how often a completion is counted, which is once on every rank of a group.
_COUNTED = {
    "scale_rewards": ("group", "none"),
    "multi_objective_aggregation": ("sum_then_normalize",),
    "top_entropy_quantile": (1.0,),
    "normalize_advantages": (False,),
}


# What TRL can do and was not run over ranks.
_UNTRIED = {
    "use_vllm": "Its engine has not been run beside ranks that share completions: the model generates.",
    "use_transformers_continuous_batching": "Its paged attention has not been run with this model's layers.",
}


class ContextParallelGRPOMixin(ContextParallelPreferenceMixin):
    """A mixin for TRL's GRPOTrainer and RLOOTrainer: `class Mine(ContextParallelGRPOMixin, GRPOTrainer)`.

    Every rank generates whole completions; those of a group's first rank, and their rewards, are taken by all of its
    ranks. Log-probabilities of the policy, of the reference and of the policy before the step are computed over the
    ranks. Losses, their gradients and metrics equal those of one rank for each group, but for standard deviations of
    rewards in the log, which count a completion once for every rank.

    A tool runs on a group's first rank alone, and its answer, or its error, is that of all. A `rollout_func` runs on
    every rank, and what it returns on the first one is taken.

    Args:
        args, named: arguments of the trainer. `args.parallelism_config` is a `Parallelism`.
            `args.generation_batch_size` counts the completions of a group once.
        layout, scheme, linear_mode, cp_options: as in `ContextParallelMixin`.

    Raises:
        ArgumentError: what `ContextParallelPreferenceMixin` refuses, prompts whose completions several groups generate,
            or statistics over all completions: `scale_rewards="batch"`,
            `multi_objective_aggregation="normalize_then_sum"`, `top_entropy_quantile`, `normalize_advantages`; vLLM,
            continuous batching, environments, tools that are coroutines, and images.
    """

    _trl_trainers = ("GRPOTrainer", "RLOOTrainer")
    _pads_left = True
    _takes_images = False
    _metrics: dict[str, dict[str, list[Any]]]
    _standalone_tools: list[Callable[..., Any]]
    eval_dataset: Any
    num_generations_eval: int
    rollout_func: Callable[..., Any] | None

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        if self._mesh is not None:
            axis = self._mesh.mesh_dim_names.index("cp")
            groups = self._mesh.mesh.movedim(axis, -1).reshape(-1, self.context_parallel.cp_size).long()
            self._first = torch.empty(groups.numel(), dtype=torch.long)  # [ranks]: the first rank of each one's group
            self._first[groups.flatten()] = groups[:, :1].expand_as(groups).flatten()
            # TRL gives every process a seed of its own.
            set_seed(self.args.seed + int((groups == dist.get_rank()).any(1).nonzero()))
            if getattr(self, "tools", None):
                self._standalone_tools = [self._shared_tool(tool) for tool in self._standalone_tools]
            if (rollout := getattr(self, "rollout_func", None)) is not None:
                self.rollout_func = lambda prompts, trainer: self._of_first(rollout(prompts, trainer))
            if self.eval_dataset is not None:
                batch = self.args.per_device_eval_batch_size
                _check_groups("per_device_eval_batch_size", batch, self.num_generations_eval)

    def _build_accelerator_args(self, **named: Any) -> dict[str, Any]:
        built = super()._build_accelerator_args(**named)
        args, config = self.args, self._asked
        if config is not None and config.cp_size > 1:
            for name, allowed in _COUNTED.items():
                if getattr(args, name, allowed[0]) not in allowed:
                    raise ArgumentError(f"args.{name}", getattr(args, name), " or ".join(map(repr, allowed)))
            self._check_generation()
            batch = args.per_device_train_batch_size * args.steps_per_generation
            _check_groups("per_device_train_batch_size * args.steps_per_generation", batch, args.num_generations)
            args.generation_batch_size = batch * (args.world_size // config.cp_size)
        return built

    def _check_generation(self) -> None:
        for name, remedy in _UNTRIED.items():
            if getattr(self.args, name, False):
                raise ArgumentError(f"args.{name}", True, "False", remedy)
        if getattr(self, "environment_factories", None) is not None:
            remedy = "Every rank would have environments of its own. Give their methods as tools."
            raise ArgumentError("environment_factory", "a function", "None", remedy)
        for tool in getattr(self, "tools", None) or []:
            if inspect.iscoroutinefunction(tool):
                remedy = "Ranks would exchange the answers of tools in different orders."
                raise ArgumentError("tools", tool.__name__, "functions that are not async", remedy)

    # -- methods that the trainer calls -----------------------------------------------------------------------------

    def _generate(self, prompts: list[Any]) -> Any:
        """Generates with the stock layers, on every rank; completions are those of the group's first rank."""
        before = self.state.num_input_tokens_seen
        with self.context_parallel.disabled():
            found = super()._generate(prompts)  # type: ignore[misc]
        if self._group is None:
            return found
        # The sum over ranks counts the tokens of a group once for every rank.
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self._group.size()
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]
        # Counts of tokens are tensors on this rank's device, and equal already.
        pairs = zip(found, self._of_first(found), strict=True)
        return tuple(own if isinstance(own, Tensor) else first for own, first in pairs)

    def _generate_single_turn(self, *args: Any, **named: Any) -> Any:
        """Shares completions before the trainer counts their tokens."""
        return self._of_first(super()._generate_single_turn(*args, **named))  # type: ignore[misc]

    def _calculate_rewards(self, *args: Any, **named: Any) -> Tensor:
        """Returns the rewards `[completions of all ranks, functions]`; those of a group are its first rank's."""
        rewards: Tensor = super()._calculate_rewards(*args, **named)  # type: ignore[misc]
        self._of_first(None)  # the trainer shuffles completions next, and dropout has drawn for each rank's own rows
        if self._mesh is None:
            return rewards
        return rewards.unflatten(0, (len(self._first), -1))[self._first.to(rewards.device)].flatten(0, 1)

    def _shared_tool(self, tool: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a tool run on the group's first rank; its result, or the text of its error, is that of all ranks."""

        @functools.wraps(tool)
        def shared(*args: Any, **named: Any) -> Any:
            result, error = None, None
            if self.context_parallel.rank == 0:
                try:
                    result = tool(*args, **named)
                    result = result if isinstance(result, list) else str(result)  # as the trainer shows it to the model
                    pickle.dumps(result)  # here, so that what cannot be sent is an error on every rank
                except Exception as failure:  # which the trainer answers to the model
                    error = str(failure)
            result, error = self._of_first((result, error))
            if error is not None:
                raise RuntimeError(error)
            return result

        return shared

    def _of_first(self, value: Any) -> Any:
        """Returns the value of the group's first rank, whose state of random numbers all its ranks take."""
        if self._group is None:
            return value
        shared = [(value, torch.get_rng_state())]
        dist.broadcast_object_list(shared, group=self._group, group_src=0)
        torch.set_rng_state(shared[0][1])
        return shared[0][0]


def _check_groups(name: str, completions: int, generations: int) -> None:
    if completions % generations:
        remedy = "The completions of a prompt are those of one group of ranks."
        raise ArgumentError(f"args.{name}", completions, f"a multiple of the {generations} generations", remedy)
