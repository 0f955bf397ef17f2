"""Tiny diffusion transformers of diffusers over ranks that are threads; their rows divide into no number of ranks."""

import functools
import threading
import warnings

import diffusers
import torch

from megatron_cp.diffusers import enable_context_parallel
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import run_ranks

DRAWS = threading.Lock()  # held while anything draws from the generator that threads share


def flux(text=7, batch=1):
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=12, pooled_projection_dim=8, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(batch, 37, 4), "encoder_hidden_states": torch.randn(batch, text, 12),
        "pooled_projections": torch.randn(batch, 8), "timestep": torch.full((batch,), 0.3),
        "img_ids": torch.randn(37, 3), "txt_ids": torch.zeros(text, 3),
    }  # fmt: skip


def wan(text=7, batch=1):
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=3, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=24, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(batch, 4, 3, 6, 10),
        "encoder_hidden_states": torch.randn(batch, text, 16),
        "timestep": torch.full((batch,), 5),
    }


def qwen(text=7, batch=2):
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    mask = torch.ones(batch, text, dtype=torch.long)
    mask[1, 4:] = mask[0, 2:3] = 0  # the model takes holes
    return model, {
        "hidden_states": torch.randn(batch, 25, 16), "encoder_hidden_states": torch.randn(batch, text, 16),
        "encoder_hidden_states_mask": mask, "timestep": torch.full((batch,), 0.4), "img_shapes": [(1, 5, 5)] * batch,
    }  # fmt: skip


def ltx(text=7, batch=2):
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=3, attention_head_dim=8, cross_attention_dim=24,
        num_layers=2, caption_channels=16,
    )  # fmt: skip
    mask = torch.ones(batch, text)
    mask[1, 5:] = 0
    return model, {
        "hidden_states": torch.randn(batch, 31, 4),
        "encoder_hidden_states": torch.randn(batch, text, 16),
        "encoder_attention_mask": mask,
        "timestep": torch.full((batch, 31), 300.0) + torch.arange(31),  # a step for each row
        "num_frames": 1,
        "height": 1,
        "width": 31,
    }


def hunyuan(text=7, batch=2, **settings):
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=3, attention_head_dim=12, num_layers=1, num_single_layers=2,
        num_refiner_layers=1, patch_size=2, text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 4, 4),
        **settings,
    )  # fmt: skip
    mask = torch.ones(batch, text, dtype=torch.long)
    mask[1, 4:] = 0
    return model, {
        "hidden_states": torch.randn(batch, 4, 3, 6, 10), "encoder_hidden_states": torch.randn(batch, text, 16),
        "encoder_attention_mask": mask, "pooled_projections": torch.randn(batch, 8),
        "timestep": torch.full((batch,), 300), "guidance": torch.full((batch,), 1.0),
    }  # fmt: skip


def cogvideox(text=7, batch=2):
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=3, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
        text_embed_dim=16, num_layers=2, sample_width=6, sample_height=6, sample_frames=9, max_text_seq_length=text,
        use_rotary_positional_embeddings=True,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(batch, 3, 4, 6, 6),
        "encoder_hidden_states": torch.randn(batch, text, 16),
        "timestep": torch.full((batch,), 300),
        "image_rotary_emb": (torch.randn(27, 16), torch.randn(27, 16)),
    }


MODELS = {each.__name__: each for each in (flux, wan, qwen, ltx, hunyuan, cogvideox)}
JOINT = ("flux", "qwen", "hunyuan", "cogvideox")  # attentions over image and text together


def doubled(x):
    """Returns tensors in float64, also those in tuples."""
    if isinstance(x, tuple) and isinstance(x[0], torch.Tensor):
        return tuple(map(doubled, x))
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def problem(name, text=7, image_rows="", **settings):
    """Returns a model in float64 with random parameters, and its inputs; equal on ranks that are threads.

    Args:
        text: rows of text.
        image_rows: "one" for an image of a single row.
    """
    with DRAWS:
        torch.manual_seed(0)
        model, inputs = MODELS[name](text=text, **settings)
        for parameter in model.parameters():  # no zeros or ones, which hide what they multiply
            torch.nn.init.normal_(parameter, std=0.3)
    inputs |= _one_image_row(name, inputs) if image_rows else {}
    return model.double().eval(), {key: doubled(x) for key, x in inputs.items()}


