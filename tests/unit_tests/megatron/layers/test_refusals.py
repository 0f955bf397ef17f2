"""Tests of the adapter's refusals when a model is built, by Megatron's flags. Groups only have a size: no ranks run.

What needs real ranks to be refused is in tests/functional_tests/test_megatron_batch.py.
"""

import argparse
import dataclasses
import types

import pytest
import torch

from megatron_cp.executor.agreement import compare_calls

pytest.importorskip("megatron.core")

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.ssm import mamba_mixer
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.enums import AttnMaskType, CudaGraphModule
from megatron.core.transformer.experimental_attention_variant import absorbed_mla, dsa
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import nn

from megatron_cp.executor.groups import ThreadGroup
from megatron_cp.layout import Layout, Packing
from megatron_cp.megatron import slots, specs
from megatron_cp.megatron.batch import layout_options
from megatron_cp.megatron.config import TransformerConfig as OurConfig
from megatron_cp.megatron.config import add_arguments, with_options
from megatron_cp.megatron.layers import attention, refusals
from megatron_cp.megatron.layers import multi_latent_attention as latent_module
from megatron_cp.megatron.layers.attention import CoreAttention
from megatron_cp.megatron.layers.base import ContextParallelModule
from megatron_cp.megatron.layers.communication import no_heads, spec_options
from megatron_cp.megatron.layers.gated_delta_net import GatedDeltaNet
from megatron_cp.megatron.layers.mamba_mixer import MambaMixer
from megatron_cp.megatron.layers.multi_latent_attention import MLASelfAttention
from megatron_cp.megatron.layers.norms import Norm
from megatron_cp.megatron.layers.refusals import check_comm_type, refuse_unaligned, refuse_unsupported
from megatron_cp.megatron.layers.sparse_attention import SparseCoreAttention, SparseMLASelfAttention
from megatron_cp.megatron.packed_seq_params import Documents
from tests.refusals import rejects


@dataclasses.dataclass
class Group:
    """A process group of one rank, as far as building a layer asks."""

    members: int = 1

    def size(self):
        return self.members

    def rank(self):
        return 0


@dataclasses.dataclass
class Groups:
    cp: Group = dataclasses.field(default_factory=Group)
    tp: Group = dataclasses.field(default_factory=Group)


def configure(cls=TransformerConfig, **changes):
    settings = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "attention_dropout": 0.0}
    return cls(**settings | {"calculate_per_token_loss": True} | changes)


def build(attn_mask_type=AttnMaskType.causal, attention_type="self", config=None, others=None, **changes):
    config = configure(**changes) if config is None else config
    return CoreAttention(config, 1, attn_mask_type, attention_type, pg_collection=Groups(), **others or {})


def test_a_layer_searches_for_tiles_as_its_flags_say():
    assert build(config=configure(OurConfig, cp_search=2.5)).slot.search_seconds == 2.5
    assert build().slot.search_seconds == 0.0
    flags = add_arguments(argparse.ArgumentParser()).parse_args(["--cp-search", "3"])
    latent = with_options(configure(MLATransformerConfig), flags)
    assert latent.cp_search == 3.0
    config = configure(OurConfig, cp_comm_type=["a2a", "tiled"], context_parallel_size=2, cp_search=1.0)
    found = {scheme: slots._search(config, scheme) for scheme in config.cp_comm_type}
    assert found == {"a2a": {}, "tiled": {"search_seconds": 1.0}}


