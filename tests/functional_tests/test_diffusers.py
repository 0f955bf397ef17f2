"""Diffusion transformers of diffusers over ranks equal the stock model on one: outputs and gradients."""

import copy
import functools
import runpy
import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")

import diffusers

import megatron_cp.diffusers.attend as attend_module
from megatron_cp import CallMismatchError
from megatron_cp.diffusers import enable_context_parallel
from megatron_cp.executor.launch import RankError, run_ranks
from tests.covering import covering
from tests.diffusers_cases import DRAWS, JOINT, MODELS, distance, over_ranks, problem, run
from tests.limits import limit
from tests.refusals import rejects

pytestmark = pytest.mark.filterwarnings("ignore:.*ranks get no head:UserWarning")


def assert_is_one_rank(name, ranks, within=1e-12, **options):
    errors, _ = over_ranks(name, ranks, **options)
    assert errors["output"] <= within
    # Normalisations that cast to fp32 round what each rank's rows leave of a gradient.
    assert max(errors.values()) <= 1e-6


@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_one_rank(name):
    assert_is_one_rank(name, 3)


@pytest.mark.parametrize("name", JOINT)
def test_text_that_every_rank_holds(name):
    assert_is_one_rank(name, 2, text="held")


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "text", "ranks"), covering(tuple(MODELS), ("split", "held"), (2, 5)))
def test_a_model_equals_one_rank_on_any_number(name, text, ranks):
    assert_is_one_rank(name, ranks, text=text)


def test_text_that_a_single_rank_holds_and_that_messages_bring_to_several():
    assert_is_one_rank("qwen", 1, text="held")
    assert_is_one_rank("qwen", 2, text="held", transport="pairwise")


@pytest.mark.parametrize("text", ["split", "held"])
def test_heads_that_travel_in_fp8(text):
    assert 1e-6 < over_ranks("flux", 2, codec="fp8", text=text)[0]["output"] < 0.2


OF_FEW_ROWS = [("hunyuan", "split"), ("qwen", "held"), ("ltx", "split")]
MORE_OF_FEW_ROWS = [(name, text) for name in MODELS for text in ("split", "held") if text == "split" or name in JOINT]


@pytest.mark.parametrize("image_rows", ["", "one"])
@pytest.mark.parametrize(
    ("name", "text"),
    [*OF_FEW_ROWS, *(pytest.param(*each, marks=pytest.mark.thorough) for each in MORE_OF_FEW_ROWS
                     if each not in OF_FEW_ROWS)],
)  # fmt: skip
def test_fewer_rows_than_ranks(name, text, image_rows):
    assert_is_one_rank(name, 3, text_rows=2, image_rows=image_rows, text=text)


def recomputed_on_rank(group, name):
    model, inputs = problem(name)
    _, others = problem(name, text=5)
    enable_context_parallel(model, group)
    found = []
    for checkpointing in (False, True):
        model.train()
        (model.enable_gradient_checkpointing if checkpointing else model.disable_gradient_checkpointing)()
        model.zero_grad()
        first, second = (model(**each, return_dict=False)[0] for each in (inputs, others))
        (first.square().sum() + second.sum()).backward()
        found.append({each: x.grad for each, x in model.named_parameters() if x.grad is not None})
    return found


@pytest.mark.parametrize("name", ["qwen", "hunyuan"])
def test_blocks_that_are_recomputed_have_the_rows_of_their_own_pass(name):
    for plain, recomputed in run_ranks(recomputed_on_rank, 2, name):
        assert plain.keys() == recomputed.keys()
        assert max(distance(recomputed[each], plain[each]) for each in plain) <= 1e-12


def steps_on_rank(group, text):
    model, inputs = problem("flux")
    _, others = problem("flux", text=4)
    context = enable_context_parallel(model, group, text=text)
    described = []
    for _ in range(3):
        for each in (inputs, others):
            with torch.no_grad():
                model(**each)
        described.append(context.explain())
    return described