def _one_image_row(name, inputs):
    """Returns the inputs that have a row for each row of the image, with a single one."""
    hidden = inputs["hidden_states"]
    if name in ("wan", "hunyuan"):
        return {"hidden_states": hidden[:, :, :1, :2, :2]}
    if name == "cogvideox":
        return {
            "hidden_states": hidden[:, :1, :, :2, :2],
            "image_rotary_emb": tuple(x[:1] for x in inputs["image_rotary_emb"]),
        }
    others = {
        "flux": lambda: {"img_ids": inputs["img_ids"][:1]},
        "qwen": lambda: {"img_shapes": [(1, 1, 1)] * len(hidden)},
        "ltx": lambda: {"timestep": inputs["timestep"][:, :1], "width": 1},
    }
    return {"hidden_states": hidden[:, :1]} | others[name]()


def run(model, inputs, context=None):
    """Returns the output, the gradients of a weighted sum of it by name, and those of image and text.

    The gradients of the parameters are reduced over the ranks of a context.
    """
    rows = ("hidden_states", "encoder_hidden_states")
    given = {key: x.clone().requires_grad_() if key in rows else x for key, x in inputs.items()}
    out = model(**given, return_dict=False)[0]
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    if context is not None:
        context.reduce_gradients()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return out.detach(), gradients, {name: given[name].grad for name in rows}


def over_ranks(name, size, *, text_rows=7, image_rows="", **options):
    """Returns a model's largest errors over ranks beside one rank, and the plans that a rank's attentions ran.

    Errors are shares of the largest value, of the output and of the gradients of inputs and of parameters. Each rank
    also runs the model again in inference mode, and then disabled, for the same bits.

    Args:
        options: of `enable_context_parallel`.

    Raises:
        ArgumentError: every rank refused the options, in the same words.
    """
    out, gradients, of_inputs = _alone(name, text_rows, image_rows)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*ranks get no head")
        found = run_ranks(_on_rank, size, (name, text_rows, image_rows), options)
    refusal = next((each for each in found if isinstance(each, ArgumentError)), None)
    if refusal is not None:
        assert [str(each) for each in found] == [str(refusal)] * size
        raise refusal
    outs, by_name, inputs_by_name, disabled, plans = zip(*found, strict=True)
    assert all(torch.equal(each, out) for each in disabled)
    assert all(each.keys() == gradients.keys() for each in by_name)
    shares = {key: [each[key] for each in inputs_by_name if each.get(key) is not None] for key in of_inputs}
    errors = {
        "output": max(distance(each, out) for each in outs),
        "gradients": max(distance(each[key], value) for each in by_name for key, value in gradients.items()),
        "input_gradients": max(distance(sum(shares[key]), value) for key, value in of_inputs.items()),
    }
    return errors, plans[0]


@functools.lru_cache(64)
def _alone(*sizes):
    return run(*problem(*sizes))


def _on_rank(group, sizes, options):
    model, inputs = problem(*sizes)
    try:
        context = enable_context_parallel(model, group, **options)
        out, gradients, of_inputs = run(model, inputs, context)
    except ArgumentError as error:
        return error
    with torch.inference_mode():
        assert torch.equal(model(**inputs, return_dict=False)[0], out)
    with context.disabled(), torch.no_grad():
        disabled = model(**inputs, return_dict=False)[0]
    return out, gradients, of_inputs, disabled, [p for each in context._enabled for p in each.attention.plans.values()]


def distance(found, expected):
    """Returns the largest difference, as a share of the largest value."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3))