def test_windows_and_sinks_are_megatrons():
    layer = build()
    assert (layer.slot.heads, layer.slot.head_dim, layer.slot.mask, layer.slot.scheme) == (4, 8, "causal", "auto")
    assert build(AttnMaskType.no_mask).slot.mask == "full"
    assert build(window_size=(4, 0)).slot.mask == "window:4,0"
    assert build(window_size=(4, 3)).slot.mask == "window:4,0"  # it is causal
    assert build(AttnMaskType.no_mask, window_size=(4, 3)).slot.mask == "window:4,3"
    layers = [CoreAttention(configure(window_size=(4, 0), window_attn_skip_freq=2), number, AttnMaskType.causal, "self",
                            pg_collection=Groups()) for number in (1, 2)]  # fmt: skip
    assert [layer.slot.mask for layer in layers] == ["window:4,0", "causal"]
    assert build().softmax_offset is None
    off_by_one, learnable = build(softmax_type="off-by-one"), build(softmax_type="learnable")
    assert off_by_one.softmax_offset.tolist() == [0] * 4
    assert list(off_by_one.state_dict()) == []
    assert learnable.softmax_offset.shape == (4,)
    assert list(learnable.state_dict()) == ["softmax_offset"]


@pytest.fixture
def build_on(monkeypatch):
    """Returns a function that builds the attention of one of `cp_size` ranks."""

    def one_of(group):
        rank = ThreadGroup.create(group.size())[0]
        compare_calls(rank, False)  # there are no others
        return rank

    def build_one(cp_size, cp_comm_type, number=1, **changes):
        config = configure(OurConfig, cp_comm_type=cp_comm_type, context_parallel_size=cp_size, **changes)
        own = cp_comm_type[number - 1] if isinstance(cp_comm_type, list) else cp_comm_type
        groups = Groups(cp=Group(cp_size))
        return CoreAttention(config, number, AttnMaskType.causal, "self", own, pg_collection=groups)

    monkeypatch.setattr(attention, "cp_ranks", one_of)
    return build_one


SIZES = "hierarchical_context_parallel_sizes"
UNTAKEN = [
    ("--cp-comm-type: got 'a2a[+]p2p'; allowed: ", 3, "a2a+p2p", {}),
    ("--hierarchical-context-parallel-sizes: got 4; allowed: ", 6, "a2a+p2p", {SIZES: [4, 2]}),
    (r"--hierarchical-context-parallel-sizes: got \[2, 2, 2\]; allowed: ", 8, "a2a+p2p", {SIZES: [2, 2, 2]}),
    *(("--hierarchical-context-parallel-sizes: got 2; allowed: ", 4, scheme, {SIZES: [2, 2]})
      for scheme in ("a2a", "p2p", "exact", ["p2p", "exact"])),
    *(("--cp-head-chunks: got 2; allowed: ", 2, scheme, {"cp_head_chunks": 2}) for scheme in ("p2p", ["p2p", "p2p"])),
]  # fmt: skip


@pytest.mark.parametrize(("says", "cp_size", "scheme", "options"), UNTAKEN)
def test_rejects_options_that_no_layers_scheme_takes(says, cp_size, scheme, options, build_on):
    rejects(says, build_on, cp_size, scheme, **options)


def test_sizes_and_head_chunks_are_those_of_auto_and_of_the_layers_of_a_list_that_take_them(build_on):
    options = {"hierarchical_context_parallel_sizes": [2, 2], "cp_head_chunks": 1}
    assert build_on(6, "a2a+p2p", hierarchical_context_parallel_sizes=[3, 2]).slot.ulysses_degree == 3
    slots = [build_on(4, ["a2a+p2p", "p2p"], number, **options).slot for number in (1, 2)]
    assert [(slot.ulysses_degree, slot.head_chunks) for slot in slots] == [(2, 1), (None, None)]
    for scheme in ("auto", None):
        slot = build_on(4, scheme, **options).slot
        assert (slot.ulysses_degree, slot.head_chunks) == (2, 1)
        plan = slot.plan(Layout.zigzag(Packing([96, 1, 31]), 4))
        assert (plan.scheme.startswith("a2a+"), plan.ulysses_degree) == (True, 2)


def test_keys_and_values_of_latents_have_sizes_and_heads_of_their_own():
    config = configure(MLATransformerConfig, num_query_groups=2)
    slot = build(config=config, others={"k_channels": 12, "v_channels": 6}).slot
    assert (slot.heads, slot.kv_heads, slot.head_dim, slot.value_head_dim) == (4, 4, 12, 6)
    assert build(config=config).slot.kv_heads == 2  # the one that Megatron builds first, and throws away