@pytest.mark.parametrize("text", ["split", "held"])
def test_steps_of_two_guidance_branches_have_two_plans(text):
    for first, second, third in run_ranks(steps_on_rank, 2, text):
        assert first == second == third
        assert first.count("over 2 ranks") == 2
        # The other rank gets 4 rows of text of 2 of 3 heads of 16 numbers.
        assert first.count("only its output travels, at most 1.0 KiB from a rank") == (text == "held")


def half_on_rank(group, name, autocast):
    model, inputs = problem(name)
    model.float()
    inputs = {key: single(x, torch.float32) for key, x in inputs.items()}
    if not autocast:
        model.to(torch.bfloat16)
        inputs = {key: single(x, torch.bfloat16) for key, x in inputs.items()}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        alone = model(**inputs, return_dict=False)[0]
        enable_context_parallel(model, group)
        out = model(**inputs, return_dict=False)[0]
    assert out.dtype == alone.dtype
    return distance(out.float(), alone.float())


def single(x, dtype):
    if isinstance(x, tuple) and isinstance(x[0], torch.Tensor):
        return tuple(single(each, dtype) for each in x)
    return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.few
def test_half_precision(name, autocast):
    assert max(run_ranks(half_on_rank, 2, name, autocast)) <= 3e-2


def own_losses_on_rank(group):
    model, inputs = problem("wan")
    context = enable_context_parallel(model, group, same_loss=False)
    out = model(**inputs, return_dict=False)[0]
    (out.square() if group.rank else out).sum().backward()
    context.reduce_gradients()
    with context.disabled():
        alone = model(**inputs, return_dict=False)[0]
    parameters = [x for x in model.parameters() if x.grad is not None]
    expected = torch.autograd.grad(alone.square().sum() + alone.sum(), parameters)
    return max(distance(x.grad, gradient) for x, gradient in zip(parameters, expected, strict=True))


def test_losses_of_the_ranks_own():
    assert max(run_ranks(own_losses_on_rank, 2)) <= 1e-6


def tables_on_rank(group, text, made):
    model, inputs = problem("hunyuan")
    enable_context_parallel(model, group, text=text)
    with torch.no_grad():
        model(**inputs)
        first = made.count(threading.get_ident())
        model(**inputs)
    return first, made.count(threading.get_ident())


def counted(made, function, *args, **named):
    made.append(threading.get_ident())
    return function(*args, **named)


@pytest.mark.parametrize("text", ["split", "held"])
def test_layers_of_a_second_pass_make_no_plans_and_no_indices(text, monkeypatch):
    made = []  # the thread of each call
    for name in ("plan_attention", "on_device"):
        monkeypatch.setattr(attend_module, name, functools.partial(counted, made, getattr(attend_module, name)))
    for first, both in run_ranks(tables_on_rank, 2, text, made):
        assert both == first > 0


def lora_on_rank(group):
    from peft import LoraConfig

    model, inputs = problem("cogvideox")
    with DRAWS:
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"]))
    for number, parameter in enumerate(model.double().parameters()):
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(number))
    expected, by_name, _ = run(model, inputs)
    out, found, _ = run(model, inputs, enable_context_parallel(model, group))
    assert {each for each in found if "lora" in each} == by_name.keys()
    return distance(out, expected), max(distance(found[each], by_name[each]) for each in by_name)


def test_adapters_of_peft():
    for errors in run_ranks(lora_on_rank, 2):
        assert max(errors) <= 1e-12


def test_the_example_denoises_a_video_as_one_rank():
    folder = str(Path(__file__).parents[2] / "examples")
    main = runpy.run_path(f"{folder}/denoise_video.py")["main"]
    assert max(run_ranks(main, 3)) <= 1e-12


def compiled_on_rank(group):
    model, inputs = problem("flux")
    with torch.no_grad():
        expected = model(**inputs, return_dict=False)[0]
        enable_context_parallel(model, group)
        compiled = torch.compile(model, backend="eager")
        return distance(compiled(**inputs, return_dict=False)[0], expected)