@pytest.mark.parametrize("name", ["MLASelfAttention", "FusedMLASelfAttention"])
def test_latent_attention_is_exchanged_for_ours_fused_or_not(name):
    layer = gpt_layer_specs.get_gpt_layer_local_spec(multi_latent_attention=True)
    layer.submodules.self_attention.module = getattr(multi_latent_attention, name)
    ours = specs._replace_modules(layer).submodules.self_attention
    assert ours.module is getattr(specs, name)
    assert ours.submodules.core_attention is CoreAttention


LAYERS = {
    "attention": lambda config: build(config=config),
    "gdn": lambda config: GatedDeltaNet(config, None, 1, pg_collection=Groups()),
    "mamba": lambda config: MambaMixer(config, None, layer_number=1, pg_collection=Groups()),
}


@pytest.mark.parametrize(
    ("flags", "align"),
    [
        ({}, 1), ({"tensor_model_parallel_size": 2}, 1),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2), ({"fp8": "e4m3"}, 16),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, 16), ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, 32),
        ({"fp8": "hybrid", "tensor_model_parallel_size": 4, "sequence_parallel": True}, 64), ({"fp4": "e2m1"}, 128),
        ({"fp8_recipe": "mxfp8", "fp4_recipe": "nvfp4"}, 1),
    ],
    ids=str,
)  # fmt: skip
def test_rows_are_aligned_by_the_flags(flags, align):
    config = configure(**flags)
    assert layout_options(config) == {"align": align, "min_rows": 1}
    refuse_unaligned(config, 3 * align)
    if config.fp8 or config.fp4:
        rejects(f"--fp[84]-format: got '{config.fp8 or config.fp4}'; ", refuse_unaligned, config, 3 * align - 1)


@pytest.mark.parametrize("layer", LAYERS)
def test_rejects_pipelines_whose_stages_take_batches_of_one_length(layer):
    config = configure(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    rejects(r"^variable_seq_lengths: got False; allowed: True", LAYERS[layer], config)
    config.variable_seq_lengths = True
    refuse_unsupported(config)


def test_our_configuration_lets_lengths_vary_where_there_are_stages():
    assert not configure(OurConfig).variable_seq_lengths
    config = configure(OurConfig, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    assert config.variable_seq_lengths
    assert dataclasses.replace(config).variable_seq_lengths
    refuse_unsupported(config)


ORDERS = (
    ({}, None),
    ({"sft": True}, "document"),
    ({"dataloader_inter_document_masking": True}, "pack"),
    ({"dataloader_inter_document_masking": True, "sft": True}, "document"),  # as Megatron's get_batch decides
    ({"dataloader_inter_document_masking": True, "cp_packed_order": "document"}, "document"),
    ({"dataloader_inter_document_masking": True, "cp_packed_order": "Document"}, "document"),
)


@pytest.mark.parametrize(("flags", "order"), ORDERS)
def test_what_megatrons_pipeline_cuts_is_known_from_its_flags(flags, order):
    assert configure(OurConfig, **flags).cp_packed_order == order
    latent = with_options(configure(MLATransformerConfig), argparse.Namespace(cp_codec="fp8", **flags))
    assert (latent.cp_packed_order, latent.cp_codec, latent.cp_layout) == (order, "fp8", "balanced")


def test_options_of_a_configuration_are_kept():
    config = configure(OurConfig, cp_codec="int8")
    assert with_options(config, argparse.Namespace(cp_codec="fp8")) is config
    assert config.cp_codec == "int8"
    config = configure(MLATransformerConfig, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    assert with_options(config, argparse.Namespace()).variable_seq_lengths


def test_rejects_a_stage_without_the_layer_whose_choice_it_shares():
    layer = types.SimpleNamespace(
        config=configure(), layer_number=1, skip_topk=False, source_layer=1, index_topk_freq=2
    )
    SparseCoreAttention._refuse_a_choice_of_another_stage(layer)
    layer.layer_number, layer.skip_topk = 2, True
    SparseCoreAttention._refuse_a_choice_of_another_stage(layer)
    layer.layer_number, layer.source_layer = 4, 3
    says = "--dsa-indexer-topk-freq: got '2: layer 4 uses the keys that layer 3 chose'"
    rejects(says, SparseCoreAttention._refuse_a_choice_of_another_stage, layer)


def test_rejects_an_indexers_loss_over_tensor_parallel_ranks(monkeypatch):
    monkeypatch.setattr(refusals, "HAVE_TE", True)
    changes = {"context_parallel_size": 1, "tensor_model_parallel_size": 2, "dsa_indexer_loss_coeff": 0.1}
    rejects("--dsa-indexer-loss-coeff: got 0.1; allowed: ", build_sparse, **changes)


def test_mixers_of_transformer_engines_stack_are_exchanged_for_ours(monkeypatch):
    stock = specs._local_stack()
    stock.submodules.mamba_layer.submodules.mixer.module = mamba_mixer.MambaMixer
    sparse = stock.submodules.dsa_layer.submodules.self_attention
    sparse.module, sparse.submodules.core_attention.module = absorbed_mla.AbsorbedMLASelfAttention, dsa.DSAttention
    monkeypatch.setattr(specs.hybrid_layer_specs, "hybrid_stack_spec", stock)
    assert specs._te_stack().submodules.mamba_layer.submodules.mixer.module is MambaMixer
    own = specs._te_stack().submodules.dsa_layer.submodules.self_attention
    assert own.module is SparseMLASelfAttention
    assert own.submodules.core_attention.module is SparseCoreAttention
    assert stock.submodules.mamba_layer.submodules.mixer.module is mamba_mixer.MambaMixer  # which is Megatron's own


@pytest.mark.parametrize(
    ("build_with", "impl", "cuda", "says"),
    [
        (specs.TEHybridStack, "local", True, "transformer_engine with this spec. .*is local_hybrid_stack_spec"),
        (specs.LocalHybridStack, "transformer_engine", True, "local with this spec. .*is hybrid_stack_spec"),
        (specs.TEHybridStack, "transformer_engine", False, "local without CUDA"),
        (specs.gpt_layer_spec, "transformer_engine", False, "local without CUDA"),
    ],
)
def test_rejects_layers_of_the_other_implementation(monkeypatch, build_with, impl, cuda, says):
    monkeypatch.setattr(refusals, "HAVE_TE", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    submodules = () if build_with is specs.gpt_layer_spec else (None,)
    rejects(
        f"--transformer-impl: got '{impl}'; allowed: {says}", build_with, configure(transformer_impl=impl), *submodules
    )


def test_local_latent_attention_has_torchs_norms_beside_an_installed_transformer_engine(monkeypatch):
    for module in (refusals, latent_module):
        monkeypatch.setattr(module, "HAVE_TE", True)
    config = configure(cls=MLATransformerConfig, qk_layernorm=True, transformer_impl="local")
    latent = gpt_layer_specs.get_gpt_layer_local_spec(multi_latent_attention=True).submodules.self_attention
    found = {}

    def resolve(self, config, submodules, **others):
        """Does what the constructor of Megatron's layer begins with; dev takes the modules as they are."""
        self.__dict__["config"] = config
        resolved = getattr(self, "_resolve_qk_norm_config", vars)(submodules)
        found.update(resolved)
        raise InterruptedError

    monkeypatch.setattr(multi_latent_attention.MLASelfAttention, "__init__", resolve)
    with pytest.raises(InterruptedError):
        MLASelfAttention(config, latent.submodules)
    assert found["q_layernorm"] is found["kv_layernorm"] is Norm
    assert config.transformer_impl == "local"


def test_warns_of_a_ring_of_all_layers():
    with pytest.warns(UserWarning, match="--cp-comm-type p2p is only for softmax layers. Mamba has no keys"):
        check_comm_type(configure(context_parallel_size=2, cp_comm_type="p2p"), "p2p", "Mamba")


EXPERTS = {"num_moe_experts": 4, "ffn_hidden_size": 64}


def test_experts_whose_result_depends_on_no_neighbour_are_taken():
    alltoall = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
    balanced = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    balanced |= {"moe_router_load_balancing_type": "none"}
    for changes in (alltoall, {"context_parallel_size": 2}, balanced | {"context_parallel_size": 2}):
        refuse_unsupported(configure(**EXPERTS, **changes))
    for changes in COUPLED:  # one rank may
        refuse_unsupported(configure(**EXPERTS, **changes))


COUPLED = [
    {"moe_router_load_balancing_type": "sinkhorn"}, {"moe_router_load_balancing_type": "quantile_balancing"},
    {"moe_expert_capacity_factor": 1.0},
]  # fmt: skip


def build_latent(**changes):
    return MLASelfAttention(configure(MLATransformerConfig, **changes), None, layer_number=1)


def build_mamba(layer_number=1, **changes):
    return MambaMixer(configure(**changes), None, layer_number=layer_number, pg_collection=Groups())


def build_ours(**changes):
    return build(config=configure(OurConfig, **changes))


def build_coupled(**changes):
    refuse_unsupported(configure(**EXPERTS, context_parallel_size=2, **changes))


def set_on(config, changes):
    """Sets what Megatron's own checks of a configuration would refuse before ours."""
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def build_despite(**changes):
    return build(config=set_on(configure(context_parallel_size=2), changes))


def build_spec(**changes):
    return specs.gpt_layer_spec(set_on(configure(), changes))


def build_sparse(**changes):
    own = {"multi_latent_attention": True, "dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 4, "dsa_indexer_topk": 8}
    return SparseMLASelfAttention(set_on(configure(), {"context_parallel_size": 2} | own | changes), None)


def with_shards(cls=OurConfig, context_parallel_size=2, **flags):
    return with_options(configure(cls, context_parallel_size=context_parallel_size), argparse.Namespace(**flags))


def with_dynamic(**flags):
    """With three data-parallel ranks of two context-parallel ones."""
    given = {"max_seqlen_per_dp_cp_rank": None, "min_dynamic_context_parallel_size": 1, "micro_batch_size": 1}
    sizes = {"context_parallel_size": 2, "data_parallel_size": 3, "seq_length": 65}
    return with_options(configure(OurConfig), argparse.Namespace(cp_dynamic=True, **sizes | given | flags))


def with_latent_options(**options):
    return with_options(configure(MLATransformerConfig), argparse.Namespace(**options))


def build_with_latents(**changes):
    return MLASelfAttention(set_on(with_latent_options(cp_latent_mode="expand"), changes), None, layer_number=1)


def half_a_layer(**modules):
    layer = MLASelfAttention.__new__(MLASelfAttention)
    nn.Module.__init__(layer)
    for name, module in modules.items():
        setattr(layer, name, module)
    return layer


def project_by_another():
    half_a_layer(linear_kv_up_proj=nn.Identity())._up_projection()


def infer_with_latents():
    core = build(config=with_latent_options(cp_latent_mode="expand"), others={"k_channels": 192, "v_channels": 128})
    assert (core.slot.latent, core.slot.latent_mode) == ((64, 512), "expand")
    half_a_layer(core_attention=core).get_query_key_value_tensors(torch.ones(4, 1, 32), inference_context=object())


ROUTER = "moe-router-load-balancing-type"
BIASED = "; allowed: .*--moe-router-enable-expert-bias"
INDEXERS_STAGES = {"dsa_indexer_topk_freq": 2, "pipeline_model_parallel_size": 2}
STAGES = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
# A flag, a pattern of what was given and perhaps of what is allowed, and the call.
REJECTED = [
    ("cp-head-chunks", "99", build_ours, {"cp_head_chunks": 99}),
    ("cp-search", "-1.0", build_ours, {"cp_search": -1.0}), ("cp-search", "'1'", build_ours, {"cp_search": "1"}),
    ("cp-search", r"1\.0; allowed: 0 with p2p\.", build_ours,
     {"cp_comm_type": "p2p", "context_parallel_size": 2, "cp_search": 1.0}),
    ("cp-search", r"1\.0; allowed: 0 with a2a and all_gather\.", build_ours,
     {"cp_comm_type": ["a2a", "allgather"], "context_parallel_size": 2, "cp_search": 1.0}),
    *(("logit-rows", given, build_ours, {"logit_rows": value}) for given, value in (("0", 0), ("True", True))),
    *((flag, "True; allowed: off with --logit-rows", build_despite, {"logit_rows": 4, flag.replace("-", "_"): True})
      for flag in ("defer-embedding-wgrad-compute", "overlap-moe-expert-parallel-comm", "fp8-output-proj")),
    ("cross-entropy-fusion-impl", "'linear'; allowed: native or te with --logit-rows", build_despite,
     {"logit_rows": 4, "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}),
    *(("logit-rows", "4; allowed: none with --use-torch-fsdp2", with_shards,
       {"cls": cls, "context_parallel_size": 1, "logit_rows": 4, "use_torch_fsdp2": True})
      for cls in (OurConfig, MLATransformerConfig)),
    ("cp-layout", "'zigzagg'", build_ours, {"cp_layout": "zigzagg"}),
    ("cp-layout", "'auto'; allowed: balanced, contiguous or zigzag with", build_ours, {"cp_layout": "auto", **STAGES}),
    ("linear-cp-mode", "'chunkwisee'", build_ours, {"linear_cp_mode": "chunkwisee"}),
    ("cp-packed-order", "'sequence'", build_ours, {"cp_packed_order": "sequence"}),
    ("apply-rope-fusion", "True", build_latent, {"apply_rope_fusion": True}),
    ("cache-mla-latents", "True", build_latent, {"cache_mla_latents": True}),
    # Only Transformer Engine has this norm.
    ("qk-layernorm", "True", build_latent, {"qk_layernorm": True, "q_lora_rank": None, "transformer_impl": "local"}),
    ("qk-clip", "True", build, {"qk_clip": True}),
    ("log-max-attention-logit", "True", build, {"log_max_attention_logit": True}),
    ("attention-type", "'cross'", build, {"attention_type": "cross"}),
    ("attn-mask-type", "<AttnMaskType.padding.*>", build, {"attn_mask_type": AttnMaskType.padding}),
    ("attn-mask-type", "<AttnMaskType.arbitrary.*>", build, {"attn_mask_type": AttnMaskType.arbitrary}),
    ("reset-attention-mask", "True", build_ours, {"reset_attention_mask": True}),
    ("cp-codec", "'fp9'", with_latent_options, {"cp_codec": "fp9"}),
    ("cp-latent-mode", "'expanded'", with_latent_options, {"cp_latent_mode": "expanded"}),
    ("cp-latent-mode", "'expand'", build_ours, {"cp_latent_mode": "expand"}),  # has no latents
    ("fp8-format", "'hybrid'", build_with_latents, {"fp8": "hybrid"}),
    ("fp4-format", "'e2m1'", build_with_latents, {"fp4": "e2m1"}),
    ("delay-wgrad-compute", "True", build_with_latents, {"delay_wgrad_compute": True}),
    ("cp-latent-mode", "'Identity as linear_kv_up_proj'", project_by_another, {}),
    ("cp-latent-mode", "'expand'", infer_with_latents, {}),
    ("hybrid-context-parallel", "True", build_despite, {"hybrid_context_parallel": True}),
    ("cp-transport", "'hierarchical'; allowed: .*--dynamic-context-parallel", build_ours,
     {"cp_dynamic": True, "cp_transport": "hierarchical"}),
    ("cp-comm-type", r"'a2a\+p2p'; allowed: .*--dynamic-context-parallel", build_ours,
     {"cp_dynamic": True, "cp_comm_type": "a2a+p2p"}),
    ("calculate-per-token-loss", "False; allowed: .*--dynamic-context-parallel", build_ours,
     {"cp_dynamic": True, "calculate_per_token_loss": False}),
    ("dsa-indexer-loss-coeff", r"0\.1; allowed: .*--dynamic-context-parallel", build_ours,
     {"cp_dynamic": True, "dsa_indexer_n_heads": 2, "dsa_indexer_loss_coeff": 0.1}),
    ("moe-aux-loss-coeff", r"0\.1; allowed: .*--dynamic-context-parallel", build_ours,
     {**EXPERTS, "cp_dynamic": True, "moe_aux_loss_coeff": 0.1}),
    ("moe-z-loss-coeff", r"0\.1; allowed: .*--dynamic-context-parallel", build_ours,
     {**EXPERTS, "cp_dynamic": True, "moe_z_loss_coeff": 0.1}),
    *((flag, given, with_dynamic, changes) for flag, given, changes in (
        ("min-dynamic-context-parallel-size", "7; allowed: from 1 to 6", {"min_dynamic_context_parallel_size": 7}),
        ("max-seqlen-per-dp-cp-rank", "32; allowed: at least 33", {"max_seqlen_per_dp_cp_rank": 32}),
        ("micro-batch-size", "2", {"micro_batch_size": 2}),
        ("context-parallel-size", "1; allowed: at least 2", {"context_parallel_size": 1}),
        ("use-megatron-fsdp", "True", {"use_megatron_fsdp": True}),
    )),
    ("cuda-graph-impl", "'local'; allowed: .*GraphTables", build_despite, {"cuda_graph_impl": "local"}),
    ("experimental-attention-variant", "'csa'; allowed: .*leave out --spec", build_spec,
     {"experimental_attention_variant": "csa"}),
    ("mamba-training-ssm-states-dtype", r"torch\.bfloat16", build_mamba,
     {"mamba_training_ssm_states_dtype": torch.bfloat16}),
    ("cp-comm-type", "'p2p'", build_mamba,
     {"layer_number": 2, "context_parallel_size": 2, "cp_comm_type": ["a2a", "p2p"]}),
    *(("use-torch-fsdp2", "True", with_shards, {"cls": cls, "use_torch_fsdp2": True})
      for cls in (OurConfig, MLATransformerConfig)),
    # Experts whose ranks must be equal, and those that depend on which tokens share a rank.
    ("moe-token-dispatcher-type", "'allgather'", build,
     {**EXPERTS, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"}),
    (ROUTER, "'sinkhorn'" + BIASED, build_coupled, COUPLED[0]),
    (ROUTER, "'quantile.*'" + BIASED, build_coupled, COUPLED[1]),
    ("moe-expert-capacity-factor", r"1\.0", build_coupled, COUPLED[2]),
    # Attention whose keys an indexer chooses.
    ("multi-latent-attention", "False", build_sparse, {"multi_latent_attention": False}),
    ("dsa-indexer-topk", "None", build_sparse, {"dsa_indexer_topk": None}),
    ("dsa-kernel-backend", "'tilelang'", build_sparse, {"dsa_kernel_backend": "tilelang"}),
    ("softmax-type", "'learnable'", build_sparse, {"softmax_type": "learnable"}),
    ("cp-latent-mode", "'expand'", build_sparse, {"cp_latent_mode": "expand"}),
    ("tensor-model-parallel-size", "2", build_sparse, {"tensor_model_parallel_size": 2}),
    ("dsa-indexer-topk-freq", "2", build_sparse, {**INDEXERS_STAGES, "recompute_granularity": "selective"}),
    ("dsa-indexer-topk-freq", "2", build_sparse, {**INDEXERS_STAGES, "virtual_pipeline_model_parallel_size": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("flag", "given", "make", "options"), REJECTED)
def test_rejects(flag, given, make, options):
    rejects(f"^--{flag}: got {given}" + ("" if "; allowed: " in given else "; allowed: "), make, **options)


@pytest.mark.parametrize(
    ("impl", "modules", "reason"),
    [
        ("full_iteration", [], "The graph of a whole step"),
        ("transformer_engine", ["attn", "mlp"], "These graphs take tensors only"),
        ("transformer_engine", [], "These graphs take tensors only"),
        ("local", ["mamba"], "Megatron looks for a graph by the fields of packed_seq_params"),
        ("local", ["mlp"], "Megatron captures layers with an MLP whole"),
        ("local", ["moe"], "Megatron looks for a graph by the fields of packed_seq_params"),
        ("transformer_engine", ["moe"], "Experts of a fixed capacity"),
    ],
)
@pytest.mark.parametrize("cls", [OurConfig, MLATransformerConfig])
def test_rejects_each_of_megatrons_graphs_with_its_reason_when_flags_are_read(impl, modules, reason, cls):
    graphs = {"cuda_graph_impl": impl, "cuda_graph_modules": [CudaGraphModule[name] for name in modules]}
    config = set_on(configure(cls), graphs)
    rejects(f"--cuda-graph-impl: got '{impl}'; allowed: none. {reason}", with_options, config, argparse.Namespace())


def test_rejects_batches_that_megatrons_graphs_were_not_captured_for():
    def given(impl, *batches):
        module = ContextParallelModule()
        module.config = types.SimpleNamespace(cuda_graph_impl=impl)
        for lengths, align in batches:
            module.check_graphs(Layout.contiguous(Packing(lengths), 2).padded(align=align))

    given("none", ([6, 2], 1), ([7], 1))
    given("local", ([6, 2], 1), ([1, 7], 1))
    rejects(r"'\[3, 4\] rows on the ranks'; allowed: \[4, 4\], as of the first", given, "local", ([8], 1), ([7], 1))
    rejects("'pads in some batches'", given, "local", ([8], 1), ([7], 4))
    given("local", ([7], 4), ([3, 4], 4))
    rejects("for a batch with pads", given, "transformer_engine", ([7], 4))


def test_options_that_are_refused_elsewhere_are_taken():
    assert configure(OurConfig, cp_layout="auto").cp_layout == "auto"
    with_shards(context_parallel_size=1, use_torch_fsdp2=True)
    with_shards(use_megatron_fsdp=True)
    with_shards(use_torch_fsdp2=False)
    with_dynamic(max_seqlen_per_dp_cp_rank=33, min_dynamic_context_parallel_size=6)
    with_dynamic(context_parallel_size=1, data_parallel_size=1)
    build_ours(**EXPERTS, cp_dynamic=True)


@pytest.mark.parametrize("scheme", ["a2a", "p2p"])
def test_heads_and_keys_are_coded(scheme):
    assert build_ours(cp_codec="fp8", cp_comm_type=scheme).slot.codec == "fp8"


@pytest.mark.parametrize(
    ("option", "given", "unused", "none"),
    [("codec", "fp8", "uncoded", "none"), ("head_chunks", 2, "unchunked", None)],
)
def test_options_that_a_layer_does_not_use_are_left_out_and_said(option, given, unused, none):
    config, ranks = configure(OurConfig, **{f"cp_{option}": given}), types.SimpleNamespace(size=2)
    flag = f"--cp-{option.replace('_', '-')} {given}"
    with pytest.warns(UserWarning, match=f"{flag} does nothing for Mamba, chunkwise, which exchanges no heads"):
        assert spec_options(config, ranks, "Mamba, chunkwise", **{unused: no_heads("chunkwise")})[option] == none
    assert spec_options(config, ranks, "Mamba, headwise", **{unused: no_heads("headwise")})[option] == given


def test_an_order_in_another_spelling_is_that_order():
    documents = Documents(Packing([8, 16, 8]))
    assert documents.layout(2, "Document") == documents.layout(2, "document") != documents.layout(2, "pack")