@pytest.mark.thorough
def test_compiled_models():
    # One rank a process: torch's compiler is not for several threads at once.
    assert max(run_ranks(compiled_on_rank, 2, kind="processes", timeout=limit(250))) <= 1e-12


def enabled(name="flux", **options):
    model, inputs = MODELS[name]()
    enable_context_parallel(model, None, **options)
    return model, inputs


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("flux", {"controlnet_block_samples": [torch.zeros(1)]}, "controlnet_block_samples: got 'list'; allowed: None"),
        ("flux", {"joint_attention_kwargs": {"ip_adapter_image_embeds": [1]}}, "ip_adapter_image_embeds: got 'list'"),
        ("hunyuan", {"encoder_attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1, 1]] * 2)}, "a mask with holes"),
        ("flux", {"joint_attention_kwargs": {"attention_mask": torch.ones(1, 1, 1, 44)}}, "attention: got 'a mask'"),
        ("cogvideox", {"attention_kwargs": {"attention_mask": torch.ones(2, 1, 1, 34)}}, "attention: got 'a mask'"),
        ("qwen", {"attention_kwargs": {"attention_mask": torch.ones(2, 1, 1, 32)}}, "kwargs.attention_mask: got"),
        ("flux", {"img_ids": torch.zeros(36, 3)}, "36 rows of image in a tensor"),
    ],
)
def test_rejects_inputs(name, arguments, message):
    model, inputs = enabled(name)
    rejects(message, model, **inputs | arguments)


def test_rejects_models():
    sizes = {"block_out_channels": (32,), "down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    for model, message in (
        (diffusers.UNet2DModel(**sizes), "model: got 'UNet2DModel'; allowed: a model of diffusers: Flux"),
        (torch.nn.Linear(1, 1), "model: got 'Linear'"),
        (enabled()[0], "a model that already runs over a group"),
        (MODELS["hunyuan"](image_condition_type="token_replace")[0], "image_condition_type: got 'token_replace'"),
    ):
        rejects(message, enable_context_parallel, model, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": "both"}, "text: got 'both'; allowed: split or held"),
        ({"scheme": "rong"}, "scheme: got 'rong'"),
        ({"text": "held", "scheme": "p2p"}, "scheme: got 'p2p'; allowed: a2a, where text is held"),
        ({"text": "held", "head_chunks": 2}, "head_chunks: got 2; allowed: 1, where text is held"),
    ],
)
def test_rejects_options(options, message):
    rejects(message, enabled, **options)


def test_processors_that_are_set_later_are_noticed():
    model, inputs = enabled()
    model.set_attn_processor(copy.copy(diffusers.models.transformers.transformer_flux.FluxAttnProcessor()))
    rejects("0 attention layers that ran over the group", model, **inputs)


def test_backends_that_do_not_ask_torch_are_noticed():
    model, inputs = enabled()
    model.requires_grad_(False)  # on CPUs flex has no gradients
    try:
        model.set_attention_backend("_native_math")
        model(**inputs)
        model.set_attention_backend("flex")
        rejects("FluxAttnProcessor with 0 attentions of torch", model, **inputs)
    finally:
        model.set_attention_backend("native")  # diffusers sets that of all models


def other_inputs_on_rank(group, text, noise):
    model, inputs = problem("flux", text=(text or 7) if group.rank else 7)
    enable_context_parallel(model, group)
    if not text:  # the second pass of a shape
        model(**inputs)
    if group.rank:
        inputs["hidden_states"] += noise
    model(**inputs)


@pytest.mark.parametrize(("text", "noise"), [(6, 0.0), (7, 1e-3), (0, 1e-3)], ids=["rows", "noise", "noise later"])
def test_ranks_with_other_inputs_are_named(text, noise):
    with pytest.raises((RankError, CallMismatchError), match="call FluxTransformer2DModel with different inputs"):
        run_ranks(other_inputs_on_rank, 2, text, noise, timeout=limit(60))
